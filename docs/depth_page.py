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
DRAWN = ("raw/2026-11-rivals/25M.csv", "raw/2026-11-rivals/dynamic-25M.csv")
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
    "hyper-dynamic": "dynamic hyper-connections",
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
    Row("tables", "w, which does not change", "mu, LN_v; token and position tables of w"),
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
    Row("vanilla output_norm=true", "", "a vector of each answer behind a norm, from 1 (Peri-LN)", 18_432),
    Row("scaled scale=scalar", "", "a factor of each answer and one of x, from 1", 48),
    Row("denseformer", "outputs of all layers so far", "weights of a layer's average of them, from its own alone", 90),
    Row("hyper", "4 streams", "how a call reads, mixes and writes them", 576),
    Row("hyper dynamic=true", "4 streams", "the same, and how that depends on the token", 111_216),
    Row("mhc", "4 streams", "maps from the streams to their doubly stochastic mixture", 1_770_120),
    Row("mhc mixing=permutations", "4 streams", "maps from the streams to the weights of 24 permutations", 2_360_136),
    Row("attnres", "embedding and all answers", "a vector of each call and of the last mean, from 0", 19_200),
    Row("attnres blocks=8", "embedding, 8 sums of answers", "the same", 19_200),
    Row("attnres blocks=4", "embedding, 4 sums of answers", "the same", 19_200),
    Row("unet", "outputs of the first half", "a factor of each, added to the mirrored layer, from 1", 6),
)  # fmt: skip
INTRODUCTION = """# Ways through depth

A layer of a plain GPT adds the outputs of its attention and its MLP to the residual stream x. Many papers change how a
layer passes information on to later layers. Some treat a layer as a step of an optimizer and carry a velocity ([the
idea](ideas.md)). Others carry several streams, or let a layer read the outputs of all earlier ones. This page compares
all such rules that the library has: what they carry, what they learn, what they cost, and which of them reached a lower
loss when we trained them. `stepformer train attnres steps=500` trains one of them.

![Difference of the validation loss to a plain GPT against the time of a training step](figures/ways_through_depth.svg)

*Every rule whose loss and speed we have measured. Lower is better, further left is faster, bars are 95 % intervals.
Loss and time were measured at different sizes. Loss: {losses}. Time: {times}. Nothing was tuned: all rules have the
learning rates that were chosen for the plain GPT, and another size or other rates may change the order. ReZero is
timed with factors that start at 1, not at 0 ([why](#what-they-have-in-common)).*

In the tables an *oracle* is the attention or the MLP of a layer, and an *answer* is the output of an oracle. `vanilla`
is the plain GPT. `stepformer list` prints the equations, `stepformer show NAME --cite` the papers, and
`stepformer audit NAME` checks that an architecture does what its equations say.

Page and picture are made by `python docs/depth_page.py`. Columns of the tables:

- *Learned*: "from" gives the initial value. *Carried*: what later layers receive besides x.
- *Parameters*: the number beyond vanilla's 124,373,760 at the small size (12 layers, 24 oracle calls, width 768).
- *Traffic*: how much memory is moved between the oracle calls of the forward pass. The unit is one vector of the width
  per token and call, and the number is the amount beyond vanilla's {vanilla:.1f}. A backward pass moves about as much
  again. One vector is 50 MB or 12 us on an H200 with 32,768 tokens in bf16; a whole step of vanilla takes 54.6 ms.
- *Speed*: training tokens per second on one H200 divided by vanilla's, from `benchmarks/results`.
"""
HEADER = "| {title} | carried besides x | learned | parameters | traffic | speed |\n|---|---|---|---:|---:|---:|\n"
UNBUILT = "\nRows with (not built) are not in the library; their parameters are counted from the papers' equations.\n"
TRAINED = """
## Which of them learns better

The table gives differences of the validation loss to vanilla in nats, paired by seed over three seeds, with 95 %
intervals. All rows use the default learning rates; nothing was tuned for any of them. Left: 4 layers of width 128 on
the built-in tales, 2.0M tokens. Right: 8 layers of width 512 on 25M tokens of real English text; `hyper-dynamic` there
is a comparison of its own, with vanilla trained again. ([raw output and commands](raw/2026-11-rivals/README.md); one
H200)

| | tales, 2.0M tokens | English text, 25M tokens |
|---|---:|---:|
{rows}

`attnres`, `hyper` in both forms, `mhc` and `scaled` have a lower loss than vanilla at both sizes. The published
momentum rule (`yurii`) has a lower loss on tales and a higher one on real text at this budget. `unet` is also worse on
real text. The learning rates were chosen for vanilla, so a rule that needs other rates is not at its best here. With
nine intervals in a column, a single one can miss the true value by chance ([more on this](compare.md)). All rows have
within 2 % of vanilla's parameters, except `yurii`, which has embedding tables of its own.
"""
AFTER = r"""
## What they have in common

Before the first training step, `attnres`, `denseformer`, `scaled scale=scalar` and `hyper` compute the same function as
vanilla. For `hyper` this holds up to norm_eps, since its last x is four times vanilla's. ReZero starts as the identity.
The rules of the second table do not mix tokens: what they carry exists only while one token passes through the
layers, so decoding stores keys and values and nothing else.

`hyper`, `mhc` and `attnres` replace the template and can be used with the splittings `lie-trotter` and `parallel`.
`scaled`, `denseformer` and `unet` act around a layer and can be used with templates that carry x.

Speeds were measured before training. At that point the factor s of ReZero is 0, so every gradient of an oracle is zero.
A GPU that multiplies zeros takes less power and runs faster, so the speed given for ReZero is too high for training.
The speed of `scaled scale=scalar`, which does the same work, is closer.

## Hyper-connections

$$ \text{hyper:}\quad h = A_m^\top H, \quad H' = A_r^\top H + B^\top T(h), \qquad\qquad
   \text{mhc:}\quad h = \mathrm{pre}\, H, \quad H' = R H + \mathrm{post}^\top T(h) $$

H is the state of a token: n rows of the width of x (option `n`, 4 by default), of which x is the first. T is the oracle
and h its input. The rows start as n copies of the embedding, and the final norm reads their sum. Every oracle call has
its own weights. With `tables=k`, the k rows after x start from token and position tables of their own, as the velocity
of a momentum rule does (an addition of this library).

In `hyper` (arXiv 2409.19606) the weights are n (n + 2) learned numbers per call, of any sign. They start at B = 1,
A_r = I and an A_m that reads row l mod n in call l. With `dynamic=true` the weights of a token also depend on its rows:
s tanh(norm(H) W) is added to each weight, where W starts at 0 and s at 0.01. The norm is the model's norm without a
gain. The preset is the static form.

Momentum is a special case. Two rows x - v and v hold every rule with one velocity, if its norm LN_v is left out:
Nesterov's reads them with weights 1 and 1 + mu, keeps the first, adds the second to it, and writes beta v + gamma T
into the second. So `hyper` learns a linear optimizer with memory, in every call its own, and can find momentum or
something else (`tests/rules/test_hyper.py::test_two_streams_hold_a_velocity`).
[`glide`](what-to-use.md#the-recipe-glide), our recipe, is `hyper` with small, even steps.

In `mhc` (arXiv 2512.24880) all weights of a token are computed from z = RMSNorm(vec H), without a gain, where vec H is
the n rows one after the other: pre = sigmoid(a1 z F1 + b1) and post = 2 sigmoid(a2 z F2 + b2). R is made by 20 Sinkhorn
steps from exp(a3 z F3 + b3), whose n^2 numbers fill it row by row. A step divides every column by its sum, then every
row. So the rows of R sum to 1, and the columns nearly. With `mixing=permutations` (arXiv 2601.05732, n up to 4) R is a
mean of all n! permutations, in lexicographic order and with ones at (i, p(i)), with weights softmax(a3 z F3 + b3):
doubly stochastic without iterations. The model stores the lines of F1, F2 and F3 as one matrix F of n d columns.
The initial values a = 0.01 and n = 4 are those of the paper. The others are those of the
public code of mHC-lite: F = 0, and b such that call l reads and writes mostly row l mod n and R is nearly the identity.
With F = 0 and b2 = 0 it is vanilla, up to norm_eps.

Some details differ from the papers. The output layers start as in vanilla (the first paper scales them by sqrt(n),
which the final norm removes). Scalars are trained as coefficients, without weight decay. W and F are trained by AdamW
with the learning rate and weight decay of the embedding tables, never by Muon. Extras that change x are refused, since
x is only one of n rows; so is hybrid inference.

On a GPU `hyper` is one generated kernel between two calls, which reads and writes each row once. Its dynamic form and
`mhc` need additional kernels (`ops/connection_passes.py`): products of the rows with W or F, and for `mhc` the Sinkhorn
steps. Their backward pass computes these steps again.

## Attention residuals

$$ h_l = n \sum_i c_{il} v_i, \qquad c_{il} = \mathrm{softmax}_i(w_l \cdot \mathrm{RMSNorm}(v_i)), \qquad
   v_{l+1} = T_l(h_l) $$

The input h_l of call l is a weighted sum over the n sources that exist before this call: the embedding v_0 and the
answers of all earlier calls. w_l is a learned vector. The final norm reads one more such sum. `stepformer train
attnres` is this full form.

With `blocks=N` the calls are divided into N blocks (the last one takes the rest), and the answers of a block are added
up. The sources are then the embedding, the sums of the finished blocks and, from the second call of a block on, the
running sum of the current block. If `blocks` equals the number of calls, this is the full form again.

Three things differ from the paper (arXiv 2603.15031), none of which changes its functions where eps does not matter:

- **Times n.** In the paper the input of a call is the mean of the sources, which at the start has the size of x divided
  by n. With 25 sources its square is far below the norm_eps of 1e-5, so the norm would not bring it to unit size. Here
  the mean is multiplied by the number of sources. At w = 0 this gives the sum, and the model starts as vanilla.
- **No gain of the key norm.** The gain would only multiply w, so w alone can express the same. This gives 19,200
  parameters at the small size, not 38,400.
- **The first w is unused.** The first call has only one source. Its vector is counted, and declared unused.

For diagnostics, x is the sum of all answers. No oracle reads it, so extras that change x are refused. Hybrid inference
is refused, too, since it needs a velocity.

On a GPU each call is one kernel, which reads every source once and computes the softmax as it goes. In the backward
pass, each call stores only the gradient of its own input. The gradient of a source is computed from these when it is
needed, instead of being read and written by every call that used the source (`ops/depth_kernels.py`).
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
    processes = records.read_all(HERE.parent / "benchmarks/results")
    for record, baseline in records.judged_ones(processes):
        value = records.value_of("ratio", record, baseline)
        if value is not None and record["config"]["context"] == 1024:
            found[record["label"]] = value
    return found


def trained() -> str:
    """Rows of the table of what was trained, from the comparisons' own files."""
    found: dict[str, list[str]] = {}
    for place, name in ((0, "tiny"), (1, "25M"), (1, "dynamic-25M")):
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
