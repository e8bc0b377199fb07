"""A comparison as tables: the one that is shown, and the one with everything, for CSV and pandas."""

from __future__ import annotations

from stepformer.present.tables import Cell, Column, Table, text
from stepformer.study.compared import Compared, Row
from stepformer.study.statistics import PairedDifference, Summary, seed_words

MARK = " *"  # beside a verdict that has a note against claiming it
REACH = (
    "Tokens to baseline: part of the budget after which the baseline's final loss was reached, or how many seeds "
    "reached it. Speed: training tokens per second over the baseline's."
)


def summary_table(comparison: Compared) -> Table:
    """For the terminal, Markdown and notebooks: every row, then what was measured and what has to be known."""
    budgets = len({row.records[0].tokens for row in comparison.rows}) > 1
    texts = len({_text(row) for row in comparison.rows}) > 1
    columns = [
        Column("architecture"),
        Column("n", numeric=True),
        Column("tokens", numeric=True),
        Column("evaluated on", numeric=True),
        Column("final loss ± se", numeric=True),
        Column(f"difference [{percent(comparison.confidence)} CI]", numeric=True),
        Column("parameters", numeric=True),
        Column("verdict"),
        Column("best loss", numeric=True, spare=1),
        Column("tokens to baseline", numeric=True, spare=1),
        Column("speed", numeric=True),
    ]
    rows = [[_name(row), *map(text, _cells(row))] for row in comparison.rows]
    table = Table(columns, rows, "Comparison with the baseline", [*_facts(comparison), *_notes(comparison)])
    return table.without(place for place, there in ((2, budgets), (3, texts)) if not there)


def _name(row: Row) -> Cell:
    style = "" if row.provisional else {"better": "green", "worse": "red"}.get(row.verdict, "")
    return text(row.label, style=style)


def full_table(comparison: Compared) -> Table:
    """One line per architecture; every line carries what was measured, so lines can be pooled."""
    records = [_record(comparison, row) for row in comparison.rows]
    return Table([Column(key) for key in records[0]], [list(map(text, record.values())) for record in records])


def _cells(row: Row) -> list[str]:
    return [
        str(row.loss.n),
        f"{row.records[0].tokens:,}",
        _text(row),
        with_error(row.loss),
        with_interval(row.difference),
        f"{row.parameters:,}",
        row.verdict + (MARK if row.provisional else ""),
        f"{row.best.mean:.4f}",
        reach(row),
        "-" if row.speed_ratio is None else f"{row.speed_ratio:.2f} x",
    ]


def reach(row: Row) -> str:
    """Part of the budget to the baseline's loss: a mean when every common seed got there, else how many did."""
    if row.tokens_fraction is not None:
        return f"{row.tokens_fraction:.1%}"
    if not row.common_seeds:
        return "-"
    return f"{row.reached} of {len(row.common_seeds)}" if row.reached else "never"


def with_error(summary: Summary) -> str:
    """A mean ± its standard error."""
    error = "" if summary.standard_error is None else f" ± {summary.standard_error:.4f}"
    return f"{summary.mean:.4f}{error}"


def with_interval(difference: PairedDifference | None, word: str = "") -> str:
    """A difference, a word on it, and its interval, as far as there are any."""
    if difference is None:
        return "-"
    if difference.low is None:
        return f"{difference.mean:+.4f}"
    return f"{difference.mean:+.4f} {word}".rstrip() + f" [{difference.low:+.4f}, {difference.high:+.4f}]"


def _text(row: Row) -> str:
    return f"{row.records[0].val_tokens:,} of {row.records[0].val_hash[:8]}"


def losses_of(comparison: Compared) -> str:
    """What the losses are losses of."""
    if len({_text(row) for row in comparison.rows}) > 1:
        return f"Loss in nats per token of each row's own text; {seed_words(comparison.seeds)}."
    budget = "" if not comparison.paired else f", after training on {comparison.tokens:,} tokens"
    return (
        f"Loss in nats per token on {comparison.val_tokens:,} tokens of split {comparison.val_hash[:12]}{budget}; "
        f"{seed_words(comparison.seeds)}."
    )


def _facts(comparison: Compared) -> list[str]:
    differences = (
        f"Differences are to {comparison.baseline}, paired by seed, with {percent(comparison.confidence)} confidence "
        "intervals (Student's t)."
        if comparison.paired
        else "The rows differ in their batches, their budget or what they are evaluated on: nothing can be paired."
    )
    return [
        losses_of(comparison),
        differences,
        *([REACH] if comparison.paired else []),
        *([f"Unigram entropy of the corpus: {e:.4f}."] if (e := comparison.unigram_entropy) is not None else []),
    ]


def _notes(comparison: Compared) -> list[str]:
    marked = {note for row in comparison.rows if row.provisional for note in row.notes[:1]}
    return [f"{MARK.strip()} {note}" if note in marked else note for note in comparison.notes]


def percent(confidence: float) -> str:
    return f"{100 * confidence:.6g}%"


def _record(comparison: Compared, row: Row) -> dict[str, str | int]:
    difference, (what, other, to_that) = row.difference, row.matched or ("", "", None)
    return {
        "architecture": row.label,
        "baseline": comparison.baseline,
        "seeds": " ".join(map(str, row.seeds)),
        "n": row.loss.n,
        "loss": _number(row.loss.mean),
        "loss_standard_error": _number(row.loss.standard_error),
        "loss_std": _number(row.loss.std),
        "best_loss": _number(row.best.mean),
        "paired_seeds": " ".join(map(str, difference.seeds)) if difference else "",
        "difference": _of(difference, "mean"),
        "difference_standard_error": _of(difference, "standard_error", ".6f"),
        "difference_low": _of(difference, "low"),
        "difference_high": _of(difference, "high"),
        "p_value": _of(difference, "p_value", ".4g"),
        "confidence": f"{comparison.confidence:.6g}",
        "verdict": row.verdict,
        "matched": what,
        "matched_with": other,
        "matched_difference": _of(to_that, "mean"),
        "matched_low": _of(to_that, "low"),
        "matched_high": _of(to_that, "high"),
        "reached_baseline": row.reached,
        "tokens_fraction": _number(row.tokens_fraction),
        "speed_ratio": _number(row.speed_ratio),
        "time_ratio": _number(row.time_ratio),
        "parameters": row.parameters,
        "train_tokens": row.records[0].tokens,
        "val_tokens": row.records[0].val_tokens,
        "val_hash": row.records[0].val_hash,
        "unigram_entropy": _number(comparison.unigram_entropy),
        "notes": " ".join(row.notes),
        "remarks": " ".join(comparison.remarks),
        "rows_differ_in": "; ".join(str(found) for found in comparison.differences if not found.meant),
    }


def _of(difference: PairedDifference | None, name: str, digits: str = "+.6f") -> str:
    return _number(getattr(difference, name, None), digits)


def _number(value: float | None, digits: str = ".6f") -> str:
    return "" if value is None else format(value, digits)
