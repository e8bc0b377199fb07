"""Makes docs/ways-through-depth.md: every rule for carrying information through depth, in one table and one picture.

    python docs/depth_page.py

Parameters are counted on the models at the small size, traffic on their plans (what the fused passes read and write),
speeds come from benchmarks/results, losses from the comparisons in docs/raw. The words are here, the drawing of
figures/ways_through_depth.svg is in depth_chart.py. tests/cli/test_depth_page.py checks that page and picture are
up to date.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depth_chart import Point, chart

import stepformer as sf
from stepformer.base.files import write_text
from stepformer.base.words import merge
from stepformer.measure.benchmark import records
from stepformer.model import Model
from stepformer.model.engines.planning import PassStep, Plan
from stepformer.model.engines.tracing import Trace
from stepformer.rules import templates

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "figures/ways_through_depth.svg"
# What the picture shows: comparisons of one size, corpus and budget, relative to docs/. A new one is one more line.
DRAWN = ("raw/2026-11-rivals/25M.csv",)
LOSSES = "8 layers of width 512, 25M tokens of English text, 3 seeds"
TIMES = "12 layers of width 768 (the small size), one H200"
# Names in comparisons that `stepformer bench` measured under other words. ReZero multiplies zeros before it is trained,
# so that it is timed with factors from 1, which are the same work.
BENCHED = {
    "attnres-4": "attnres blocks=4",
    "hyper-dynamic": "hyper dynamic=true",
    "scaled": "vanilla scale=scalar",
}
SAID = {
    "yurii": "Nesterov",
    "scaled": "ReZero",
    "denseformer": "DenseFormer",
    "unet": "U-shaped skips",
    "hyper": "hyper-connections",
    "mhc": "constrained hyper-connections",
    "attnres": "attention residuals (attnres)",
    "attnres-4": "attnres, 4 blocks",
}


@dataclass(frozen=True)
class Row:
    """A rule: the words after `stepformer train`, what it carries besides x, what it learns; its count if not here."""

    words: str
    carried: str
    learned: str
    parameters: int = 0  # as published, for a rule that is not in the catalogue


TABLES = "token and position tables of v"
ADAPTIVE = "LN_u, gamma, beta2"
FIELDS = "LN, steps h_x, h_y"
OURS = (
    Row("vanilla", "", ""),
    Row("hb", "velocity v", f"beta, gamma, LN_v; {TABLES}"),
    Row("yurii", "velocity v", f"mu, beta, gamma, LN_v; {TABLES}"),
    Row("tmm", "velocity v", f"mu, beta, gamma, nu, LN_v; {TABLES}"),
    Row("tables", "w, which stays", "mu, LN_v; token and position tables of w"),
    Row("rmsprop", "second moment s", ADAPTIVE),
    Row("adam", "mean m, second moment s", f"{ADAPTIVE}, beta1; tables of m"),
    Row("adamw", "mean m, second moment s", f"{ADAPTIVE}, beta1, lambda; tables of m"),
    Row("muon", "mean m", "LN_u, gamma, beta; tables of m"),
    Row("ortho", "", "LN_u, gamma"),
    Row("soap", "mean m, covariance R (64 x 64)", "LN_u, gamma, two betas; tables of m"),
    Row("shampoo", "covariance R (64 x 64)", "LN_u, gamma, beta"),
    Row("symp-plain-euler", "momentum y", f"{FIELDS}, alpha, a metric in place of W_V and W_O"),
    Row("symp-presymp-euler", "momentum y", f"{FIELDS}, damping, the metric"),
    Row("symp-exp-euler", "momentum y", f"{FIELDS}, damping, the metric"),
    Row("symp-conformal-euler", "momentum y", f"{FIELDS}, damping, the metric"),
    Row("symp-ab2", "momentum y, the last fields", f"{FIELDS}, damping, the metric"),
    Row("symp-etd-ab2", "momentum y, the last fields", f"{FIELDS}, damping, the metric"),
)
THEIRS = (
    Row("scaled", "", "a factor of each answer, from 0 (ReZero)", 24),
    Row("scaled scale=layerscale", "", "a vector of each answer, from 0.1 at 12 layers (LayerScale)", 18_432),
    Row("scaled scale=scalar", "", "a factor of each answer and one of x, from 1", 48),
    Row("denseformer", "outputs of all layers so far", "weights of a layer's average of them, from its own alone", 90),
    Row("hyper", "4 streams", "how a call reads, mixes and writes them", 576),
    Row("hyper dynamic=true", "4 streams", "the same, and how that depends on the token", 111_216),
    Row("mhc", "4 streams", "maps from the streams to their doubly stochastic mixture", 1_770_120),
    Row("mhc mixing=permutations", "4 streams", "maps from the streams to the weights of 24 permutations", 2_360_136),
    Row("attnres", "embedding and all answers", "a vector of each call and of the last mean, from 0", 19_200),
    Row("attnres blocks=8", "embedding, 8 sums of answers", "the same", 19_200),
    Row("attnres blocks=4", "embedding, 4 sums of answers", "the same", 19_200),
    Row("unet", "outputs of the first half", "a share of each in the layer opposite, from 1", 6),
)  # fmt: skip
INTRODUCTION = """# Ways through depth

A layer of a plain GPT adds the outputs of its attention and its MLP to x. Many papers change how a layer passes
information on to later layers: some read a layer as a step of an optimizer and carry a velocity ([the idea](ideas.md)),
others carry several streams, or let a layer read the outputs of all earlier ones. This page has all that the library
knows, side by side: what they carry, what they learn, what they cost, and which of them learned better when we trained
them.

![Difference of the validation loss to a plain GPT against the time of a training step](figures/ways_through_depth.svg)

*Every rule whose loss and speed we have measured. Lower is better, left is faster, bars are 95 % intervals. Loss and
time were measured at different sizes. Loss: {losses}.
Time: {times}. Nothing was tuned: all rules have the learning rates that
were chosen for the plain GPT, and another size or other rates may change the order. ReZero is timed
with factors that start at 1, not at 0 ([why](#what-they-have-in-common)).*

In the words of the tables: an *oracle* is what a layer asks for a direction, its attention or its MLP, and its *answer*
is what that returns. `stepformer list` prints the equations, `stepformer show NAME --cite` the papers, and
`stepformer audit NAME` checks that an architecture does what its equations say.

Page and picture are made by `python docs/depth_page.py`. Columns of the tables:

- *Parameters*: those beyond vanilla's 124,373,760 at the small size (12 layers, 24 oracle calls, width 768).
- *Traffic*: how much memory is moved between the oracle calls, in vectors of the width for each token and call of the
  forward pass, beyond vanilla's {vanilla:.1f}; a backward pass moves about as much again. One vector is 50 MB or 12 us
  on an H200 with 32,768 tokens in bf16; a whole step of vanilla takes 54.6 ms.
- *Speed*: training tokens per second on one H200 divided by vanilla's, from `benchmarks/results`.
"""
HEADER = "| {title} | carried besides x | learned | parameters | traffic | speed |\n|---|---|---|---:|---:|---:|\n"
UNBUILT = "\nRows with (not built) are not in the catalogue: their parameters are counted on the papers' equations.\n"
TRAINED = """
## Which of them learns better

Differences of the validation loss to vanilla in nats, paired by seed, with 95 % intervals; three seeds, the rates of
the defaults for all of them, nothing tuned for any. Left: 4 layers of width 128 on the embedded tales, 2.0M tokens.
Right: 8 layers of width 512 on 25M tokens of real English text. ([raw output and
commands](raw/2026-11-rivals/README.md); one H200)

| | tales, 2.0M tokens | English text, 25M tokens |
|---|---:|---:|
{rows}

Attention residuals and streams that are mixed win at both sizes; the published momentum rule wins on tales and loses on
real text at this budget, as does `unet`. Rates were chosen for vanilla, so a rule that wants others is not at its best
here; and eight intervals are not one ([the same in the comparison itself](compare.md)). All rows have within 2 % of
vanilla's parameters, but for `yurii`, which has tables of its own.
"""
AFTER = """
## What they have in common

Of the other ways `attnres`, `denseformer`, `scaled scale=scalar` and `hyper` are vanilla before the first step of
training (`hyper` where norm_eps does not matter: its last x is four times vanilla's); ReZero starts as the identity.
None of them mixes tokens, so that decoding keeps keys and values and nothing else: what is carried lives inside the
step of one token.

`hyper`, `mhc` and `attnres` take the place of the template and go with the splittings `lie-trotter` and `parallel`.
`scaled`, `denseformer` and `unet` act around a layer and go with templates that carry x.

Speeds are of models before training. ReZero's s is 0 then, so that every gradient of an oracle is zero, and a GPU that
multiplies zeros takes less power and runs faster: its figure is not what training has. That of `scaled scale=scalar`,
which does the same work, is nearer.

The speeds of `hyper dynamic=true` and `mhc` are of kernels that have been rewritten since; the new ones have not been
measured.

## Hyper-connections

    hyper:  h = A_m^T H,    H' = A_r^T H + B^T T(h)            mhc:  h = pre H,    H' = R H + post^T T(h)

H has n rows of the width of x (`n`, 4 unless you say otherwise), of which x is the first. They start as n copies of the
embedding, and the final norm reads their sum. Every oracle call has its own weights.

In `hyper` (arXiv 2409.19606) these are learned numbers of any sign, n (n + 2) of a call, from B = 1, A_r = I and an A_m
that reads row l mod n in call l. With `dynamic=true` the rows of a token change its own: s tanh(norm(H) W) is added to
each, W from 0 and s from 0.01; the norm is the model's, without a gain. The preset is the static form.

In `mhc` (arXiv 2512.24880) all weights of a token come from z = RMSNorm(vec H): pre = sigmoid(a1 z F1 + b1), post =
2 sigmoid(a2 z F2 + b2), and R, whose rows and columns sum to 1, by 20 Sinkhorn steps from exp(a3 z F3 + b3). With
`mixing=permutations` (arXiv 2601.05732, n up to 4) R is a mean of all n! permutations with weights softmax(a3 z F3 +
b3), doubly stochastic without iterations. The paper says a = 0.01 and n = 4; the other starts are those of the public
code of mHC-lite: F = 0, and b so that call l reads and writes mostly row l mod n and R is nearly the identity. With F =
0 and b2 = 0 it is vanilla.

What differs: the output layers start as they do in vanilla (the first paper scales them by sqrt(n), which the final
norm removes). Numbers are coefficients, without decay; W and F are trained by AdamW with the rate and decay of the
tables, never by Muon. Extras that change x are refused, since x is one of n rows; so is hybrid inference.

On a GPU `hyper` is one generated pass between two calls, which reads and writes each row once. Its dynamic form and
`mhc` have one event more: products of the rows with W or F, and for `mhc` the Sinkhorn steps, are kernels of their own
(`ops/connection_passes.py`), whose backward pass does the steps again.

## Attention residuals

    h_l = n sum_i c_il v_i,    c_il = softmax_i(w_l . RMSNorm(v_i)),    v_(l+1) = T_l(h_l)

over the n sources that are known before call l: the embedding v_0 and the answers of all earlier calls. The final
norm reads one more such mean. `stepformer train attnres` has this full form; `blocks=N` adds up the answers of N
blocks of calls (the last one takes the rest), so that sources are the embedding, the sums of finished blocks, and
from the second call of a block on the running sum of it. `blocks` equal to the number of calls is the full form
again.

Three things differ from the paper (arXiv 2603.15031), none of which changes its functions where eps does not matter:

- **Times n.** The paper asks at the mean, whose size at the start is that of x over n. With 25 sources its square is
  far below the norm_eps of 1e-5, and the norm would hardly see it. Here the mean is multiplied by the number of
  sources: at w = 0 it is the sum, and the model starts as vanilla.
- **No gain of the key norm.** It multiplies w, so that w alone says the same: 19,200 parameters at the small size, not
  38,400.
- **The first w is unused.** The first call has one source. Its vector is counted, and declared unused.

x is the sum of all answers, for diagnostics; no oracle reads it, so that extras which change x are refused. Hybrid
inference, which needs a velocity, is too.

On a GPU each call is one kernel: it reads every source once, with the softmax as it goes. In the backward pass a
source does not have its gradient read and written by every call that used it: calls leave behind the gradient of
their own point, and the gradient of a source is gathered from those when it is asked for (`ops/depth_kernels.py`).
"""


def config_of(row: Row) -> sf.ModelConfig | None:
    """At the small size; None if the catalogue does not have it."""
    name, *words = row.words.split()
    try:
        return sf.model_config(name, size="small", **merge({}, words, "model"))
    except (sf.UnknownNameError, sf.ConfigError):
        return None


def traffic(model: Model) -> float | None:
    """Vectors of the width that passes and recorded functions read and write in the forward pass, for each call."""
    plan = model.plan()
    if not isinstance(plan, Plan):
        return None
    passes = [step for step in plan.steps if isinstance(step, PassStep)]
    moved = sum(step.program.inputs["row"] for step in passes)
    moved += sum(n.kind == "row" for step in passes for n in step.program.outputs)
    matrix = model.config.head_dim**2 / model.config.d_model
    found, calls = float(moved), 0
    for event in Trace(model).events:
        calls += len(event.oracles) + (event.kind == "fields")
        if event.kind not in ("ask", "fields", "velocity", "force", "finish"):
            sizes = {"row": 1.0, "other": matrix}
            moved_rows = event.needs[:-1] if event.kind in ("along", "connections") else (*event.needs, *event.gives)
            found += sum(sizes.get(n.kind, 0.0) for n in moved_rows)  # connections hand their rows on as they are
            found += event.kind == "attend_depth"  # the newest source is put on a stack
    return found / calls


def speeds() -> dict[str, float]:
    """The last measured ratio to vanilla by the words of an architecture, at context 1024."""
    found: dict[str, float] = {}
    for process in records.read_all(HERE.parent / "benchmarks/results"):
        if process["device"]["kind"] != "cuda" or process["settings"]["size"] != "small":
            continue
        for record, baseline in reversed(records.pairs(process["results"])):
            value = records.value_of("ratio", record, baseline)
            if value is not None and record["kernels"] != "off" and record["config"]["context"] == 1024:
                found[record["label"]] = value
    return found


def trained() -> str:
    """Rows of the table of what was trained, from the comparisons' own files."""
    found: dict[str, list[str]] = {}
    for place, name in enumerate(("tiny", "25M")):
        with (HERE / f"raw/2026-11-rivals/{name}.csv").open() as file:
            for row in csv.DictReader(file):
                if row["difference"]:
                    numbers = [f"{float(row[f'difference{part}']):+.3f}" for part in ("", "_low", "_high")]
                    found.setdefault(row["architecture"], ["", ""])[place] = "{} [{}, {}]".format(*numbers)
    return "\n".join(f"| `{name}` | {' | '.join(texts)} |" for name, texts in found.items())


def points(measured: dict[str, float]) -> list[Point]:
    """Every rule whose loss and speed are both stored."""
    found, conditions = [], set()
    for place in DRAWN:
        with (HERE / place).open() as file:
            rows = list(csv.DictReader(file))
        conditions |= {(row["baseline"], row["train_tokens"], row["val_hash"]) for row in rows}
        for row in rows:
            name = row["architecture"]
            label = BENCHED.get(name, name)
            if row["difference_low"] and label in measured:
                loss, low, high = (float(row[f"difference{part}"]) for part in ("", "_low", "_high"))
                found.append(Point(SAID.get(name, name), 1 / measured[label], loss, low, high))
    assert len(conditions) == 1, f"{DRAWN} differ in baseline, budget or validation text: {conditions}"
    return found


def picture() -> str:
    return chart(points(speeds()), f"loss: {LOSSES}; time: {TIMES}; nothing tuned")


def cells(row: Row, measured: dict[str, float], vanilla: Model, usual: float) -> tuple[str, ...]:
    config = config_of(row)
    parameters, extra = f"{row.parameters:,} (not built)", ""
    if config is not None:
        model = Model(config, device="meta")
        parameters = f"{model.num_parameters() - vanilla.num_parameters():,}"
        moved = traffic(model)
        extra = "as written" if moved is None else f"{moved - usual:+.1f}"
    label = row.words if row.words in measured else row.words.replace("scaled", "vanilla")  # as `bench` calls it
    speed = f"{measured[label]:.3f}" if label in measured else "not measured yet"
    return f"`{row.words}`", row.carried, row.learned, parameters, extra, speed


def page() -> str:
    vanilla = Model(sf.model_config("vanilla", size="small"), device="meta")
    usual, measured = traffic(vanilla), speeds()
    assert usual is not None
    parts = [INTRODUCTION.format(vanilla=usual, losses=LOSSES, times=TIMES)]
    for title, rows in {"steps of optimizers": OURS, "other ways": THEIRS}.items():
        parts.append("\n" + HEADER.format(title=title))
        parts += ["| " + " | ".join(cells(row, measured, vanilla, usual)) + " |\n" for row in rows]
    text = "".join(parts)
    return text + UNBUILT * ("(not built)" in text) + TRAINED.format(rows=trained()) + AFTER


def missing() -> list[str]:
    """Templates that the page leaves out."""
    shown: set[Any] = {config.template for row in (*OURS, *THEIRS) if (config := config_of(row)) is not None}
    return [e.name for e in templates if e.component.__module__.startswith("stepformer.") and e.name not in shown]


if __name__ == "__main__":
    write_text(HERE / "ways-through-depth.md", page())
    write_text(PICTURE, picture())
    print(f"written: {HERE / 'ways-through-depth.md'}, {PICTURE}")
