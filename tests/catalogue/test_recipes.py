"""Recipes against the papers: sizes, rates, published values, and one shrunk step of every run.

The tables (tests/support/papers.py) were written from the papers and the project's specification, not from the recipes.
"""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import stepformer as sf
from draws import seeded
from papers import (
    PAPERS,
    PERSISTENCE,
    PUBLISHED,
    READS_THE_FUTURE,
    SPEED,
    SYMP,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TOTALS,
    V,
    count,
    expected,
    geometry,
)
from runs import make_corpus
from stepformer.base.errors import ConfigError, UnknownNameError
from stepformer.catalogue import preset, presets
from stepformer.catalogue.recipes import FOLDER, load_recipe, recipe_names
from stepformer.catalogue.references import BIBTEX
from stepformer.optim import Optimizers, Schedule
from stepformer.pages.reports.published import QUANTITIES
from stepformer.training import train
from stepformer.training.config import RunConfig, run_config
from stepformer.training.runs import as_toml

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
RUNS = [(name, run) for name in recipe_names() for run in load_recipe(name).runs]


def shrunk(name: str, run: str, **more: Any) -> RunConfig:
    """The run in miniature; what makes it special stays: more layers, a wider or odd head, its schedule."""
    full = run_config(name, preset=run).model
    layers, width = max(2, full.n_layer // 6), 3 * max(4, full.head_dim // 8)
    size = {"n_layer": layers, "d_model": width, "n_head": 3, "context": 16, "vocab_size": 64, "batch": 2}
    return run_config(name, preset=run, **{**size, **more})


def test_every_experiment_has_its_recipe_and_every_recipe_its_runs() -> None:
    assert set(recipe_names()) == set(PUBLISHED)
    for name, values in PUBLISHED.items():
        assert set(load_recipe(name).runs) == set(values), name
    assert len(TABLE_5) == 17


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_is(name: str) -> None:
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert all(len(line) <= 120 for line in lines)
    recipe = load_recipe(name)
    assert recipe.about["paper"] in BIBTEX
    assert recipe.about["paper"] == PAPERS[name.partition("-")[0]]
    for key in ("figure", "about", "published_what"):
        assert isinstance(recipe.about[key], str)
        assert recipe.about[key]
    known = {"base", "paper", "figure", "about", "published_what", "published_tokens", "seeds", "runs"}
    assert set(recipe.about) <= known | {"measured", "measured_what", "measured_errors", "recomputed"}
    assert ("measured" in recipe.about) == ("measured_what" in recipe.about)
    assert {q for of in (recipe.measured, recipe.recomputed) for row in of.values() for q in row} <= set(QUANTITIES)
    assert {*recipe.measured, *recipe.recomputed} <= set(recipe.runs)
    assert preset(recipe.document["model"]["preset"]) in [preset(run) for run in recipe.runs]
    for run, row in recipe.runs.items():
        assert {"parameters"} <= set(row), run
        of = {"published", *(f"published_{what}" for what in ("final", "train", "tokens", "std", "seeds"))}
        assert set(row) <= {"parameters", "note", *of}, run
        assert "published" in row or "note" in row, f"{run}: no value, and no word why"


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_full_size_parameters(name: str, run: str) -> None:
    config = run_config(name, preset=run)
    found = config.model.n_layer, config.model.d_model, config.model.n_head, config.model.context
    assert found == geometry(name)
    assert (config.model.vocab_size, config.model.real_vocab) == (V, 50_257)
    assert config.own_vocabulary
    model = sf.Model(config.model, device="meta")
    assert all(p.is_meta for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert load_recipe(name).runs[run]["parameters"] == total == model.num_parameters()
    assert total == count(name, run)
    assert TOTALS.get((name, run), total) == total


def test_counts_of_the_papers_convention() -> None:
    """YuriiFormer counts 123.6M and 353.6M: without positions, and without the tables of the velocity."""
    for name, millions in (("yuriiformer-tinystories", 123.6), ("yuriiformer-openwebtext-medium", 353.6)):
        config = run_config(name, preset="vanilla").model
        found = sf.Model(config, device="meta").num_parameters("non-positional")
        assert found / 1e6 == pytest.approx(millions, abs=0.05)  # margin: the paper's digits


@pytest.mark.parametrize("name", recipe_names())
def test_settings_of_the_papers(name: str) -> None:
    config = run_config(name)
    flat = {**config.data.to_dict(), **config.optim.to_dict(), **config.train.to_dict()}
    wanted = expected(name)
    assert {key: flat[key] for key in wanted} == wanted
    step = {"table-1": 49_152, "table-2": 9_216, "table-3": 73_728, "speed": 524_288}
    assert config.step_tokens == next((tokens for word, tokens in step.items() if word in name), 491_520)
    assert config.recipe == name
    tokens = config.train.steps * config.step_tokens
    if name.startswith(("yuriiformer", "momentum")):  # margin: the papers' digits
        assert tokens / 1e9 == pytest.approx(4.92 if "tinystories" in name else 14.75, abs=0.005)
    again = RunConfig.from_dict(config.to_dict())
    assert again == config
    assert again.hash == config.hash


@pytest.mark.parametrize("name", recipe_names())
def test_schedule_of_the_papers(name: str) -> None:
    config = run_config(name)
    schedule = Schedule(config.optim, config.train.steps)
    steps, warmup, decay = (10_000, 1_000, 8_300) if "tinystories" in name else (30_000, 3_000, 25_000)
    floor = 0.1
    if name.startswith("sympformer"):
        steps, warmup, decay, floor = 10_000, 150, 8_300, 0.4
    if name.startswith("speed"):
        steps, warmup, decay, floor = 3_200, 320, 2_286, 0.0
    assert schedule.factor(0) == pytest.approx(1 / warmup)
    assert schedule.factor(warmup - 1) == schedule.factor(warmup) == 1.0
    for t in (warmup + 1, steps // 2, decay - 1, decay, decay + 700, steps - 1):
        if name.startswith("speed") or name.endswith(("wsd", "sawd")):
            wanted = 1.0 if t < decay else 1 - (1 - floor) * (t - decay) / (steps - decay)
        else:
            wanted = floor + (1 - floor) / 2 * (1 + math.cos(math.pi * (t - warmup) / (steps - warmup)))
        assert schedule.factor(t) == pytest.approx(wanted, rel=1e-12)
        assert schedule.perturbs(t) == (name.endswith("sam") or (name.endswith("sawd") and t >= decay))


@pytest.mark.parametrize("name", recipe_names())
def test_published_values(name: str) -> None:
    runs = load_recipe(name).runs
    assert {run: row.get("published") for run, row in runs.items()} == PUBLISHED[name]
    final = {run: row["published_final"] for run, row in runs.items() if "published_final" in row}
    if name == "yuriiformer-tinystories":
        assert final == {run: row[1] for run, row in TABLE_5.items()}
        assert {run: row["published_train"] for run, row in runs.items()} == {r: row[2] for r, row in TABLE_5.items()}
    elif name.startswith("yuriiformer"):
        assert final == {run: row[3 if name.endswith("medium") else 1] for run, row in TABLE_3.items()}
    elif name.startswith("sympformer"):
        rows = SYMP[name.removeprefix("sympformer-")]
        assert final == {run: last for run, (_, last) in rows.items() if last is not None}
    else:
        assert not final


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith(("yurii", "momentum"))])
def test_on_how_many_tokens_losses_were_published(name: str) -> None:
    """160 batches: of 30 x 1024 tokens, of 8 in the main runs of Momentum Streams, of 4 for its largest streams."""
    batch = 8 if name.startswith("momentum") else 30
    batch = 30 if re.search("tinystories-(wsd|sam|sawd)", name) else batch
    recipe = load_recipe(name)
    wanted = dict.fromkeys(recipe.runs, 160 * batch * 1024)
    if name == "momentum-streams-tinystories":
        wanted |= dict.fromkeys(("soap", "shampoo"), 160 * 4 * 1024)
    assert {run: recipe.published_tokens(run) for run in recipe.runs} == wanted
    if name.startswith("momentum"):
        train = run_config(name).train
        assert set(wanted.values()) <= {train.eval_tokens, *train.first}


@pytest.mark.parametrize(("name", "first"), [("yuriiformer-openwebtext", 0), ("yuriiformer-openwebtext-medium", 4)])
def test_downstream_accuracies_of_table_4(name: str, first: int) -> None:
    tasks = ("hellaswag", "arc_easy", "hellaswag_zero_shot", "arc_easy_zero_shot")
    recipe = load_recipe(name)
    for run, row in TABLE_4.items():
        wanted = [percent / 100 for percent in row[first : first + 4]]
        assert [recipe.measured[run][task] for task in tasks] == pytest.approx(wanted, abs=1e-12)
    assert [recipe.error(task) for task in tasks] == [0.005, 0.01, 0.005, 0.01]


def test_persistence_as_published_and_recomputed() -> None:
    found = {}
    for more in ("", "-wsd", "-sam"):
        recipe = load_recipe(f"momentum-streams-openwebtext{more}")
        for run, row in recipe.recomputed.items():
            assert "persistence" not in recipe.measured[run]
            found[more, run] = (recipe.measured[run]["persistence_11"], row["persistence"])
    assert found == PERSISTENCE


def ranks(values: list[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


def spearman(first: list[float], second: list[float]) -> float:
    n = len(first)
    squares = sum((a - b) ** 2 for a, b in zip(ranks(first), ranks(second), strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))


def test_published_measurements_have_the_published_correlations() -> None:
    """A typing error in a table would change its ranks: they give the correlations stated in the specification."""
    name = "momentum-streams-openwebtext"
    plain, wsd, sam = (load_recipe(name + more).measured for more in ("", "-wsd", "-sam"))
    rows = [plain[run] for run in ("vanilla", "adam", "tmm", "yurii")]
    rows += [part[run] for part in (wsd, sam) for run in ("tmm", "yurii")]
    for row in rows:  # margin: here and below, the paper's digits
        assert row["ood"] == pytest.approx((row["wikitext"] + row["lambada"] + row["c4"]) / 3, abs=0.006)
    trace = [row["trace_per_parameter"] for row in rows]
    assert spearman(trace, [row["ood"] for row in rows]) == pytest.approx(0.667, abs=5e-4)  # margin: digits
    assert spearman(trace, [row["forgetting"] for row in rows]) == pytest.approx(0.929, abs=5e-4)  # margin: digits


def test_published_values_of_the_catalogue_agree() -> None:
    for run, row in load_recipe("yuriiformer-tinystories").runs.items():
        assert preset(run).published.endswith(f" {row['published']:.3f}")


def test_rows_that_read_the_future_are_no_targets() -> None:
    """Their values stand in the remarks only: no command prints them as published."""
    runs = load_recipe("sympformer-table-1-hamiltonian").runs
    assert len(runs) == 5
    for run, row in runs.items():
        assert "published" not in row
        assert row["note"] == f"not credible, no target: the paper's {READS_THE_FUTURE[run]}"


def test_model_options_of_the_hamiltonian_recipes() -> None:
    """Step sizes and look-ahead of appendix B; the rest is causal: row force, visible counts, Algorithm 1's MLP.

    Presymp Euler of Tables 2 and 3 by the text (Table 4, Algorithm 1) and by the code (formula (15), tables, MLP C).
    """
    starts = {"table-1-hamiltonian": 0.1, "table-2-plain-euler": 0.25, "table-3-plain-euler": 0.3}
    starts |= {"table-2-conformal-euler": 0.01, "table-3-conformal-euler": 0.01}
    starts |= {"table-2-presymp-euler": 0.25, "table-3-presymp-euler": 0.3}
    for word, h0 in starts.items():
        for run in load_recipe(f"sympformer-{word}").runs:
            model = run_config(f"sympformer-{word}", preset=run).model
            softmax = run.startswith("symp-")
            text = softmax or word.endswith("presymp-euler")
            assert (model.option("h0"), model.option("lookahead")) == (h0, text and "table-2" not in word)
            assert (model.option("n0"), model.option("mlp_step")) == (0, "B" if text else "C")
            assert model.aux_init == ("zero" if text else "embed")
            assert model.template == run.removeprefix("linear-").removeprefix("symp-")
            if "etd" in run:
                assert model.option("etd") == "lawson"
            if softmax:
                assert (model.option("force"), model.option("kappa")) == ("row", 1.0)
            if "plain" not in run:
                assert model.option("damping") == "loglin"


def test_the_speed_recipes_add_one_thing_at_a_time() -> None:
    found = {}
    for name in SPEED:
        config = run_config(name)
        model = config.model
        extras = (model.value_residual, model.embedding_skip, model.logit_softcap)
        schedule = Schedule(config.optim, config.train.steps)
        found[name] = (*extras, *(round(schedule.momentum(t), 3) for t in (0, 250, 500, 3_199)))
    constant, rising = (0.95, 0.95, 0.95, 0.95), (0.85, 0.9, 0.95, 0.95)
    assert found == {
        "speed-baseline": ("off", False, 30.0, *constant),
        "speed-value-residual-fixed": ("fixed", False, 30.0, *constant),
        "speed-value-residual": ("free", False, 30.0, *constant),
        "speed-momentum-warmup": ("free", False, 30.0, *rising),
        "speed": ("free", True, 30.0, *rising),
        "speed-public": ("free", True, 30.0, *rising),
    }
    public = run_config("speed-public").model
    assert (public.head, public.output_init, public.mlp, public.n_head) == ("untied", "zero", "relu2", 6)
    assert (public.positions, public.norm, public.option("qk_norm")) == ("rotary", "rmsnorm", True)


def test_three_seeds() -> None:
    recipe = load_recipe("momentum-streams-tinystories-seeds")
    assert recipe.about["seeds"] == [42, 43, 44]
    values = {"vanilla": [1.1570, 1.1609, 1.1554], "tmm": [1.1280, 1.1257, 1.1280]}
    for run, row in recipe.runs.items():
        assert row["published_seeds"] == values[run]
        assert row["published"] == pytest.approx(statistics.mean(values[run]), abs=5e-5)  # margin: digits
        assert row["published_std"] == pytest.approx(statistics.stdev(values[run]), abs=5e-5)  # margin: digits
    hashes = {run_config(recipe.name, [f"seed={seed}"]).hash for seed in recipe.about["seeds"]}
    assert len(hashes) == 3


def train_step(model: sf.Model, optimizers: Optimizers, tokens: torch.Tensor, t: int) -> float:
    """One step as the trainer takes it; the loss before it."""
    targets = tokens.roll(-1, dims=1)

    def backward() -> float:
        optimizers.zero_grad()
        loss = model(tokens, targets=targets).loss
        loss.backward()
        return loss.item()

    loss = backward()
    if optimizers.schedule.perturbs(t):
        first = [p.grad.clone() for p in optimizers.parameters]
        before = optimizers.perturb()
        backward()
        optimizers.restore(before)
        assert any(not torch.equal(a, p.grad) for a, p in zip(first, optimizers.parameters, strict=True))
    assert torch.isfinite(optimizers.clip())
    optimizers.step(t)
    return loss


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_one_step_shrunk(name: str, run: str) -> None:
    config = shrunk(name, run)
    model = sf.Model(config.model, seed=config.train.seed)
    optimizers = Optimizers(model, config.optim, config.train.steps)
    generator = seeded(0)
    tokens = torch.randint(64, (config.train.batch, config.model.context), generator=generator)
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    t = optimizers.schedule.decay_start if config.optim.schedule == "wsd" else optimizers.schedule.warmup
    loss = train_step(model, optimizers, tokens, t)
    assert loss == pytest.approx(math.log(64), abs=0.5)
    unused = set(model.unused_parameters())
    for n, p in model.named_parameters():
        assert torch.isfinite(p).all(), n
        if p.numel() == 1 and p.grad is not None and 0 < p.grad.abs() < 1e-10:
            continue  # far below AdamW's eps, as of a friction of 1e-4: the step may round away
        moved = not torch.equal(p, old[n])
        drawn = p.ndim == 2 and config.model.output_init != "zero"  # from zero, gradients reach the head alone at first
        assert moved == (n not in unused and bool(p.grad.any() or drawn)), n
    peaks = expected(name)
    rates = {"matrix": "lr"} | {role: f"lr_{role}" for role in ("embedding", "head", "norm", "coefficient")}
    for role, rate in optimizers.rates().items():
        assert rate == peaks[rates[role]], role
    assert math.isfinite(model(tokens, targets=tokens.roll(-1, dims=1)).loss.item())


def test_only_the_decay_phase_of_sawd_is_sharpness_aware() -> None:
    """In the stable phase a SAWD step equals a WSD step to the bit; in the decay phase it does not."""
    ends = {}
    for recipe in ("momentum-streams-tinystories-wsd", "momentum-streams-tinystories-sawd"):
        for t in (8_299, 8_300):
            config = shrunk(recipe, "tmm")
            model = sf.Model(config.model, seed=0)
            tokens = torch.arange(32).view(2, 16)
            train_step(model, Optimizers(model, config.optim, config.train.steps), tokens, t)
            ends[recipe.rpartition("-")[2], t] = dict(model.named_parameters())
    for t, same in ((8_299, True), (8_300, False)):
        wsd, sawd = ends["wsd", t], ends["sawd", t]
        assert all(torch.equal(wsd[n], sawd[n]) for n in wsd) == same


@pytest.fixture(scope="module")
def tales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("tales")).folder


@pytest.mark.parametrize(("name", "run"), [row for row in RUNS if row[0].startswith(("sympformer", "speed"))])
def test_two_steps_on_tales(name: str, run: str, tales: Path, tmp_path: Path) -> None:
    more = {"vocab_size": 320, "corpus": str(tales), "tokenizer": "bytes", "steps": 2, "warmup": 1, "eval_tokens": 64}
    more |= {"device": "cpu", "compile": False} | ({"decay_start": 1} if name.startswith("speed") else {})
    facts = train(shrunk(name, run, **more), tmp_path / "run", quiet=True)
    assert math.isfinite(facts["val_loss"])


@pytest.mark.parametrize("name", ["yuriiformer-openwebtext", "yuriiformer-openwebtext-medium"])
def test_every_rule_trains_under_the_openwebtext_recipes(name: str) -> None:
    for run in TABLE_5:
        model = sf.Model(run_config(name, [f"preset={run}"]).model, device="meta")
        assert model.num_parameters() == count(name, run), run


def own_options(name: str) -> set[str]:
    """Model keys of a recipe that not every architecture has."""
    return set(load_recipe(name).document["model"]) & {"h0", "lookahead", "value_residual"}


def test_any_preset_goes_into_any_recipe() -> None:
    plain = [name for name in recipe_names() if not name.startswith("speed") and not own_options(name)]
    assert len(plain) == 19
    for name in plain:
        layers, width, heads, context = geometry(name)
        for run in presets():
            if preset(run).config.positions == "rotary" and width // heads % 2:
                with pytest.raises(ConfigError, match="turns pairs of coordinates"):
                    run_config(name, [f"preset={run}"])
                continue
            wanted = preset(run).config.replace(n_layer=layers, d_model=width, n_head=heads, context=context)
            assert run_config(name, [f"preset={run}"]).model == wanted, (name, run)


def test_a_recipe_with_options_refuses_what_has_none() -> None:
    for name in recipe_names():
        if "h0" in own_options(name):
            with pytest.raises(ConfigError, match="has no meaning here: it is an option of template"):
                run_config(name, preset="vanilla")
        if "value_residual" in own_options(name):
            with pytest.raises(ConfigError, match="mixes values, and attention 'hamiltonian' has none"):
                run_config(name, preset="symp-ab2")


def test_base_chain() -> None:
    """A derived recipe states what differs; the rest is its base's, and the base stays as it was."""
    chain = ["momentum-streams-openwebtext-sawd"]
    while "base" in load_recipe(chain[-1]).about:
        chain.append(load_recipe(chain[-1]).about["base"])
    assert chain[1:] == ["momentum-streams-openwebtext", "yuriiformer-openwebtext", "yuriiformer-tinystories"]
    own, root = load_recipe(chain[0]).document, load_recipe(chain[-1]).document
    assert own["model"] == {**root["model"], "preset": "tmm"}
    assert own["data"] == {**root["data"], "corpus": "openwebtext"}
    assert own["train"] == {**root["train"], "steps": 30_000, "eval_first": 1_310_720, "eval_whole": True}
    changed = {key for key in own["optim"] if own["optim"][key] != root["optim"].get(key)}
    assert changed == {"lr", "warmup", "schedule", "decay_start", "sam", "rho"}
    assert root["train"]["steps"] == 10_000
    assert "sam" not in root["optim"]


@pytest.mark.parametrize("name", recipe_names())
def test_a_derived_recipe_repeats_nothing(name: str) -> None:
    own = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    base = own.pop("recipe").get("base")
    if base is not None:
        above = load_recipe(base).document
        for section, values in own.items():
            for key, value in values.items():
                assert above[section].get(key) != value, f"[{section}] {key}"


def test_unknown_recipes_are_sentences() -> None:
    with pytest.raises(UnknownNameError) as caught:
        load_recipe("yuriiformer-tinystory")
    assert "There is no recipe 'yuriiformer-tinystory'. Did you mean 'yuriiformer-tinystories'?" in str(caught.value)
    with pytest.raises(UnknownNameError) as caught:
        run_config("momentum-streams-openwebtex")
    assert "Did you mean 'momentum-streams-openwebtext'?" in str(caught.value)


def test_the_page_lists_every_recipe_with_its_values() -> None:
    text = PAGE.read_text()
    for name in recipe_names():
        rows = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(rows) == 2, f"{name} stands in the table of recipes and in the table of values"
        runs = load_recipe(name).runs
        shown = dict(re.findall(r"([\w-]+) ([123]\.\d{3,6})(?!\d)", rows[1]))
        assert {run: float(value) for run, value in shown.items()} == {
            run: row["published"] for run, row in runs.items() if "published" in row
        }
        assert all(re.search(rf"(?<![\w-]){run}(?![\w-])", rows[1]) for run in runs), name


def test_the_file_of_a_run_remembers_its_recipe(tmp_path: Path) -> None:
    """Studies start their runs from such files: published figures must still be found."""
    config = run_config("momentum-streams-tinystories", ["model.preset=yurii"])
    path = tmp_path / "run.toml"
    path.write_text(as_toml(config))
    again = run_config(str(path))
    assert again.recipe == "momentum-streams-tinystories"
    assert again.hash == config.hash
