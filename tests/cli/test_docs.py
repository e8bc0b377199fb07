"""The documentation runs: code blocks, shell commands, config files, links."""

from __future__ import annotations

import csv
import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import forked
import stepformer as sf
from stepformer.base.plugins import is_ours
from stepformer.catalogue import unlisted_templates
from stepformer.catalogue.recipes import load_recipe, recipe_names
from stepformer.oracles import attentions
from stepformer.rules import splittings, templates
from stepformer.study.ledger import ledger
from stepformer.study.ledger_views import counted
from stepformer.training.config import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = [page for folder in ("docs", "docs/reference") for page in (ROOT / folder).glob("*.md")]
PAGES = sorted([*(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "README")), *WRITTEN])
RUNNABLE = [
    "README.md",
    *(
        f"docs/{page}.md"
        for page in (
            *("attention", "build-a-model", "curvature", "evaluate", "generate-text", "inside-the-network", "jacobian"),
            *("optimizers", "prepare-data", "recipes", "reference/models", "reference/runs", "train", "trust-region"),
        )
    ),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run(command: str, folder: Path) -> str:
    """What a command of a page prints, which starts with `stepformer`."""
    name, *words = shlex.split(command)
    assert name == "stepformer"
    done = forked.stepformer(*words, cwd=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_python(code: str, folder: Path) -> str:
    done = forked.python(code, cwd=folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# Training steps of the audits on the pages: the fewest that the command takes show that training works.
AUDITS = pytest.mark.parametrize("steps", [30, pytest.param(60, marks=pytest.mark.slow)])


@pytest.mark.parametrize("page", RUNNABLE)
def test_python_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    code = "\n".join(blocks(ROOT / page, "python"))
    assert code
    if "huggingface" in code:
        pytest.importorskip("transformers")
    run_python(code, tmp_path)


def test_the_loop_that_the_readme_links_to_stands_alone(tmp_path: Path) -> None:
    section = (
        (ROOT / "docs/build-a-model.md").read_text().partition("\n## Train it yourself\n")[2].partition("\n## ")[0]
    )
    (tmp_path / "section.md").write_text(section)
    run_python("\n".join(blocks(tmp_path / "section.md", "python")), tmp_path)


LIGHTNING = """
class lightning:
    class LightningModule(torch.nn.Module):
        manual_backward = staticmethod(torch.Tensor.backward)

        def optimizers(self):
            self.global_step += len(self.all.parts)
            return self.all.parts
"""


def test_the_class_for_lightning_takes_the_steps_of_the_loop(tmp_path: Path) -> None:
    """With a stand-in that has what the class uses of Lightning."""
    page = ROOT / "docs/optimizers.md"
    (block,) = blocks(page, "py")
    ours = next(code for code in blocks(page, "python") if "Optimizers(" in code)
    code = f"""{ours}{LIGHTNING}{block}
twins = [sf.build(model.config, seed=0) for _ in range(2)]
plain, inside = Optimizers(twins[0], config.optim, steps=3), InLightning(twins[1], config)
inside.global_step, parts = 0, inside.configure_optimizers()
for step in range(3):
    tokens = torch.randint(97, (2, 33))
    plain.zero_grad()
    twins[0](tokens[:, :-1], tokens[:, 1:]).loss.backward()
    plain.clip()
    plain.step(step)
    inside.training_step((tokens[:, :-1], tokens[:, 1:]), step)
assert inside.automatic_optimization is False
assert all(map(torch.equal, *(twin.parameters() for twin in twins)))
assert plain.rates() == inside.all.rates()
"""
    run_python(code, tmp_path)


def test_config_and_commands_of_the_build_page(tmp_path: Path) -> None:
    page = ROOT / "docs/build-a-model.md"
    (tmp_path / "model.toml").write_text("\n".join(blocks(page, "toml")))
    commands = [line for block in blocks(page, "bash") for line in block.splitlines() if line.startswith("stepformer")]
    assert len(commands) == 3
    for command in commands:
        run(command, tmp_path)


@AUDITS
def test_write_your_own_rule_page(tmp_path: Path, steps: int) -> None:
    """The rule has at most 25 lines, lives in a file of its own, and passes the audits the page tells you to run."""
    page = ROOT / "docs/write-your-own-rule.md"
    rule, usage, mlp = blocks(page, "python")
    assert len(rule.strip().splitlines()) <= 25
    (tmp_path / "qhm.py").write_text(rule)
    (tmp_path / "mish.py").write_text(mlp)
    printed = run_python(usage, tmp_path)
    assert "nu_attn" in printed
    commands = [line for block in blocks(page, "bash") for line in block.splitlines()]
    assert sum(command.startswith("stepformer audit") for command in commands) == 4
    for command in commands:
        printed = run(command.replace(" audit ", f" audit --steps {steps} "), tmp_path)
        if " audit " in command:
            assert "1 of 1 pass" in printed
    refused = forked.stepformer("show", "qhm", "splitting=imex", "--plugin", "qhm.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert "drifts along v alone" in refused.stderr


@pytest.mark.slow
@AUDITS
def test_write_your_own_attention_page(tmp_path: Path, steps: int) -> None:
    """The attention and the integrator of the page, each in its file, pass the audits the page tells you to run."""
    page = ROOT / "docs/write-your-own-attention.md"
    for block in blocks(page, "python"):
        name = block.splitlines()[0].removeprefix("# ")
        assert len(block.strip().splitlines()) <= 36
        (tmp_path / name).write_text(block)
    commands = [line for block in blocks(page, "bash") for line in block.splitlines()]
    assert len(commands) == 5
    assert commands[-1].startswith("stepformer flow order ")  # ten seconds, and test_flows.py runs it
    for command in commands[: 5 if steps > 30 else 4]:
        printed = run(command.replace(" audit ", f" audit --steps {steps} "), tmp_path)
        assert "1 of 1 pass" in printed if " audit " in command else "kick-drift" in printed


@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_write_your_own_extra_page(tmp_path: Path, steps: int) -> None:
    """The extra of the page, of at most 25 lines, is shown and passes the audit the page tells you to run."""
    page = ROOT / "docs/write-your-own-extra.md"
    (block,) = blocks(page, "python")
    assert len(block.strip().splitlines()) <= 25
    (tmp_path / "echo.py").write_text(block)
    show, audit = [line for block in blocks(page, "bash") for line in block.splitlines()]
    printed = run(show, tmp_path)
    assert re.search(r"extra echo +before the layer x = x \+ lambda LN\(x_0\)", printed)
    assert "fused: one pass between two oracle calls" in re.sub(r"\s+", " ", printed)
    assert "1 of 1 pass" in run(audit.replace(" audit ", f" audit --steps {steps} "), tmp_path)


def test_the_audit_that_the_readme_links_covers_every_preset() -> None:
    text = (ROOT / "docs/raw/2026-11-audit.txt").read_text()
    rows = {line.split()[0] for line in text.splitlines() if line.strip()}
    audited = {*sf.presets(), *(name for name in unlisted_templates() if is_ours(templates[name].component))}
    assert audited <= rows
    assert f"{len(audited)} of {len(audited)} pass" in text


@pytest.mark.parametrize("steps", [90, pytest.param(300, marks=pytest.mark.slow)])
def test_the_audit_page_shows_what_the_audit_prints(tmp_path: Path, steps: int) -> None:
    page = (ROOT / "docs/audit.md").read_text()
    words = ("audit", "leak-shift", "--plugin", str(ROOT / "tests/support/leaky.py"), "--json", "--steps", str(steps))
    done = forked.stepformer(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "loss 0.369 on unpredictable tokens" in page
    for kind in ("change the logits before them", "cached logits differ", "below ln V"):
        assert kind in done.stdout
        assert kind in page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_pages_name_every_template_and_splitting() -> None:
    for page in (ROOT / "docs" / f"{name}.md" for name in ("features", "ideas", "build-a-model")):
        text = page.read_text()
        for registry in (templates, splittings):
            for entry in registry:
                if entry.component.__module__.startswith("stepformer."):
                    assert entry.name in text, f"{page.name}: {entry.name}"


@pytest.mark.parametrize("page", ["README.md", "docs/features.md"])
def test_the_catalogue_numbers(page: str) -> None:
    text = (ROOT / page).read_text()
    shipped = [e for e in templates if e.component.__module__.startswith("stepformer.")]
    assert f"**{len(shipped)} templates**" in text
    assert f"**{len(splittings.names())} splittings**" in text
    own = [e for e in attentions if e.component.__module__.startswith("stepformer.")]
    assert f"**{len(own)} attentions**" in text
    assert f"**{len(sf.presets())} presets**" in text
    recipes = [load_recipe(name) for name in recipe_names()]
    assert f"**{len(recipes)} recipes**" in text
    assert f" {sum(len(recipe.runs) for recipe in recipes)} runs" in text


def interval(row: dict[str, str], prefix: str = "", digits: int = 3) -> str:
    """A difference as the pages print it, from a row of a comparison.csv."""
    mean, low, high = (f"{float(row[f'{prefix}difference{part}']):+.{digits}f}" for part in ("", "_low", "_high"))
    return f"{mean} [{low}, {high}]"


def rows_of(raw: str) -> dict[str, dict[str, str]]:
    with (ROOT / "docs/raw" / raw).open() as file:
        return {row["architecture"]: row for row in csv.DictReader(file)}


def test_the_table_of_geometries_is_the_one_measured() -> None:
    page = (ROOT / "docs/attention.md").read_text()
    rows = rows_of("2026-11-geometries.csv")
    assert {sf.preset(name).name for name in rows} >= {
        name for name in sf.presets() if sf.preset(name).config.attention != "softmax"
    }
    for name, row in rows.items():
        difference = interval(row) if row["difference"] else ""
        numbers = f"{float(row['loss']):.3f} | {difference} | {float(row['speed_ratio']):.2f}"
        assert f"| {name} | {numbers} | {int(row['parameters']):,} |" in page


def test_the_evidence_in_the_readme_is_that_of_its_raw_files() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    short, long = rows_of("2026-11-rivals/25M.csv"), rows_of("2026-11-recipe/proof-rows-to-vanilla.csv")["yurii"]
    attnres = [f"{abs(float(short['attnres'][f'difference{part}'])):.3f}" for part in ("", "_high", "_low")]
    assert "win by {} [{}, {}] on English text at 25M tokens".format(*attnres) in text
    claims = ledger()
    assert f"Of {len(claims)} claims" in text
    assert counted(claims) in text
    (measured,) = (e for part in claims[0].parts for e in part.evidence if e.source.name == "mix-33M")
    differences = [float(word) for word in re.findall(r"[+-]\d\.\d+", str(measured))]
    for row in (short["yurii"], short["vanilla"], long):
        assert round(int(row["parameters"]) / 1e6) == {"yurii": 77, "vanilla": 51}[row["architecture"]]
    for row in (
        f"8 of 512 | 77M, GPT 51M | 25M | 3 | {interval(short['yurii'])} |",
        "6 of 384 | 50M, GPT 30M | 33M | 3 | {:+.3f} [{:+.3f}, {:+.3f}] |".format(*differences),
        f"8 of 512 | 77M, GPT 51M | 50M | 3 | {interval(long)} |",
        f"OpenWebText | 8 of 512 | 77M, GPT 51M | 50M | 3 | {interval(long, 'held_out_owt10k_val_')} |",
    ):
        assert row in text
    shown = next(block for block in blocks(ROOT / "README.md", "console") if "--match parameters" in block)
    raw = (ROOT / "docs/raw/2026-11-tales-matched/terminal.txt").read_text()
    assert all(line in raw for line in shown.splitlines() if line != "...")


@pytest.mark.parametrize("page", ["README.md", "docs/what-to-use.md"])
def test_the_table_of_the_proof_is_that_of_its_raw_file(page: str) -> None:
    rows = rows_of("2026-11-recipe/proof-rows-to-modern.csv")
    table = (ROOT / page).read_text().partition("| | parameters | Wikipedia |")[2].partition("\n\n")[0]
    lines = table.replace("**", "").splitlines()[2:]
    assert len(lines) == {"README.md": 4, "docs/what-to-use.md": len(rows)}[page]
    for line in lines:
        label, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        row = rows["deeper" if label.endswith("one layer more") else label.split("`")[1]]
        expected = [f"{int(row['parameters']) / 1e6:.1f}M"]
        for text in ("held_out_wiki_val_", "held_out_owt10k_val_"):
            difference = interval(row, text) if row["architecture"] != row["baseline"] else ""
            expected += [f"{float(row[f'{text}loss']):.3f}", difference]
        assert shown == expected


def proof(table: str, row: str, text: str = "held_out_wiki_val_") -> tuple[str, str]:
    """A difference of the proof with its interval, as the pages write it: what `glide` has less, and the size alone."""
    found = rows_of(f"2026-11-recipe/proof-{table}.csv")[row]
    sizes = [abs(float(found[f"{text}difference{part}"])) for part in ("", "_low", "_high")]
    mean, low, high = sizes[0], *sorted(sizes[1:])
    return f"-{mean:.3f} [-{high:.3f}, -{low:.3f}]", f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def test_what_the_pages_say_of_the_recipe_is_in_its_raw_files() -> None:
    page, readme = (re.sub(r"\s+", " ", (ROOT / name).read_text()) for name in ("docs/what-to-use.md", "README.md"))
    first = page.partition("## In short")[0].replace(" nats [", " [")
    for label, *source in (
        ("| `vanilla` | 8 of 512 | 4 |", "four-seeds-to-glide", "vanilla"),
        ("| `modern` | 8 of 512 | 4 |", "four-seeds-to-glide", "modern"),
        ("| `vanilla` | 12 of 768 | 3 |", "small-to-glide", "vanilla"),
        ("| `modern` | 12 of 768 | 3 |", "small-to-glide", "modern"),
        ("| `vanilla`, which has 1.35 times the seconds | 8 of 512 | 3 |", "seconds-to-vanilla", "glide"),
    ):
        assert f"{label} {proof(*source)[0]} | {proof(*source, 'held_out_owt10k_val_')[0]} |" in page
    assert proof("seconds-to-vanilla", "glide")[1] in readme
    assert proof("small-to-glide", "modern")[1] in readme
    for source in (("four-seeds-to-glide", "vanilla"), ("four-seeds-to-vanilla", "modern")):
        assert proof(*source)[1] in first
    assert proof("four-seeds-to-glide", "modern")[1] in first
    for source in (("small-to-glide", "vanilla"), *((f"rows-to-{of}", "normed-relu2") for of in ("glide", "modern"))):
        assert proof(*source)[1] in first
        assert proof(*source)[1] in readme
    rows = rows_of("2026-11-recipe/proof-seconds-to-vanilla.csv")
    short, long = (sum(map(float, rows[name]["seconds_by_seed"].split())) for name in ("glide", "vanilla"))
    assert f"takes {100 * short / long:.1f} % of the GPU seconds" in readme
    assert f"which has {long / short:.2f} times the seconds" in page
    speeds = (ROOT / "docs/raw/2026-11-recipe/speeds-glide.txt").read_text()
    wide = re.search(r"^glide +[\d,.]+ +(\S+)", speeds, re.M)
    long_context = re.search(r"\| glide .* (\S+) \|$", speeds, re.M)
    assert wide
    assert long_context
    assert f"| **`glide`**; at context 512 | {long_context[1]}; {wide[1]} |" in page


def test_keys_named_in_the_pages_exist() -> None:
    """A renamed key must not live on in the pages."""
    pages = "\n".join(
        (ROOT / "docs" / f"{page}.md").read_text() for page in ("train", "optimizers", "many-gpus", "compare")
    )
    keys = {key for kind in SECTIONS.values() for key in kind.field_names()}
    for word in re.findall(r"`(?:optim|train|data)\.(\w+)`", pages):
        assert word in keys, word
    for word in re.findall(r"`(\w+)=[^`]*`", pages):
        known = keys | {f.name for f in dataclasses.fields(sf.ModelConfig)} | {"preset", "size", "key"}
        assert word in known, word


def test_no_machine_paths_or_hosts() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    here = Path(__file__).resolve()
    pattern = re.compile(r"/(?:work|root|home|tmp/bash)[/_]|py" r"pi\.org|" r"files\.pythonhosted")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ".cff", ".in", ""} and path.resolve() != here:
            assert not pattern.search(path.read_text()), name
