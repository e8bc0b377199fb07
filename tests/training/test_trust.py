"""A row in a table: the same optimizer for all rows, every difference said, code with an identity."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import forked
import stepformer as sf
from runs import small_run, stop_after
from stepformer.base.errors import ChangedRuleError, ConfigError, InputError
from stepformer.base.files import write_json
from stepformer.base.plugins import identity
from stepformer.base.settings import setting
from stepformer.cli import main
from stepformer.data.corpus import Corpus
from stepformer.optim import OptimConfig
from stepformer.optim.config import rate_factor
from stepformer.oracles import fresh_call
from stepformer.study import compare, load_records
from stepformer.study.differences import differences, fair, flat
from stepformer.training import RunConfig, Stopped, resume, run_config, train
from stepformer.training import config as config_file
from stepformer.training.extending import extend
from stepformer.training.metrics import read_metrics
from stepformer.training.runs import environment

SMALL = ["n_layer=1", "n_head=2", "d_model=16", "context=16", "batch=4", "eval_tokens=256", "device=cpu", "steps=6"]
RULE = """
import stepformer as sf


@sf.register_template("tilted", equation="x' = x + c g")
class Tilted(sf.Template):
    def kick(self, s, c, g, scale=1.0):
        return s.replace(u=scale * FACTOR * g)

    def drift(self, s, c, scale=1.0):
        return s.without("u").replace(x=s.x + s.u)
"""


def told(folder: Path, name: str = "result.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


# One optimizer for all rows.


def test_rates_at_the_anchors() -> None:
    for name, keys in (("muon", ("lr_embedding", "lr_norm")), ("adamw", ("lr", "lr_embedding", "lr_norm"))):
        tiny = run_config("vanilla", [f"optim.name={name}", "steps=500"]).optim
        small = run_config("vanilla", [f"optim.name={name}", "steps=10000", "size=small"]).optim
        assert [getattr(tiny, key) for key in keys] == [6e-3] * len(keys)
        assert [getattr(small, key) for key in keys] == [6e-4] * len(keys)
    assert run_config("vanilla", ["steps=10"]).optim.lr_norm == 6e-3  # no more than has been tried


def test_the_factor_is_the_documented_one() -> None:
    """docs/optimizers.md: sqrt(10,000/steps * batch/32) (7,077,888 / (width^2 depth))^p, p such that tiny has 10."""
    p = math.log(10 / math.sqrt(20)) / math.log(12 * 768**2 / (4 * 128**2))
    for steps, batch, width, depth in ((500, 32, 128, 4), (3000, 64, 384, 6), (40_000, 480, 1024, 24), (9, 1, 64, 2)):
        expected = math.sqrt(10_000 / steps * batch / 32) * (12 * 768**2 / (depth * width**2)) ** p
        assert rate_factor(steps, batch, width, depth) == pytest.approx(min(10, expected), rel=1e-12)


def test_a_name_a_file_and_python_have_one_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "same.toml"
    file.write_text('[model]\npreset = "vanilla"\n')
    words = ["n_layer=2", "n_head=2", "d_model=64", "context=32", "steps=70", "batch=8"]
    named, read = run_config("vanilla", words), run_config(file, words)
    model = sf.model_config("vanilla", n_layer=2, n_head=2, d_model=64, context=32, vocab_size=256)
    written = RunConfig(model, train=named.train)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[model]\nn_layer=2\nn_head=2\nd_model=64\ncontext=32\n[train]\nsteps=70\nbatch=8\n")
    assert named.optim == read.optim == written.optim == run_config(recipe).optim
    assert len({config.for_vocabulary(300).hash for config in (named, read, run_config(recipe))}) == 1


def test_rates_that_are_set_win(tmp_path: Path) -> None:
    assert run_config("vanilla", ["lr_norm=1e-3"]).optim.lr_norm == 1e-3
    for name in ("momentum-streams-tinystories", "sympformer-table-1-hamiltonian"):
        assert not run_config(name).optim.unset & {"lr", "lr_embedding", "lr_norm", "lr_coefficient"}


def test_a_study_has_the_rates_of_its_baseline() -> None:
    rows = {name: run_config("vanilla", words) for name, words in (("a", []), ("wider", ["d_model=512"]))}
    assert rows["a"].optim.lr_norm != rows["wider"].optim.lr_norm
    found = fair(rows, "a", ["d_model"])
    assert found["a"].optim == found["wider"].optim
    assert found["a"].for_vocabulary(300).optim == rows["a"].optim  # and they stay


# Every difference is said.


def test_every_preset_can_be_compared_with_every_other() -> None:
    """Components bring options of their own, some of which say how to compute: these are no differences."""
    fair({name: run_config(name, ["size=tiny", "steps=500"]) for name in sf.presets()}, "gd-euler")


def test_what_is_no_architecture_is_refused_unless_allowed() -> None:
    rows = {"a": run_config("vanilla"), "b": run_config("yurii", ["batch=8", "lr=0.5", "corpus=other"])}
    with pytest.raises(ConfigError) as refused:
        fair(rows, "a")
    text = str(refused.value)
    for piece in (
        "train.batch (a 32, b 8)",
        "optim.lr (a 0.02, b 0.5)",
        "data.corpus (a tales, b other)",
        "--allow lr",
    ):
        assert piece in text
    assert "template" not in text
    fair(rows, "a", ["batch", "optim.lr", "corpus"])
    with pytest.raises(ConfigError, match="no row has such a setting"):
        fair(rows, "a", ["batch", "lr", "corpus", "bach"])


def test_every_setting_is_of_an_architecture_or_not() -> None:
    """A key added anywhere is a difference by itself; only those of architectures are meant."""
    plain, other = flat(run_config("vanilla")), flat(run_config("symp-ab2", ["n0=5", "steps=7", "n_layer=9"]))
    found = {d.key: d.meant for d in differences({"a": plain, "b": other})}
    assert found["model.template"]
    assert found["model.attention"]
    assert found["model.n0"]
    assert not found["model.n_layer"]
    assert not found["train.steps"]
    sections = {f"{name}.{f.name}" for name, kind in config_file.SECTIONS.items() for f in dataclasses.fields(kind)}
    assert sections <= set(plain)


def test_the_same_architecture_under_two_names_is_identical(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "same.toml"
    file.write_text('[model]\npreset = "vanilla"\n')
    words = [*SMALL, f"corpus={corpus}"]
    assert main(["compare", "vanilla", str(file), "n_layer=1", f"corpus={corpus}", "--out", str(tmp_path / "no")]) == 2
    assert "The rows differ in model.d_model (vanilla 128, same 768)" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    out = tmp_path / "study"
    assert main(["compare", "vanilla", str(file), *words, "--seeds", "2", "--out", str(out), "--quiet"]) == 0
    assert "identical" in capsys.readouterr().out
    table = sf.compare("vanilla", str(file), out=out, seeds=2, **_values(words))
    assert [row.verdict for row in table.rows] == ["baseline", "identical"]
    assert table.rows[1].difference is not None
    assert table.rows[1].difference.mean == 0


def _values(words: list[str]) -> dict[str, Any]:
    pairs = (word.split("=", 1) for word in words)
    return {key: int(value) if value.isdigit() else value for key, value in pairs}


def test_a_table_in_python(corpus: Path, tmp_path: Path) -> None:
    model = sf.model_config("yurii", size="tiny", n_layer=1, n_head=2, d_model=16, context=16)
    settings = _values([*SMALL, f"corpus={corpus}"])
    table = sf.compare("vanilla", "yurii", {"mine": model}, out=tmp_path / "study", seeds=2, **settings)
    vanilla, yurii, mine = table.rows
    assert yurii.records[0].weights_sha256 == mine.records[0].weights_sha256 != vanilla.records[0].weights_sha256
    frame = table.to_frame()
    assert list(frame["architecture"]) == ["vanilla", "yurii", "mine"]
    assert frame["loss"][1] == pytest.approx(yurii.loss.mean, abs=1e-6)
    assert "<table" in table._repr_html_()
    assert "| vanilla" in str(table)
    table.plot(tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    assert len(table.plot().axes) == 2
    swept = sf.sweep("vanilla", {"lr": (0.01, 0.02)}, out=tmp_path / "sweep", **settings)
    assert [row.label for row in swept.rows] == ["lr=0.01", "lr=0.02"]
    assert swept.notes[0].startswith("Best of 2 points: lr=0.0")
    assert "at the edge of the grid in lr" in swept.notes[1]
    longer = sf.sweep("vanilla", {"steps": (2, 4)}, out=tmp_path / "longer", **{**settings, "steps": 2})
    assert [row.verdict for row in longer.rows] == ["baseline", "not paired"]
    assert [row.records[0].tokens for row in longer.rows] == list(longer.to_frame()["train_tokens"])
    assert "nothing can be paired" in str(longer)


# Code has an identity.


def rule(folder: Path, factor: float) -> Path:
    path = folder / "tilted.py"
    path.write_text(RULE.replace("FACTOR", str(factor)))
    return path


@pytest.mark.slow
def test_an_edited_plugin_is_another_rule(corpus: Path, tmp_path: Path) -> None:
    """In processes of their own, as people do it."""
    path, words = rule(tmp_path, 0.5), [*SMALL, f"corpus={corpus}", "--plugin", "tilted.py", "--quiet"]

    def say(*command: str, status: int = 0) -> str:
        done = forked.stepformer(*command, cwd=tmp_path)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    say("train", "tilted", *words, "--out", "run")
    copies = list((tmp_path / "run" / "plugins").rglob("*.txt"))
    assert [copy.read_text() for copy in copies] == [path.read_text()]
    before = say("eval", "run")
    say("compare", "vanilla", "tilted", *words, "--out", "study")
    rule(tmp_path, 0.25)
    for command in (
        ("eval", "run"),
        ("resume", "run"),
        ("generate", "run", "a"),
        ("compare", "vanilla", "tilted", *words, "--seeds", "2", "--out", "study"),
        ("compare", "--runs", "study/vanilla-s42", "study/tilted-s42", "--out", "again"),
        ("report", "study", "--out", "page"),
    ):
        text = say(*command, status=2)
        assert "was made with another" in text, command
        assert text.count("SHA-256") == 1
    rule(tmp_path, 0.5)
    assert say("eval", "run") == before
    (tmp_path / "moved.py").write_text(path.read_text())  # the same rule in another place is the same rule
    path.unlink()
    (tmp_path / "moved.py").rename(path)
    assert say("eval", "run") == before


def test_files_that_a_plugin_imports_belong_to_it(corpus: Path, tmp_path: Path) -> None:
    package = tmp_path / "rules"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "numbers_of.py").write_text("FACTOR = 0.5\n")
    (package / "tilted.py").write_text("from rules.numbers_of import FACTOR\n" + RULE)
    words = [*SMALL, f"corpus={corpus}", "--plugin", "rules/tilted.py", "--quiet"]
    assert forked.stepformer("train", "tilted", *words, "--out", "run", cwd=tmp_path).returncode == 0
    (package / "numbers_of.py").write_text("FACTOR = 0.25\n")
    done = forked.stepformer("eval", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "numbers_of.py" in done.stderr


IMPORTED = """
import stepformer as sf
import tilted
from pathlib import Path
from stepformer.base.errors import ChangedRuleError

sizes = dict(n_layer=1, n_head=2, d_model=16, context=16)
settings = dict(**sizes, batch=4, eval_tokens=256, device="cpu", steps=2, corpus=CORPUS)
sf.train(sf.run_config("tilted", **settings), "run", quiet=True)
print(Path("run/plugins/0/tilted.py.txt").read_text() == Path("tilted.py").read_text())
Path("tilted.py").write_text(Path("tilted.py").read_text().replace("0.5", "0.25"))
for again in (lambda: sf.train(sf.run_config("tilted", **settings), "edited", quiet=True), lambda: sf.load_run("run")):
    try:
        again()
    except ChangedRuleError as error:
        print("changed after this process imported it" in str(error))

"""


@pytest.mark.slow
def test_a_rule_that_python_imported_is_what_it_was_then(corpus: Path, tmp_path: Path) -> None:
    rule(tmp_path, 0.5)
    program = tmp_path / "program.py"
    program.write_text(IMPORTED.replace("CORPUS", repr(str(corpus))))
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_two_rules_of_one_name_in_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "a_notebook", ModuleType("a_notebook"))

    def cell(factor: float) -> type:
        """As a notebook's cell makes it, each time it is run."""
        found: dict[str, type] = {}
        code = f"class Rule:\n    start = {factor}\n    def kick(self, g):\n        return {factor} * g\n"
        exec(code, {"__name__": "a_notebook"}, found)
        return found["Rule"]

    first = identity([], {"template 'of a test'": cell(0.5)})
    assert identity([], {"template 'of a test'": cell(0.5)}) == first
    with pytest.raises(ChangedRuleError, match="already used another template 'of a test'"):
        identity([], {"template 'of a test'": cell(0.25)})


def test_runs_of_different_code_are_not_one_row(corpus: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        train(small_run(corpus, steps=4, seed=seed), tmp_path / f"a-{seed}", quiet=True, label="a")
    folder = tmp_path / "a-2"
    for run, digest in ((tmp_path / "a-1", "1"), (folder, "2")):
        code = {"template 'nesterov'": {"nesterov.py": digest}}
        write_json(run / "run.json", told(run, "run.json") | {"code": code})
    with pytest.raises(InputError, match=r"not one row: they differ in code\.template 'nesterov'"):
        compare(load_records([tmp_path / "a-1", folder]), "a")
    write_json(folder / "run.json", told(tmp_path / "a-1", "run.json"))
    write_json(folder / "result.json", told(folder) | {k: told(tmp_path / "a-1")[k] for k in ("config_hash", "run")})
    environment = told(folder, "environment.json")
    environment["versions"]["stepformer"] = "0.1.0"
    write_json(folder / "environment.json", environment)
    with pytest.raises(InputError, match=r"not one row: they differ in code\.stepformer"):
        compare(load_records([tmp_path / "a-1", folder]), "a")


def test_a_row_has_fresh_runs_or_tuned_ones(corpus: Path, tmp_path: Path) -> None:
    """And the runs that tuned ones began with are known by their weights."""
    train(small_run(corpus, steps=4), tmp_path / "start", quiet=True)
    train(small_run(corpus, steps=4, seed=1), tmp_path / "a-1", quiet=True, label="a")
    for seed in (2, 3):
        tuned = small_run(corpus, steps=4, seed=seed, init=str(tmp_path / "start"))
        train(tuned, tmp_path / f"a-{seed}", quiet=True, label="a")
    with pytest.raises(InputError, match=r"not one row: they differ in train\.init"):
        compare(load_records([tmp_path / "a-1", tmp_path / "a-2"]), "a")
    assert compare(load_records([tmp_path / "a-2", tmp_path / "a-3"]), "a").rows[0].loss.n == 2
    shutil.copytree(tmp_path / "a-2", tmp_path / "b-2")
    record = told(tmp_path / "b-2", "run.json")
    record["init"]["weights"] = "0f"
    for name, changed in (("run.json", record), ("result.json", told(tmp_path / "b-2") | {"label": "b"})):
        write_json(tmp_path / "b-2" / name, changed)
    table = compare(load_records([tmp_path / "a-2", tmp_path / "b-2"]), "a")
    assert [found.key for found in table.differences] == ["train.init"]


def test_what_a_program_switches_is_written_down() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert environment()["variables"]["autocast_cpu"] == "torch.bfloat16"
    assert "autocast_cpu" not in environment()["variables"]


@pytest.mark.usefixtures("few_charts")
def test_a_difference_nobody_asked_for_is_refused_by_compare_and_listed_by_report(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_run(corpus, "vanilla", steps=4), tmp_path / "a", quiet=True)
    monkeypatch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")  # read when torch starts: it computes the same here
    train(small_run(corpus, "yurii", steps=4, clip=0.5), tmp_path / "b", quiet=True)
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    compared = ["compare", "--runs", *runs, "--out", str(tmp_path / "table"), "--quiet"]
    assert main(compared) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "optim.clip (vanilla 1.0, yurii 0.5)" in said
    assert "--allow clip" in said
    assert main([*compared, "--allow", "clip"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "optim.clip (vanilla 1.0, yurii 0.5)" in said
    assert "DNNL_DEFAULT_FPMATH_MODE=BF16" in said  # a machine is listed and not refused
    assert main(["report", *runs, "--out", str(tmp_path / "page"), "--no-samples"]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "optim.clip (vanilla 1.0, yurii 0.5)" in page
    assert "DNNL_DEFAULT_FPMATH_MODE=BF16" in page


# What a run is called stays.


def test_a_key_added_later_leaves_old_hashes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_config("yurii", ["steps=500"])

    @dataclasses.dataclass(frozen=True)
    class Younger(OptimConfig):
        novelty: float = setting(0.0, "a key that this version does not have")

    monkeypatch.setitem(config_file.SECTIONS, "optim", Younger)
    after = run_config("yurii", ["steps=500"])
    assert "novelty" in after.to_dict()["optim"]
    assert after.hash == before.hash
    assert run_config("yurii", ["steps=500", "novelty=1.0"]).hash != before.hash


def test_a_resumed_run_has_the_hash_it_began_with(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(corpus, steps=6)
    whole = train(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            train(config, tmp_path / "halves", quiet=True)
    again = resume(tmp_path / "halves", quiet=True)
    assert again["config_hash"] == whole["config_hash"] == sf.load_run(tmp_path / "halves").config.hash
    files = {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert resume(tmp_path / "whole", quiet=True)["weights_sha256"] == whole["weights_sha256"]
    assert {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()} == files


def test_another_version_in_the_middle_is_written_down(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            train(small_run(corpus, steps=6), tmp_path / "run", quiet=True)
    monkeypatch.setattr("stepformer.training.runs.__version__", "9.9.9")
    resume(tmp_path / "run", quiet=True)
    (spell,) = told(tmp_path / "run", "environment.json")["resumed"]
    assert (spell["step"], spell["versions"]["stepformer"]) == (3, "9.9.9")
    (record,) = load_records([tmp_path / "run"])
    first, second = record.settings["code.stepformer"].split(", then ")
    assert first.split()[0] == sf.__version__
    assert second.split()[0] == "9.9.9"


# Coefficients over time, runs that go on.


@pytest.mark.usefixtures("few_charts")
@pytest.mark.slow
def test_coefficients_gains_and_norms_are_in_every_evaluation(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small_run(corpus, steps=6, eval_every=3, stream_norms=True), run, quiet=True)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
    model = sf.load_run(run, "last").model
    assert len(lines) == 3
    assert lines[-1]["coefficients"] == model.coefficients()
    assert lines[0]["coefficients"] != lines[-1]["coefficients"]
    first = model.blocks[0]
    assert lines[-1]["gains"][0]["attn_norm"] == pytest.approx(
        first.attn_norm.weight.detach().square().mean().sqrt().item()
    )
    assert [set(layer) for layer in lines[-1]["norms"]] == [{"x", "v"}] * len(model.blocks)
    ids = torch.from_numpy(Corpus(corpus).split("val").gather(np.arange(8) * model.config.context, 16))
    call = fresh_call(ids)
    with torch.no_grad():
        after = first(model.start(ids, call.positions), call, False)
    assert lines[-1]["norms"][0]["v"] == pytest.approx(float(after.streams["v"].square().mean().sqrt()), rel=1e-5)
    assert main(["report", str(run), "--out", str(tmp_path / "page"), "--no-samples", "--quiet"]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    for title in ("mu_attn during training", "Gain of attn_norm during training", "Norm of v during training"):
        assert title in page
    train(small_run(corpus, "vanilla", steps=2), tmp_path / "plain", quiet=True)
    assert not any({"coefficients", "norms"} & {*line} for line in read_metrics(tmp_path / "plain" / "metrics.jsonl"))
    with pytest.raises(ConfigError, match="stream_norms = true needs the whole model"):
        run_config("yurii", ["stream_norms=true", "parallel=fsdp"])


@pytest.mark.parametrize("sam", ["off", "decay"])
def test_an_extended_run_is_the_longer_one(corpus: Path, tmp_path: Path, sam: str) -> None:
    common = {"schedule": "wsd", "warmup": 2, "sam": sam, "keep": 1}
    train(small_run(corpus, steps=10, decay_start=6, **common), tmp_path / "short", quiet=True)
    whole = train(small_run(corpus, steps=14, decay_start=11, **common), tmp_path / "whole", quiet=True)
    before = {path: path.read_bytes() for path in (tmp_path / "short").rglob("*") if path.is_file()}
    longer = extend(tmp_path / "short", tmp_path / "longer", steps=14, decay_start=11, quiet=True)
    assert longer["weights_sha256"] == whole["weights_sha256"]
    assert longer["config_hash"] == whole["config_hash"]
    assert {path: path.read_bytes() for path in (tmp_path / "short").rglob("*") if path.is_file()} == before
    parent = told(tmp_path / "longer", "run.json")["parent"]
    assert (parent["id"], parent["step"]) == (told(tmp_path / "short", "run.json")["id"], 6)
    steps = [line["step"] for line in read_metrics(tmp_path / "longer" / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == list(range(1, 15))
    assert (longer["best_step"], longer["best_val_loss"]) == (whole["best_step"], whole["best_val_loss"])
    first, second = (told(tmp_path / name, "environment.json") for name in ("short", "longer"))
    assert second["command"] == first["command"]  # where its first steps were made
    assert [told(tmp_path / name, "run.json")["label"] for name in ("short", "longer")] == ["yurii", "longer"]


def test_what_cannot_go_on_is_told(corpus: Path, tmp_path: Path) -> None:
    train(small_run(corpus, steps=6), tmp_path / "cosine", quiet=True)
    with pytest.raises(InputError, match="up to step 2 both schedules are the same, its cosine fell") as refused:
        extend(tmp_path / "cosine", tmp_path / "longer", steps=9)
    assert str(refused.value).endswith(f" by `train ... init={tmp_path / 'cosine'}`.")
    with pytest.raises(ConfigError, match="cannot change 'batch' when it goes on"):
        extend(tmp_path / "cosine", tmp_path / "longer", batch=3)
    with pytest.raises(InputError, match="no checkpoint of step 5: it has"):
        extend(tmp_path / "cosine", tmp_path / "longer", at=5, steps=9)
    record = told(tmp_path / "cosine", "run.json")
    record["corpus"]["splits"]["train"]["hash"] = "0" * 16
    write_json(tmp_path / "cosine" / "run.json", {key: value for key, value in record.items() if key != "checksum"})
    with pytest.raises(InputError, match=r"The run '.*cosine' was trained on other data: the train split of"):
        extend(tmp_path / "cosine", tmp_path / "longer", at=3, steps=6)
    assert not (tmp_path / "longer").exists()
