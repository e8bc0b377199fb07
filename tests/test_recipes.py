"""Recipes against the papers: sizes, rates, published values, and one shrunk step of every run.

The tables here were written from the papers and the project's specification, not from the recipes.
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
from stepformer.catalogue import preset, presets
from stepformer.errors import UnknownNameError
from stepformer.optim import Optimizers, Schedule
from stepformer.recipes import FOLDER, load_recipe, recipe_names
from stepformer.references import BIBTEX
from stepformer.training.config import RunConfig, run_config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
V, T = 50_304, 1024

# Per layer at width d: learned scalars, auxiliary norms; and whether a stream starts from tables of its own.
EXTRAS: dict[str, tuple[int, int, bool]] = {
    "gd-euler": (0, 0, False),
    "vanilla": (0, 0, False),
    "polyak-euler": (2, 1, True),
    "hb": (4, 2, True),
    "nesterov-euler": (3, 1, True),
    "yurii": (6, 2, True),
    "symplectic-euler": (5, 2, True),
    "imex": (5, 1, True),
    "imex-ln": (5, 2, True),
    "verlet": (5, 2, True),
    "tmm": (8, 2, True),
    "tmm-zero": (8, 2, False),
    "adam": (6, 2, True),
    "adamw": (8, 2, True),
    "rmsprop": (4, 2, False),
    "muon": (4, 2, True),
    "ortho": (2, 2, False),
    "soap": (6, 2, True),
    "shampoo": (4, 2, False),
}

# YuriiFormer, Table 5: best and final validation loss.
TABLE_5 = {
    "gd-euler": (1.107, 1.113),
    "vanilla": (1.106, 1.114),
    "nesterov-euler": (1.101, 1.112),
    "yurii": (1.078, 1.090),
    "polyak-euler": (1.099, 1.110),
    "hb": (1.083, 1.096),
    "symplectic-euler": (1.080, 1.092),
    "imex-k1-mam": (1.083, 1.095),
    "imex-k1-ama": (1.086, 1.097),
    "imex-ln-k1-mam": (1.112, 1.123),
    "imex-ln-k1-ama": (1.078, 1.091),
    "verlet-mam": (1.077, 1.090),
    "verlet-ama": (1.074, 1.088),
    "imex-k2-mam": (1.081, 1.096),
    "imex-k2-ama": (1.078, 1.088),
    "imex-ln-k2-mam": (1.097, 1.104),
    "imex-ln-k2-ama": (1.070, 1.084),
}

# YuriiFormer, Table 3: best and final, small; best and final, medium.
TABLE_3 = {
    "gd-euler": (3.014, 3.023, 2.770, 2.775),
    "polyak-euler": (2.965, 2.972, 2.730, 2.734),
    "nesterov-euler": (2.959, 2.966, 2.726, 2.731),
    "vanilla": (2.990, 2.998, 2.758, 2.764),
    "hb": (2.925, 2.931, 2.705, 2.710),
    "yurii": (2.920, 2.926, 2.702, 2.707),
}

# Momentum Streams: best validation loss; None where no final value is public.
STREAMS: dict[str, dict[str, float | None]] = {
    "tinystories": {
        "vanilla": 1.1569,
        "adam": 1.1528,
        "adamw": 1.1472,
        "yurii": 1.1299,
        "tmm": 1.1284,
        "hb": 1.1330,
        "rmsprop": 1.1492,
        "ortho": 1.1489,
        "muon": 1.1503,
        "soap": 1.1431,
        "shampoo": 1.1412,
        "tmm-zero": None,
    },
    "openwebtext": {
        "vanilla": 3.0078,
        "adam": 2.9911,
        "adamw": 2.9883,
        "yurii": 2.9413,
        "tmm": 2.9342,
        "hb": 2.9453,
        "rmsprop": 3.0153,
        "ortho": None,
        "muon": None,
        "soap": None,
        "shampoo": None,
    },
    "tinystories-wsd": {"yurii": 1.0818, "tmm": 1.0860},
    "tinystories-sam": {"yurii": 1.0812, "tmm": 1.0791},
    "tinystories-sawd": {"yurii": 1.0772, "tmm": 1.0815},
    "openwebtext-wsd": {"yurii": 2.9275, "tmm": 2.9236},
    "openwebtext-sam": {"yurii": 2.9481, "tmm": 2.9395},
    "openwebtext-sawd": {"yurii": 2.9323, "tmm": None},
    "openwebtext-pure-adamw": {"vanilla": 3.0103, "tmm": 2.9696},
    "openwebtext-half-rate": {"vanilla": 3.0288, "tmm": 2.9634},
    "tinystories-width-900": {"vanilla": 1.1454},
    "tinystories-depth-18": {"vanilla": 1.1298},
    "tinystories-seeds": {"vanilla": 1.1578, "tmm": 1.1272},
}

PUBLISHED: dict[str, dict[str, float | None]] = {
    "yuriiformer-tinystories": {name: best for name, (best, _) in TABLE_5.items()},
    "yuriiformer-openwebtext": {name: row[0] for name, row in TABLE_3.items()},
    "yuriiformer-openwebtext-medium": {name: row[2] for name, row in TABLE_3.items()},
    **{f"momentum-streams-{name}": values for name, values in STREAMS.items()},
}

TOTALS = {  # known in full from the authors' own counts and by hand
    ("yuriiformer-tinystories", "vanilla"): 124_373_760,
    ("yuriiformer-tinystories", "yurii"): 163_812_168,
    ("yuriiformer-tinystories", "polyak-euler"): 163_802_904,
    ("yuriiformer-tinystories", "nesterov-euler"): 163_802_916,
    ("yuriiformer-tinystories", "symplectic-euler"): 163_812_156,
    ("yuriiformer-tinystories", "imex-k1-mam"): 163_802_940,
    ("yuriiformer-tinystories", "imex-ln-k2-ama"): 163_812_156,
    ("yuriiformer-tinystories", "verlet-ama"): 163_812_156,
    ("momentum-streams-tinystories", "tmm"): 163_812_192,
    ("momentum-streams-tinystories", "tmm-zero"): 124_392_288,
    ("momentum-streams-tinystories", "hb"): 163_812_144,
    ("momentum-streams-tinystories", "adam"): 163_812_168,
    ("momentum-streams-tinystories", "adamw"): 163_812_192,
    ("momentum-streams-tinystories", "muon"): 163_812_144,
    ("momentum-streams-tinystories", "soap"): 163_812_168,
    ("momentum-streams-tinystories", "rmsprop"): 124_392_240,
    ("momentum-streams-tinystories", "ortho"): 124_392_216,
    ("momentum-streams-tinystories", "shampoo"): 124_392_240,
    ("momentum-streams-tinystories-width-900", "vanilla"): 162_857_700,
    ("momentum-streams-tinystories-depth-18", "vanilla"): 166_850_304,
}

RUNS = [(name, run) for name in recipe_names() for run in load_recipe(name).runs]
_COMMON = {"tokenizer": "gpt2", "batch": 480, "seed": 42, "eval_every": 100, "eval_tokens": 4_915_200}
_TINYSTORIES = {**_COMMON, "corpus": "tinystories", "steps": 10_000, "warmup": 1_000, "lr": 0.02}
_OPENWEBTEXT = {**_COMMON, "corpus": "openwebtext", "steps": 30_000, "warmup": 3_000, "lr": 0.004}
_MUON = {"name": "muon", "lr_embedding": 6e-4, "lr_norm": 6e-4, "lr_coefficient": 3e-3, "wd_matrix": 0.0}
_MUON |= {"wd_embedding": 0.1, "wd_norm": 0.0, "wd_coefficient": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
_MUON |= {"momentum": 0.95, "nesterov": True, "scaling": "jordan", "qkv": "fused", "clip": 1.0, "floor": 0.1}
_MUON |= {"clip_coefficients": True, "momentum_warmup": 0, "legacy_warmup": False, "polar": "newton-schulz"}
_MUON |= {"schedule": "cosine", "sam": "off", "rho": 0.05, "decay_start": None}


def expected(name: str) -> dict[str, Any]:
    """The settings of a recipe by the training tables of the papers."""
    values = {**_MUON, **(_TINYSTORIES if "tinystories" in name else _OPENWEBTEXT)}
    decay_start = 8_300 if "tinystories" in name else 25_000
    if name.endswith("medium"):
        values["lr"] = 0.006
    if name.endswith("half-rate"):
        values["lr"] = 0.002
    if name.endswith("pure-adamw"):
        values |= {"name": "adamw", "lr": 6e-4, "wd_matrix": 0.1, "scaling": "none"}
    if name.endswith(("wsd", "sawd")):
        values |= {"schedule": "wsd", "decay_start": decay_start}
    if name.endswith("sam"):
        values["sam"] = "always"
    if name.endswith("sawd"):
        values["sam"] = "decay"
    return values


def family(run: str) -> str:
    """The row of EXTRAS: all IMEX rules of one norm placement share theirs, and both Verlet orders."""
    return re.sub(r"-k\d-(ama|mam)$|-(ama|mam)$", "", run)


def count(run: str, L: int, d: int) -> int:
    scalars, norms, tables = EXTRAS[family(run)]
    return L * (12 * d**2 + (2 + norms) * d + scalars) + (V + T) * d * (2 if tables else 1) + d


def geometry(name: str) -> tuple[int, int, int]:
    """Layers, width, heads."""
    if name.endswith("medium"):
        return 24, 1024, 16
    return 18 if name.endswith("depth-18") else 12, 900 if name.endswith("width-900") else 768, 12


def shrunk(name: str, run: str, **more: Any) -> RunConfig:
    """The run in miniature; what makes it special stays: more layers, a wider or odd head, its schedule."""
    full = run_config(name, preset=run).model
    width = 3 * (full.head_dim // 8)
    return run_config(
        name,
        preset=run,
        **{"n_layer": full.n_layer // 6, "d_model": width, "n_head": 3, "context": 16, "vocab_size": 64, "batch": 2},
        **more,
    )


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
    assert recipe.about["paper"] == ("gai2026momentum" if name.startswith("momentum") else "zimin2026yuriiformer")
    for key in ("figure", "about", "published_what"):
        assert isinstance(recipe.about[key], str)
        assert recipe.about[key]
    assert set(recipe.about) <= {"base", "paper", "figure", "about", "published_what", "seeds", "runs"}
    assert preset(recipe.document["model"]["preset"]) in [preset(run) for run in recipe.runs]
    for run, row in recipe.runs.items():
        assert {"parameters"} <= set(row), run
        known = {"parameters", "published", "published_final", "published_std", "published_seeds", "note"}
        assert set(row) <= known, run
        assert "published" in row or "note" in row, f"{run}: no value, and no word why"


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_full_size_parameters(name: str, run: str) -> None:
    config = run_config(name, preset=run)
    layers, width, heads = geometry(name)
    assert (config.model.n_layer, config.model.d_model, config.model.n_head) == (layers, width, heads)
    assert (config.model.context, config.model.vocab_size, config.model.real_vocab) == (T, V, 50_257)
    assert config.own_vocabulary
    model = sf.Model(config.model, device="meta")
    assert all(p.is_meta for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert load_recipe(name).runs[run]["parameters"] == total == model.num_parameters()
    assert total == count(run, layers, width)
    assert TOTALS.get((name, run), total) == total


def test_counts_of_the_papers_convention() -> None:
    """YuriiFormer counts 123.6M and 353.6M: without positions, and without the tables of the velocity."""
    for name, millions in (("yuriiformer-tinystories", 123.6), ("yuriiformer-openwebtext-medium", 353.6)):
        config = run_config(name, preset="vanilla").model
        found = sf.Model(config, device="meta").num_parameters("non-positional")
        assert found / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("name", recipe_names())
def test_settings_of_the_papers(name: str) -> None:
    config = run_config(name)
    flat = {**config.data.to_dict(), **config.optim.to_dict(), **config.train.to_dict()}
    wanted = expected(name)
    assert {key: flat[key] for key in wanted} == wanted
    assert config.step_tokens == 491_520
    assert config.recipe == name
    tokens = config.train.steps * config.step_tokens
    assert tokens / 1e9 == pytest.approx(4.92 if "tinystories" in name else 14.75, abs=0.005)
    again = RunConfig.from_dict(config.to_dict())
    assert again == config
    assert again.hash == config.hash


@pytest.mark.parametrize("name", recipe_names())
def test_schedule_of_the_papers(name: str) -> None:
    config = run_config(name)
    schedule = Schedule(config.optim, config.train.steps)
    steps, warmup = (10_000, 1_000) if "tinystories" in name else (30_000, 3_000)
    assert schedule.factor(0) == pytest.approx(1 / warmup)
    assert schedule.factor(warmup - 1) == schedule.factor(warmup) == 1.0
    decay = 8_300 if "tinystories" in name else 25_000
    for t in (warmup + 1, steps // 2, decay - 1, decay, decay + 700, steps - 1):
        if name.endswith(("wsd", "sawd")):
            wanted = 1.0 if t < decay else 1 - 0.9 * (t - decay) / (steps - decay)
        else:
            wanted = 0.1 + 0.45 * (1 + math.cos(math.pi * (t - warmup) / (steps - warmup)))
        assert schedule.factor(t) == pytest.approx(wanted, rel=1e-12)
        assert schedule.perturbs(t) == (name.endswith("sam") or (name.endswith("sawd") and t >= decay))


@pytest.mark.parametrize("name", recipe_names())
def test_published_values(name: str) -> None:
    runs = load_recipe(name).runs
    assert {run: row.get("published") for run, row in runs.items()} == PUBLISHED[name]
    final = {run: row["published_final"] for run, row in runs.items() if "published_final" in row}
    if name == "yuriiformer-tinystories":
        assert final == {run: last for run, (_, last) in TABLE_5.items()}
    elif name.startswith("yuriiformer"):
        assert final == {run: row[3 if name.endswith("medium") else 1] for run, row in TABLE_3.items()}
    else:
        assert not final


def test_published_values_of_the_catalogue_agree() -> None:
    for run, row in load_recipe("yuriiformer-tinystories").runs.items():
        assert preset(run).published.endswith(f" {row['published']:.3f}")


def test_three_seeds() -> None:
    recipe = load_recipe("momentum-streams-tinystories-seeds")
    assert recipe.about["seeds"] == [42, 43, 44]
    values = {"vanilla": [1.1570, 1.1609, 1.1554], "tmm": [1.1280, 1.1257, 1.1280]}
    for run, row in recipe.runs.items():
        assert row["published_seeds"] == values[run]
        assert row["published"] == pytest.approx(statistics.mean(values[run]), abs=5e-5)
        assert row["published_std"] == pytest.approx(statistics.stdev(values[run]), abs=5e-5)
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
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (config.train.batch, config.model.context), generator=generator)
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    t = optimizers.schedule.decay_start if config.optim.schedule == "wsd" else optimizers.schedule.warmup
    loss = train_step(model, optimizers, tokens, t)
    assert loss == pytest.approx(math.log(64), abs=0.5)
    unused = set(model.unused_parameters())
    for n, p in model.named_parameters():
        assert torch.isfinite(p).all(), n
        moved = not torch.equal(p, old[n])
        assert moved == (n not in unused and bool(p.grad.any() or p.ndim == 2)), n
    peaks = expected(name)
    rates = {"matrix": "lr", "embedding": "lr_embedding", "norm": "lr_norm", "coefficient": "lr_coefficient"}
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


@pytest.mark.parametrize("name", ["yuriiformer-openwebtext", "yuriiformer-openwebtext-medium"])
def test_every_rule_trains_under_the_openwebtext_recipes(name: str) -> None:
    layers, width, _ = geometry(name)
    for run in TABLE_5:
        model = sf.Model(run_config(name, [f"preset={run}"]).model, device="meta")
        assert model.num_parameters() == count(run, layers, width), run


def test_any_preset_goes_into_any_recipe() -> None:
    for name in recipe_names():
        layers, width, heads = geometry(name)
        for run in presets():
            wanted = preset(run).config.replace(n_layer=layers, d_model=width, n_head=heads)
            assert run_config(name, [f"preset={run}"]).model == wanted, (name, run)


def test_base_chain() -> None:
    """A derived recipe states what differs; the rest is its base's, and the base stays as it was."""
    chain = ["momentum-streams-openwebtext-sawd"]
    while "base" in load_recipe(chain[-1]).about:
        chain.append(load_recipe(chain[-1]).about["base"])
    assert chain[1:] == ["momentum-streams-openwebtext", "yuriiformer-openwebtext", "yuriiformer-tinystories"]
    own, root = load_recipe(chain[0]).document, load_recipe(chain[-1]).document
    assert own["model"] == {**root["model"], "preset": "tmm"}
    assert own["data"] == {**root["data"], "corpus": "openwebtext"}
    assert own["train"] == {**root["train"], "steps": 30_000}
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
        shown = dict(re.findall(r"([\w-]+) ([123]\.\d{3,4})(?!\d)", rows[1]))
        assert {run: float(value) for run, value in shown.items()} == {
            run: row["published"] for run, row in runs.items() if "published" in row
        }
        assert all(re.search(rf"(?<![\w-]){run}(?![\w-])", rows[1]) for run in runs), name
