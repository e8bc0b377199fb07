"""The recipe `glide` against what it is measured by: tuned baselines, published rules, rivals and controls.

    python benchmarks/recipe_proof.py tune --corpus data/english --out runs/proof
    python benchmarks/recipe_proof.py rows --corpus data/english --held-out data/wiki_val.bin --out runs/proof

`search` goes over all rates (AXES, one after the other) at 10M tokens and prints what each row of SEARCHED would have;
it says which rates matter, and no row gets what it finds, since the best rate falls with the length of training. `tune`
gives each of these rows the same search at 50M tokens (TUNE) and adds what it found to `--rates`, as factors on the
defaults of the size and length; the fifth point came when the best of four was at the edge for `normed`. Both judge on
the first half of the validation text. A row that was not tuned has the rates of the row that it is a form or a control
of (RATES_OF), a published one the defaults. The other studies print two tables, with differences to their first row and
to the recipe; the claim is made on the held-out text, which nothing was chosen by, and their validation loss is of the
second half.

- `rows`: all rows, 50M tokens. The recipe has the baseline's size and takes 7 to 10 % longer for a step: `wider` and
  `deeper` are baselines that take as long.
- `without`: the recipe with one thing left out at a time, 50M tokens. Runs that `rows` has too are trained once.
- `long`, `longer`: 100M and 250M tokens. A corpus of 85M is then read 1.2 and 3 times.
- `small`: 12 layers of width 768, 50M tokens.
- `seconds`: rows with schedules of their own, `--steps glide=1100,modern=1150`, beside the plain GPT at 50M tokens. The
  numbers of steps come from times of a step that were measured before. For seconds that count, `--jobs 1`.

All studies go on where they stopped. Runs are in OUT/SIZE-LENGTH, tables in OUT/tables. A run that is finished and
evaluated needs no weights any more: its folder without `checkpoints` can be kept elsewhere and put back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stepformer as sf
from recipe_screen import GAIN, MODERN, NORMED, RELU2, REST, SKIP
from stepformer.base.errors import StepformerError
from stepformer.base.files import write_text
from stepformer.study.comparison import Facts
from stepformer.study.fairness import search_of, with_tuning
from stepformer.study.study import seeds_of
from stepformer.training import RunConfig
from stepformer.training.stopping import Stopped, Watch

Rows = dict[str, tuple[str, Mapping[str, Any]]]
Rates = Mapping[str, Mapping[str, float]]
BATCH = 32_768  # tokens of a step
SIZES = {"8x512": (8, 8, 512), "12x768": (12, 12, 768)}  # layers, heads, width
RECIPE = "glide"
RATES = Path(__file__).with_name("recipe-rates.json")
AXES = ("lr=0.5x,1x,2x,4x", "lr_embedding=0.3x,1x,3x,10x", "lr_norm=0.3x,1x,3x,10x", "lr_coefficient=0.3x,1x,3x")
TUNE = ("lr=0.25x,0.5x,1x,2x,4x",)
SEARCHES = {"search": (AXES, 10_000_000), "tune": (TUNE, 50_000_000)}  # and tokens of a run
RATES_SET = tuple(word.partition("=")[0] for word in AXES)
ROWS: Rows = {
    "vanilla": ("vanilla", {}),
    "modern": ("modern", {}),
    RECIPE: (RECIPE, {}),
    "normed-relu2": ("modern", NORMED | RELU2),
    "normed": ("modern", NORMED),
    "nesterov": ("yurii", MODERN | SKIP | REST),
    "yurii": ("yurii", {}),
    "tmm": ("tmm", {}),
    "mhc": ("mhc", MODERN),
    "tables": ("tables", MODERN | SKIP | GAIN),
    "value-tables": ("modern", {"value_tables": True}),
    "wider": ("modern", {"mlp_hidden": 2304}),
    "deeper": ("modern", {"n_layer": 9}),
}
WITHOUT: Rows = {  # without streams it is `normed-relu2`
    **{name: ROWS[name] for name in (RECIPE, "modern", "normed-relu2")},
    "two-streams": (RECIPE, {"n": 2}),
    "no-relu2": (RECIPE, {"mlp": "gelu"}),
    "no-output-norm": (RECIPE, {"output_norm": False}),
    "full-first-steps": (RECIPE, {"output_norm_gain": 1.0}),
    "no-value-residual": (RECIPE, {"value_residual": "off"}),
    "learned-positions": (RECIPE, {"positions": "learned"}),
    "no-qk-norm": (RECIPE, {"qk_norm": False}),
    "layernorm": (RECIPE, {"norm": "layernorm"}),
}
SEARCHED = ("vanilla", "modern", RECIPE, "normed")
RATES_OF = {
    **dict.fromkeys((*WITHOUT, "mhc"), RECIPE),
    **dict.fromkeys(("normed-relu2", "nesterov", "tables"), "normed"),
    **dict.fromkeys(("value-tables", "wider", "deeper"), "modern"),
    **{name: name for name in SEARCHED},
}
BASELINES = ("vanilla", "modern", RECIPE)
STUDIES: dict[str, tuple[Sequence[str], str, float]] = {  # rows, size, tokens
    "search": (SEARCHED, "8x512", 10e6),
    "tune": (SEARCHED, "8x512", 50e6),
    "rows": ([*ROWS], "8x512", 50e6),
    "without": ([*WITHOUT], "8x512", 50e6),
    "long": (BASELINES, "8x512", 100e6),
    "longer": (BASELINES, "8x512", 250e6),
    "small": ((*BASELINES, "normed-relu2", "yurii", "mhc"), "12x768", 50e6),
    "seconds": (BASELINES, "8x512", 50e6),
}


def planned(
    study: str,
    rates: Rates,
    words: Sequence[str] = (),
    rows: Sequence[str] = (),
    steps: Mapping[str, int] | None = None,
) -> dict[str, RunConfig]:
    """The rows of a study with the rates that were found. Every searched rate is set in every row: a comparison gives a
    row that leaves one unset the baseline's.
    """
    names, size, tokens = STUDIES[study]
    layers, heads, width = SIZES[size]
    words = [f"n_layer={layers}", f"n_head={heads}", f"d_model={width}", "context=512", "batch=64", *words]
    if study not in SEARCHES:
        words.append("eval_half=second")
    found = {}
    for name in rows or names:
        preset, settings = (ROWS | WITHOUT)[name]
        length = (steps or {}).get(name, round(tokens / BATCH))
        plain = sf.run_config(preset, [f"steps={length}", *words], **settings)
        chosen = {}
        if study not in SEARCHES:
            factors = rates[RATES_OF[name]] if name in RATES_OF else {}
            chosen = {key: getattr(plain.optim, key) * factors.get(key, 1.0) for key in RATES_SET}
        chosen = {key: float(f"{value:.4g}") for key, value in chosen.items()}
        found[name] = sf.run_config(preset, [f"steps={length}", *words], **settings, **chosen)
    return found


def differing(configs: Mapping[str, RunConfig]) -> list[str]:
    """What rows are meant to differ in, beside their architectures."""
    sections = [{**vars(config.optim), **vars(config.train), **vars(config.model)} for config in configs.values()]
    keys = (*RATES_SET, "steps", "n_layer", "mlp_hidden")
    return [key for key in keys if len({section[key] for section in sections}) > 1]


def searched(study: str, configs: dict[str, RunConfig], out: Path, **how: Any) -> dict[str, dict[str, Any]]:
    """What a search finds for each row, as factors on its own rates, with the sentence about it."""
    words, tokens = SEARCHES[study]
    own, axes = dict(configs), search_of(words, tokens)
    facts = with_tuning(configs, axes, tokens, out / study, Facts(), rounds=1, **how)
    print(*facts.remarks, facts.search, sep="\n")
    found: dict[str, dict[str, Any]] = {}
    for label, config in configs.items():
        pairs = {key: (getattr(config.optim, key), getattr(own[label].optim, key)) for key in axes}
        said = next(remark for remark in facts.remarks if remark.startswith(f"{label}: "))
        found[label] = {key: float(f"{a / b:.4g}") for key, (a, b) in pairs.items()} | {"said": said}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("words", nargs="*", help="settings of all runs, such as keep=1")
    parser.add_argument("--rows", help="only these, such as vanilla,glide; the others can follow in the same folder")
    parser.add_argument("--rates", type=Path, default=RATES, help=f"what was found for each row ({RATES.name})")
    parser.add_argument("--corpus", default="tales")
    parser.add_argument("--held-out", action="append", default=[], help="text that the final weights are evaluated on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="50,51,52,53", help="which (50,51,52,53); the screens had 42 and 43")
    parser.add_argument("--steps", default="", help="of `seconds`: where the schedules of rows end, glide=1100")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--max-seconds", type=float)
    args = parser.parse_intermixed_args()
    names, size, tokens = STUDIES[args.study]
    chosen = args.rows.split(",") if args.rows else list(names)
    if missing := [name for name in chosen if name not in names]:
        parser.error(f"`{args.study}` has no row {', '.join(missing)}: it has {', '.join(names)}.")
    if bool(args.steps) != (args.study == "seconds"):
        parser.error("`seconds` needs --steps, the other studies have their own.")
    rates: dict[str, Any] = json.loads(args.rates.read_text()) if args.rates.is_file() else {}
    needed = {RATES_OF[name] for name in chosen if name in RATES_OF}
    if args.study not in SEARCHES and (missing := sorted(needed - rates.keys())):
        parser.error(f"{args.rates} has no rates of {', '.join(missing)}: `tune` finds them.")
    steps = {name: int(number) for name, _, number in (word.partition("=") for word in args.steps.split(",") if word)}
    seeds = seeds_of(f"{args.seeds},")  # which, also a single one
    configs = planned(args.study, rates, [f"corpus={args.corpus}", *args.words], chosen, steps)
    how: dict[str, Any] = {"jobs": args.jobs, "quiet": False}
    try:
        if args.study in SEARCHES:
            found = searched(args.study, configs, args.out, watch=Watch(args.max_seconds), **how)
            if args.study == "tune":
                write_text(args.rates, json.dumps(rates | found, indent=1) + "\n")
            return
        out = args.out / (f"{size}-seconds" if steps else f"{size}-{tokens / 1e6:.0f}M")
        how |= {"held_out": args.held_out, "max_seconds": args.max_seconds, "allow": differing(configs)}
        for baseline in dict.fromkeys((chosen[0], RECIPE)):
            if baseline in chosen:
                table = sf.compare(configs, out=out, seeds=seeds, baseline=baseline, **how)
                print(table)
                table.write(args.out / "tables" / f"{args.study}-to-{baseline}")
    except Stopped as stopped:
        raise SystemExit(f"{stopped}; the same command goes on.") from None
    except StepformerError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
