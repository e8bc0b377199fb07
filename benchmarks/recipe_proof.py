"""The recipe against what it is measured by: tuned baselines, published rules, rivals and controls.

    python benchmarks/recipe_proof.py rows --corpus data/english --held-out wiki_val.bin --out runs/proof --seeds 4

Each study is one table. `rows`: all rows, 50M tokens. `long` and `longer`: the recipe and the tuned baselines, 100M and
250M tokens. `small`: the same with a published rule and the best rival, 12 layers of width 768, 50M tokens. `without`:
the recipe with one thing left out at a time, 50M tokens. `seconds`: the plain GPT at 50M tokens, and the recipe with a
schedule of its own that ends after so many steps, `--steps`; for seconds that count, one run at a time (`--jobs 1`).

Rates are what the same search found for each row at 15M tokens, as factors on the defaults of the size (RATES).
All studies go on where they stopped, and write their table to OUT/comparison.md and .csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import stepformer as sf
from recipe_screen import GAIN, MEMORYLESS, MODERN, SKIP, TWO
from stepformer.base.plugins import load_plugin
from stepformer.training import RunConfig
from stepformer.training.stopping import Stopped

Rows = dict[str, tuple[str, Mapping[str, Any]]]
BATCH = 32_768  # tokens of a step
SIZE = ["n_layer=8", "n_head=8", "d_model=512", "context=512", "batch=64"]
SMALL = ["n_layer=12", "n_head=12", "d_model=768", "context=512", "batch=64"]
RECIPE = ("mhc-nesterov", MODERN | TWO)
ROWS: Rows = {
    "vanilla": ("vanilla", {}),
    "modern": ("vanilla", MODERN | SKIP),
    "recipe": RECIPE,
    "yurii": ("yurii", {}),
    "tmm": ("tmm", {}),
    "mhc": ("mhc", MODERN),
    "tables": ("tables", MODERN | SKIP | GAIN),
    "value-tables": ("vanilla", MODERN | SKIP | {"value_tables": True}),
    "normed": ("mhc-normed", MODERN | GAIN | {"n": 2}),
    "wider": ("vanilla", MODERN | SKIP | {"d_model": 576, "n_head": 9}),
    "deeper": ("vanilla", MODERN | SKIP | {"n_layer": 10}),
}
WITHOUT: Rows = {
    "recipe": RECIPE,
    "momentum": ("mhc", MODERN | {"n": 2}),
    "memory": ROWS["normed"],
    "streams": ("yurii", MODERN | SKIP | {key: value for key, value in TWO.items() if key != "n"}),
    "start-at-rest": ("mhc-nesterov", MODERN | TWO | {"aux_init": "embed"}),
    "small-gain": ("mhc-nesterov", MODERN | TWO | {"aux_norm_gain": 1.0}),
    "value-residual": ("mhc-nesterov", MODERN | TWO | {"value_residual": "off"}),
    "rotary": ("mhc-nesterov", MODERN | TWO | {"positions": "learned"}),
    "qk-norm": ("mhc-nesterov", MODERN | TWO | {"qk_norm": False}),
    "rmsnorm": ("mhc-nesterov", MODERN | TWO | {"norm": "layernorm"}),
}
RATES: dict[str, Mapping[str, float]] = {"vanilla": {"lr_embedding": 3, "lr_norm": 3}}
STUDIES: dict[str, tuple[Rows, list[str], float]] = {  # rows, size, tokens
    "rows": (ROWS, SIZE, 50e6),
    "long": ({name: ROWS[name] for name in ("vanilla", "modern", "recipe")}, SIZE, 100e6),
    "longer": ({name: ROWS[name] for name in ("vanilla", "modern", "recipe")}, SIZE, 250e6),
    "small": ({name: ROWS[name] for name in ("vanilla", "modern", "recipe", "yurii", "mhc")}, SMALL, 50e6),
    "without": (WITHOUT, SIZE, 50e6),
    "seconds": ({name: ROWS[name] for name in ("vanilla", "recipe")}, SIZE, 50e6),
}


def tuned(label: str, preset: str, words: list[str], settings: Mapping[str, Any]) -> RunConfig:
    """The row, its rates multiplied by what its search found."""
    plain = sf.run_config(preset, words, **settings)
    rates = {key: factor * getattr(plain.optim, key) for key, factor in RATES.get(label, {}).items()}
    return sf.run_config(preset, words, **settings, **rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("words", nargs="*", help="settings of all runs, such as keep=1")
    parser.add_argument(
        "--rows", help="only these rows, such as vanilla,recipe; the others can follow in the same folder"
    )
    parser.add_argument("--corpus", default="tales")
    parser.add_argument("--held-out", action="append", default=[], help="text that the final weights are evaluated on")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of `seconds`: where the recipe's own schedule ends")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--max-seconds", type=float)
    args = parser.parse_intermixed_args()
    rows, size, tokens = STUDIES[args.study]
    chosen = args.rows.split(",") if args.rows else list(rows)
    if missing := [name for name in chosen if name not in rows]:
        parser.error(f"`{args.study}` has no row {', '.join(missing)}: it has {', '.join(rows)}.")
    if (args.steps is not None) != (args.study == "seconds"):
        parser.error("`seconds` needs --steps, the other studies have their own.")
    load_plugin(MEMORYLESS)
    steps = {name: args.steps if args.steps and name == "recipe" else round(tokens / BATCH) for name in chosen}
    words = {name: [f"corpus={args.corpus}", *size, f"steps={steps[name]}", *args.words] for name in chosen}
    configs = {name: tuned(name, rows[name][0], words[name], rows[name][1]) for name in chosen}
    rates = {key for changes in RATES.values() for key in changes}
    try:
        table = sf.compare(
            configs,
            out=args.out,
            seeds=args.seeds,
            held_out=args.held_out,
            jobs=args.jobs,
            plugins=[MEMORYLESS],
            max_seconds=args.max_seconds,
            allow=[*sorted(rates), *(["steps"] if args.steps else [])],
            quiet=False,
        )
    except Stopped as stopped:
        raise SystemExit(f"{stopped} The same command goes on.") from None
    print(table)
    table.write(args.out)


if __name__ == "__main__":
    main()
