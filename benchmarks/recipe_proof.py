"""The recipe `glide` against what it is measured by: tuned baselines, published rules, rivals and controls.

    python benchmarks/recipe_proof.py search --corpus data/english --out runs/search
    python benchmarks/recipe_proof.py rows --corpus data/english --held-out data/wiki_val.bin --out runs/proof --seeds 4

`search` gives each tuned row the same search (AXES, one after the other) at 15M tokens and writes what it found, as
factors on the defaults of the size, to `--rates`. The other studies read it from there, and print a table each; a
control has the rates of the row that it is a control of (RATES_OF), what was not searched has the defaults. `rows`: all
rows, 50M tokens. `without`: the recipe with one thing left out at a time, 50M tokens; the rows that it shares with
`rows` are trained once if it has the same --out. `long` and `longer`: the recipe and the tuned baselines, 100M and 250M
tokens. `small`: the same with a published rule and the best rival, 12 layers of width 768, 50M tokens. `seconds`: the
plain GPT at 50M tokens, and the recipe with a schedule of its own that ends after so many steps, `--steps`; for seconds
that count, one run at a time (`--jobs 1`).

All studies go on where they stopped, and write their table to OUT/tables/STUDY. A run that is finished and evaluated
needs no weights any more: its folder without `checkpoints` can be kept elsewhere and put back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stepformer as sf
from recipe_screen import GAIN, MEMORYLESS, MODERN, REST, SKIP, TWO
from stepformer.base.files import write_text
from stepformer.base.plugins import load_plugin
from stepformer.study.comparison import Facts
from stepformer.study.fairness import search_of, with_tuning
from stepformer.training import RunConfig
from stepformer.training.stopping import Stopped, Watch

Rows = dict[str, tuple[str, Mapping[str, Any]]]
Rates = Mapping[str, Mapping[str, float]]
BATCH = 32_768  # tokens of a step
SEARCH = 15_000_000  # tokens of a run of the search
SIZE = ["n_layer=8", "n_head=8", "d_model=512", "context=512", "batch=64"]
SMALL = ["n_layer=12", "n_head=12", "d_model=768", "context=512", "batch=64"]
RECIPE = "glide"
RATES = Path(__file__).with_name("recipe") / "rates.json"
ROWS: Rows = {
    "vanilla": ("vanilla", {}),
    "modern": ("vanilla", MODERN | SKIP),
    RECIPE: (RECIPE, {}),
    "glide-streams": ("mhc-nesterov", MODERN | TWO),
    "yurii": ("yurii", {}),
    "tmm": ("tmm", {}),
    "mhc": ("mhc", MODERN),
    "tables": ("tables", MODERN | SKIP | GAIN),
    "value-tables": ("vanilla", MODERN | SKIP | {"value_tables": True}),
    "normed": ("normed", MODERN | SKIP | GAIN),
    "wider": ("vanilla", MODERN | SKIP | {"d_model": 576, "n_head": 9}),
    "deeper": ("vanilla", MODERN | SKIP | {"n_layer": 10}),
}
# Without memory it is `normed`, without velocity and its norm `modern`.
WITHOUT: Rows = {
    **{name: ROWS[name] for name in (RECIPE, "modern", "normed")},
    "no-look-ahead": ("hb", MODERN | SKIP | REST),
    "start-from-tables": (RECIPE, {"aux_init": "embed"}),
    "full-first-steps": (RECIPE, {"aux_norm_gain": 1.0}),
    "no-value-residual": (RECIPE, {"value_residual": "off"}),
    "no-embedding-skip": (RECIPE, {"embedding_skip": False}),
    "learned-positions": (RECIPE, {"positions": "learned"}),
    "no-qk-norm": (RECIPE, {"qk_norm": False}),
    "layernorm": (RECIPE, {"norm": "layernorm"}),
}
AXES = [
    *("lr=0.5x,1x,2x", "lr_embedding=0.3x,1x,3x", "lr_norm=0.3x,1x,3x,10x", "lr_coefficient=0.3x,1x,3x"),
    *("wd_embedding=0x,1x,3x", "wd_matrix=1x,0.1"),
]
RATES_OF = {
    **dict.fromkeys(("glide-streams", "tables", "normed", *WITHOUT), RECIPE),
    **dict.fromkeys(("modern", "value-tables", "wider", "deeper"), "modern"),
}
BASELINES = ("vanilla", "modern", RECIPE)
STUDIES: dict[str, tuple[Rows, list[str], float]] = {  # rows, size, tokens
    "search": ({name: ROWS[name] for name in (*BASELINES, "mhc")}, SIZE, SEARCH),
    "rows": (ROWS, SIZE, 50e6),
    "without": (WITHOUT, SIZE, 50e6),
    "long": ({name: ROWS[name] for name in BASELINES}, SIZE, 100e6),
    "longer": ({name: ROWS[name] for name in BASELINES}, SIZE, 250e6),
    "small": ({name: ROWS[name] for name in (*BASELINES, "yurii", "mhc")}, SMALL, 50e6),
    "seconds": ({name: ROWS[name] for name in ("vanilla", RECIPE)}, SIZE, 50e6),
}


def searched(configs: dict[str, RunConfig], out: Path, **how: Any) -> dict[str, dict[str, float]]:
    """What the search finds for each row: rates as factors on its own, weight decays as they are."""
    own, axes = dict(configs), search_of(AXES, SEARCH)
    facts = with_tuning(configs, axes, SEARCH, out, Facts(), rounds=1, **how)
    print(*facts.remarks, sep="\n")
    found: dict[str, dict[str, float]] = {}
    for label, config in configs.items():
        pairs = {key: (getattr(config.optim, key), getattr(own[label].optim, key)) for key in axes}
        found[label] = {k: float(f"{a / b if k.startswith('lr') else a:.4g}") for k, (a, b) in pairs.items()}
    return found


def tuned(rates: Rates, label: str, preset: str, words: list[str], **more: Any) -> RunConfig:
    """The row with what was found for it. What was searched is set in all rows: a comparison gives a row that leaves a
    rate unset the baseline's.
    """
    plain = sf.run_config(preset, words, **more)
    chosen = {key: getattr(plain.optim, key) for found in rates.values() for key in found}
    for key, value in rates.get(RATES_OF.get(label, label), {}).items():
        chosen[key] = float(f"{value * chosen[key]:.4g}") if key.startswith("lr") else value
    return sf.run_config(preset, words, **more, **chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("words", nargs="*", help="settings of all runs, such as keep=1")
    parser.add_argument("--rows", help="only these, such as vanilla,glide; the others can follow in the same folder")
    parser.add_argument("--rates", type=Path, default=RATES, help=f"what was found for each row ({RATES.name})")
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
    rates = json.loads(args.rates.read_text()) if args.study != "search" and args.rates.is_file() else {}
    steps = {name: args.steps if args.steps and name == RECIPE else round(tokens / BATCH) for name in chosen}
    words = {name: [f"corpus={args.corpus}", *size, f"steps={steps[name]}", *args.words] for name in chosen}
    configs = {name: tuned(rates, name, rows[name][0], words[name], **rows[name][1]) for name in chosen}
    differ = {key for found in rates.values() for key in found}
    differ |= {key for name in chosen for key in rows[name][1] if key in ("d_model", "n_head", "n_layer")}
    differ |= {"steps"} if args.steps else set()
    how: dict[str, Any] = {"jobs": args.jobs, "plugins": [MEMORYLESS], "quiet": False}
    try:
        if args.study == "search":
            found = searched(configs, Path(args.out), watch=Watch(args.max_seconds), **how)
            write_text(args.rates, json.dumps(found, indent=1) + "\n")
            return
        how |= {"held_out": args.held_out, "max_seconds": args.max_seconds, "allow": sorted(differ)}
        table = sf.compare(configs, out=args.out, seeds=args.seeds, **how)
    except Stopped as stopped:
        raise SystemExit(f"{stopped} The same command goes on.") from None
    print(table)
    table.write(Path(args.out, "tables", args.study))


if __name__ == "__main__":
    main()
