"""Architectures beyond softmax attention, for every test that should hold for all of them.

ROWS are presets with the options that change what they compute; EXTRAS compose with them; `combinations` draws from
the whole product.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest

import stepformer as sf
from draws import shifted
from helpers import ACCEPTED, INTEGRATORS, TINY

Settings = dict[str, Any]

SYMP: list[Settings] = [
    {"template": name, "attention": attention, "mlp_step": step, "aux_init": start}
    for name in INTEGRATORS
    for attention in ("hamiltonian", "linear-hamiltonian")
    for step in ("A", "B", "C")
    for start in ("zero", "embed")
]
SYMP_OPTIONS: list[Settings] = [
    {"template": template, "attention": "hamiltonian", **options}
    for template, options in (
        ("plain-euler", {"force": "query"}),
        ("exp-euler", {"force": "query", "kernel": "per-head"}),
        ("plain-euler", {"kernel": "per-head", "positions": "rotary", "n_head": 3}),
        ("conformal-euler", {"positions": "rotary"}),
        ("ab2", {"metric": "derived"}),
        ("plain-euler", {"symmetric": True, "lookahead": True}),
        ("etd-ab2", {"lookahead": True, "damping": "log"}),
        ("presymp-euler", {"damping": "linear", "kappa": 0.3}),
        ("exp-euler", {"learned_kappa": True, "kappa": 2.0}),
        ("exp-euler", {"kappa": 0.0, "aux_init": "zero"}),
        ("plain-euler", {"kappa": 0.0, "aux_init": "embed", "mlp_step": "A"}),
        ("plain-euler", {"score_bound": 0.0}),
        ("plain-euler", {"score_bound": 0.5}),
        ("ab2", {"n0": 5}),
        ("ab2", {"history": "constant"}),
        ("etd-ab2", {"history": "constant"}),
        ("etd-ab2", {"etd": "lawson"}),
        ("etd-ab2", {"etd": "lawson", "history": "constant", "step_gradient": True}),
        ("exp-euler", {"step_gradient": True}),
        ("plain-euler", {"learned_kappa": True, "mlp_step": "C"}),
        ("plain-euler", {"memory": "nesterov", "aux_init": "embed"}),
        ("presymp-euler", {"t0": 2.5}),
        ("etd-ab2", {"etd": "lawson", "t0": 0.5, "step_gradient": True}),
        ("presymp-euler", {"system": "particles", "n0": 8, "metric": "derived", "score_bound": 0.0, "symmetric": True}),
        ("exp-euler", {"system": "particles", "n0": 5, "kernel": "per-head", "learned_kappa": True}),
        ("plain-euler", {"system": "particles", "n0": 5, "force": "query", "kappa": 0.3}),
    )
]
SYMP_OPTIONS += [
    {"template": "ab2", "attention": "linear-hamiltonian", "n0": 6},
    {"template": "conformal-euler", "attention": "linear-hamiltonian", "lookahead": True},
    {"template": "plain-euler", "attention": "linear-hamiltonian", "memory": "nesterov", "mlp_step": "C"},
    {"template": "presymp-euler", "attention": "linear-hamiltonian", "t0": 0.5, "lookahead": True},
]
LINEAR: list[Settings] = [{"attention": "linear"}, {"attention": "linear", "n0": 4, "template": "nesterov"}]
# Targets at which no row of these small random models is out of reach: there the result would be a convention.
CONSTRAINED: list[Settings] = [
    {"attention": "entropy"},
    {"attention": "entropy", "ratio": 0.8, "target_form": "support"},
    {"attention": "entropy", "target": "head", "ratio": 0.7},
    {"attention": "entropy", "target": "token", "ratio": 0.8},
    {"attention": "entropy", "constraint": "floor", "ratio": 0.9, "tau": 0.5},
    {"attention": "entropy", "constraint": "floor", "ratio": 0.3, "target": "head"},
    {"attention": "kl"},
    {"attention": "kl", "target": "head"},
    {"attention": "kl", "target": "token", "ratio": 0.05},
    {"attention": "kl", "prior": "previous"},
    {"attention": "kl", "prior": "previous", "detach_prior": True},
    {"attention": "kl", "prior": "carried"},
    {"attention": "kl", "prior": "carried", "target": "token", "ratio": 0.05},
    {"attention": "kl", "prior": "learned"},
    {"attention": "kl", "constraint": "floor", "ratio": 0.02},
    {"attention": "kl", "constraint": "floor", "prior": "previous", "tau": 0.5, "target": "head"},
    {"attention": "kl", "constraint": "floor", "prior": "learned", "ratio": 0.02},
]
STEPS: list[Settings] = [
    {"template": "gd", "alpha": 0.5, "beta": 2.0},
    {"template": "gd", "alpha": 0.5, "beta": 2.0, "learned_steps": True},
    {"template": "gd", "splitting": "parallel", "alpha": 0.7, "learned_steps": True},
    {"template": "gd", "splitting": "strang", "order": "mam", "alpha": 0.7, "beta": 1.5},
]
DEPTH: list[Settings] = [
    {"template": "attnres", **options}
    for options in ({}, {"blocks": 1}, {"blocks": 3}, {"splitting": "parallel"}, {"n_layer": 3, "blocks": 2})
]
ROWS = SYMP + SYMP_OPTIONS + LINEAR + CONSTRAINED + STEPS + DEPTH

EXTRAS: list[Settings] = [
    {"value_residual": "fixed"},
    {"value_residual": "free"},
    {"value_residual": "unit"},
    {"value_tables": True},
    {"embedding_skip": True},
    {"embedding_skip": True, "embedding_skip_start": 0.1},
    {"output_norm": True},
    {"scale": "rezero"},
    {"scale": "layerscale"},
    {"scale": "scalar"},
    {"denseformer": True},
    {"denseformer": True, "dilation": 2, "period": 2},
    {"unet": True},
    {"logit_softcap": 3.0},
    {"document_separator": 3},
    {"qk_norm": True},
    {"positions": "rotary", "n_head": 2},
    {"mlp": "relu2", "head": "untied"},
    {"weight_sharing": "attention"},
    {"weight_sharing": "oracles"},
]
ATTENTIONS: list[Settings] = [{}, *LINEAR[:1], *CONSTRAINED]
# For samples: constrained attention in a quarter of them, as it takes several times longer than the others.
FEWER_ATTENTIONS = [{}, {}, {}, *LINEAR[:1] * 3, CONSTRAINED[3], CONSTRAINED[11]]


def covering_presets(without: Collection[str] = ()) -> list[Any]:
    """All presets as parameters of a test; in the fast set those that bring a new family of templates (a file), a new
    splitting or attention, and are not among `without`.
    """
    seen: set[tuple[str, str]] = set()
    found = []
    for name in sf.presets():
        config = sf.preset(name).config
        family = config.component("template").__module__
        brings = {("template", family), ("splitting", config.splitting), ("attention", config.attention)} - seen
        quick = brings and name not in without
        found.append(pytest.param(name, marks=[] if quick else [pytest.mark.slow]))
        seen |= brings if quick else set()
    return found


def title(settings: Settings) -> str:
    words = [f"{k}={v}" if isinstance(v, bool | int | float) else str(v) for k, v in settings.items()]
    return "-".join(words) or "softmax"


def alternating(cases: Iterable[Settings]) -> list[Any]:
    """Cases as parameters of a test, every second one of them in the fast set."""
    marks: list[Any] = [[], [pytest.mark.slow]]
    return [pytest.param(case, id=title(case), marks=marks[number % 2]) for number, case in enumerate(cases)]


def accepted(settings: Settings) -> bool:
    """Whether the config has meaning (a refusal is tested elsewhere)."""
    try:
        sf.model_config("vanilla", **{**TINY, **settings})
    except sf.ConfigError:
        return False
    return True


def all_combinations() -> list[Settings]:
    """Every accepted template x splitting x attention x extra, and every Hamiltonian row x extra: some 12,000."""
    pairs = [{**pair, **attention, **extra} for pair in ACCEPTED for attention in ATTENTIONS for extra in [{}, *EXTRAS]]
    moving = [{**row, **extra} for row in SYMP + SYMP_OPTIONS for extra in EXTRAS]
    return [settings for settings in pairs + moving if accepted(settings)]


def combinations(count: int, seed: int = 0) -> list[Settings]:
    """A sample, the same for everyone, with two extras at once where they go together.

    A third are Hamiltonian rows; pairs, attentions and extras take turns, so that each of them appears.
    """
    draw = random.Random(shifted(seed))

    def in_turn(choices: list[Settings]) -> Iterator[Settings]:
        while True:
            yield from draw.sample(choices, len(choices))

    variants: dict[tuple[str, str], list[Settings]] = {}
    for pair in ACCEPTED:
        variants.setdefault((pair["template"], pair["splitting"]), []).append(pair)
    pairs = in_turn([draw.choice(same) for same in variants.values()])
    attentions, extras, moving = in_turn(FEWER_ATTENTIONS), in_turn(EXTRAS), in_turn(SYMP + SYMP_OPTIONS)
    sample: list[Settings] = []
    while len(sample) < count:
        if len(sample) % 3 == 2:
            base = next(moving)
        else:
            base = {**next(pairs), **next(attentions)}
        settings = {**base, **next(extras), **draw.choice(EXTRAS)}
        if accepted(settings) and settings not in sample:
            sample.append(settings)
    return sample
