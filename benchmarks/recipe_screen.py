"""The search for a recipe in screens of short runs: which depth rule, which form of it, which extras, the finalists.

    python benchmarks/recipe_screen.py rules --corpus data/english --out runs/screen-rules --seeds 2 --jobs 3
    python benchmarks/recipe_screen.py extras yurii aux_norm_gain=0.05 --corpus data/english --out runs/screen --jobs 3
    python benchmarks/recipe_screen.py finals --corpus data/english --out runs/screen-finals --seeds 2 --jobs 3

`rules` compares depth rules that all have rotary positions, QK-norm, RMSNorm and a value residual. `extras` trains a
fractional factorial design of nine changes to one rule: 32 runs, each with about half of the changes, so that every run
counts for every effect. (Resolution IV: what two changes do only together is not taken for the effect of a third.) An
effect is the mean loss of the 16 runs with a change minus that of the 16 without it. Its standard error comes from what
the nine effects leave unexplained, interactions included. Both train on 15M tokens. `finals` compares what is left at
the length of the proof, 50M tokens, since gains shrink. All go on where they stopped, and write their table to
OUT/comparison.md and .csv.
"""

from __future__ import annotations

import argparse
from collections import ChainMap
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import stepformer as sf
from stepformer.study.statistics import t_quantile
from stepformer.training.stopping import Stopped

LIKE = ["n_layer=8", "n_head=8", "d_model=512", "context=512", "batch=64"]
MODERN = {"positions": "rotary", "qk_norm": True, "norm": "rmsnorm", "value_residual": "free"}
SKIP = {"embedding_skip": True}
GAIN = {"aux_norm_gain": 0.05}
REST = GAIN | {"aux_init": "zero"}
NORMED = {"output_norm": True, "output_norm_gain": 0.05}
RELU2 = {"mlp": "relu2"}
RULES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "modern": ("vanilla", SKIP),
    "modern-without-skip": ("vanilla", {}),
    "scaled": ("scaled", SKIP),
    "heavy-ball": ("hb", SKIP | GAIN),
    "nesterov": ("yurii", SKIP | GAIN),
    "nesterov-published-start": ("yurii", SKIP),
    "triple-momentum": ("tmm", SKIP | GAIN),
    "hyper": ("hyper", {}),
    "mhc": ("mhc", {}),
    "attnres": ("attnres", {}),
    "attnres-4": ("attnres", {"blocks": 4}),
}
FINALS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "modern": ("vanilla", SKIP),
    "normed": ("vanilla", SKIP | NORMED),
    "normed-gain-0.2": ("vanilla", SKIP | NORMED | {"output_norm_gain": 0.2}),
    "normed-relu2": ("vanilla", SKIP | NORMED | RELU2),
    "nesterov": ("yurii", SKIP | REST),
    "mhc-normed": ("mhc", NORMED),
    "mhc-2-normed": ("mhc", NORMED | {"n": 2}),
    "hyper": ("hyper", {}),
    "hyper-zero-outputs": ("hyper", {"output_init": "zero"}),
    "hyper-normed": ("hyper", NORMED),
    "hyper-normed-gain-0.2": ("hyper", NORMED | {"output_norm_gain": 0.2}),
    "hyper-normed-relu2": ("hyper", NORMED | RELU2),
    "hyper-normed-dynamic": ("hyper", NORMED | {"dynamic": True}),
    "hyper-2-normed": ("hyper", NORMED | {"n": 2}),
    "hyper-2-normed-relu2": ("hyper", NORMED | RELU2 | {"n": 2}),
    "hyper-8-normed": ("hyper", NORMED | {"n": 8}),
}
SCREENS = {"rules": (RULES, 458), "finals": (FINALS, 1526)}  # and steps: 15M and 50M tokens
CHANGES: dict[str, Mapping[str, Any]] = {
    "rotary": {"positions": "rotary"},
    "qk-norm": {"qk_norm": True},
    "rmsnorm": {"norm": "rmsnorm"},
    "value-residual": {"value_residual": "free"},
    "relu2": RELU2,
    "skip": SKIP,
    "softcap": {"logit_softcap": 30.0},
    "untied": {"head": "untied"},
    "zero-outputs": {"output_init": "zero"},
}
FREE = 5  # changes that are set freely; each of the other four is the product of four of these


def design() -> list[tuple[int, ...]]:
    """The 32 runs of the 2^(9-4) design of resolution IV: 1 where a change is made, -1 where not."""
    runs = product((-1, 1), repeat=FREE)
    return [(*run, *(prod(run) * run[left_out] for left_out in range(len(CHANGES) - FREE))) for run in runs]


def effects(losses: Sequence[float]) -> tuple[list[float], float, int]:
    """Effect of every change, their common standard error and its degrees of freedom."""
    runs, mean = design(), sum(losses) / len(losses)
    halves = [
        sum(run[i] * loss for run, loss in zip(runs, losses, strict=True)) / len(runs) for i in range(len(CHANGES))
    ]
    free = len(runs) - 1 - len(halves)
    left = [loss - mean - sum(map(prod, zip(run, halves, strict=True))) for run, loss in zip(runs, losses, strict=True)]
    return [2 * half for half in halves], 2 * (sum(x * x for x in left) / free / len(runs)) ** 0.5, free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("screen", choices=(*SCREENS, "extras"))
    parser.add_argument("words", nargs="*", help="the rule of `extras`; settings of all runs, such as lr=0.01")
    parser.add_argument("--without", nargs="*", default=[], choices=CHANGES, help="changes that the rule refuses")
    parser.add_argument("--corpus", default="tales")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--max-seconds", type=float)
    args = parser.parse_intermixed_args()
    rules = [word for word in args.words if "=" not in word]
    table, steps = SCREENS.get(args.screen, ({}, 458))
    words = [f"corpus={args.corpus}", *LIKE, f"steps={steps}"] + [word for word in args.words if "=" in word]
    if len(rules) != (args.screen == "extras"):
        parser.error("`extras` needs one rule, the other screens have their own.")
    if rules:
        made = [[name for name, level in zip(CHANGES, run, strict=True) if level > 0] for run in design()]
        kept = [[name for name in names if name not in args.without] for names in made]
        rows = {"+".join(names) or "none": (rules[0], dict(ChainMap(*(CHANGES[n] for n in names)))) for names in kept}
    else:
        rows = {label: (preset, MODERN | own) for label, (preset, own) in table.items()}
    how = {"out": args.out, "seeds": args.seeds, "jobs": args.jobs, "quiet": False}
    configs = {label: sf.run_config(preset, words, **own) for label, (preset, own) in rows.items()}
    try:
        found = sf.compare(configs, **how, max_seconds=args.max_seconds)
    except Stopped as stopped:
        raise SystemExit(f"{stopped}; the same command goes on.") from None
    print(found)
    found.write(args.out)
    if rules:
        losses = {row.label: row.loss.mean for row in found.rows}
        sizes, error, free = effects([losses[label] for label in rows])
        width = t_quantile(0.975, free) * error
        print(f"\neffects on the loss, 95 % interval +-{width:.4f} ({free} degrees of freedom)")
        for effect, name in sorted(zip(sizes, CHANGES, strict=True)):
            if name not in args.without:
                print(f"{name:15} {effect:+.4f}")


if __name__ == "__main__":
    main()
