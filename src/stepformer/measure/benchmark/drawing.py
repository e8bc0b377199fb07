"""Random combinations of components, and the speed that their parts promise: does speed compose as mathematics does?

A combination has a template with a splitting, an attention and some extras. Alone, beside everything else as in
vanilla, each of these has a ratio to vanilla. What is expected of the combination is their product.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from stepformer.base.errors import StepformerError
from stepformer.measure.benchmark.planning import BASELINE, Wanted, resolve
from stepformer.measure.benchmark.table import made
from stepformer.oracles import attentions
from stepformer.present.tables import Table
from stepformer.rules import splittings, templates

# what may stand beside a rule and an attention, each as the words that ask for it
EXTRAS: tuple[tuple[str, ...], ...] = (
    ("positions=rotary",),
    ("qk_norm=true",),
    ("value_residual=free",),
    ("embedding_skip=true",),
    ("scale=rezero",),
    ("denseformer=true",),
    ("unet=true",),
    ("norm=rmsnorm",),
    ("mlp=swiglu",),
    ("logit_softcap=30",),
)
TRIES = 200  # draws for one combination that its config does not refuse


@dataclass(frozen=True)
class Combination:
    """A drawn architecture and the parts whose ratios are multiplied."""

    whole: Wanted
    parts: tuple[Wanted, ...]


def label(wanted: Wanted) -> str:
    """As a table names it."""
    return " ".join((wanted.name, *wanted.words))


def draw(count: int, seed: int, context: int | None = None) -> list[Combination]:
    """`count` different combinations that a config accepts; the same for the same seed."""
    source = random.Random(seed)
    found: dict[str, Combination] = {}
    for _ in range(TRIES * count):
        if len(found) == count:
            break
        template = source.choice([entry.name for entry in templates])
        splitting = source.choice([entry.name for entry in splittings])
        attention = source.choice([entry.name for entry in attentions])
        extras = [words for words in EXTRAS if source.random() < 0.4]
        rule = () if splitting == "lie-trotter" else (f"splitting={splitting}",)
        gathers = () if attention == "softmax" else (f"attention={attention}",)
        integrates = templates[template].component.integrates
        own = [Wanted(template, (*rule, *gathers) if integrates else rule, context)]
        own += [Wanted(BASELINE, gathers, context)] if gathers and not integrates else []
        own += [Wanted(BASELINE, words, context) for words in extras]
        whole = Wanted(template, (*rule, *gathers, *(word for words in extras for word in words)), context)
        if len(own) > 1 and label(whole) not in found and all(_fits(each) for each in (whole, *own)):
            found[label(whole)] = Combination(whole, tuple(own))
    return list(found.values())


def _fits(wanted: Wanted) -> bool:
    try:
        resolve(wanted, "tiny")
    except StepformerError:
        return False
    return True


def wanted(combinations: list[Combination]) -> list[Wanted]:
    """All that has to be measured, each once."""
    return list(dict.fromkeys(each for c in combinations for each in (*c.parts, c.whole)))


def composition(combinations: list[Combination], ratios: Mapping[str, float]) -> Table:
    """Measured and expected ratio of each combination, the slowest against its parts first; the median below."""
    rows: list[tuple[float, list[str]]] = []
    missing = 0
    for each in combinations:
        parts = [1.0 if label(part) == BASELINE else ratios.get(label(part)) for part in each.parts]
        measured = ratios.get(label(each.whole))
        if measured is None or None in parts:
            missing += 1
            continue
        expected = 1.0
        for part in parts:
            expected *= part or 1.0
        share = measured / expected
        rows.append((share, [label(each.whole), f"{measured:.3f}", f"{expected:.3f}", f"{share:.3f}"]))
    rows.sort(key=lambda row: row[0])
    notes = []
    if rows:
        shares = [share for share, _ in rows]
        middle, slowest = statistics.median(shares), rows[0][1][0]
        notes.append(
            f"Of what its parts promise, the median combination has {middle:.3f}, "
            f"the slowest {shares[0]:.3f}: {slowest}."
        )
    if missing:
        notes.append(f"{missing} could not be compared: a part or the whole was not measured.")
    return made(["combination", "ratio", "expected", "of it"], [row for _, row in rows], notes=notes)
