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
        *([Column("tokens", numeric=True)] if budgets else []),
        *([Column("evaluated on", numeric=True)] if texts else []),
        Column("final loss ± se", numeric=True),
        Column(f"difference [{percent(comparison.confidence)} CI]", numeric=True),
        Column("parameters", numeric=True),
        Column("verdict"),
        Column("best loss", numeric=True, spare=1),
        Column("tokens to baseline", numeric=True, spare=1),
        Column("speed", numeric=True),
    ]
    rows = [[_name(row), *map(text, _cells(row, budgets, texts))] for row in comparison.rows]
    return Table(columns, rows, "Comparison with the baseline", [*_facts(comparison), *_notes(comparison)])


def _name(row: Row) -> Cell:
    style = "" if row.provisional else {"better": "green", "worse": "red"}.get(row.verdict, "")
    return text(row.label, style=style)


def full_table(comparison: Compared) -> Table:
    """One line per architecture; every line carries what was measured, so lines can be pooled."""
    records = [_record(comparison, row) for row in comparison.rows]
    return Table([Column(key) for key in records[0]], [list(map(text, record.values())) for record in records])


def _cells(row: Row, budgets: bool, texts: bool) -> list[str]:
    return [
        str(row.loss.n),
        *([f"{row.records[0].tokens:,}"] if budgets else []),
        *([_text(row)] if texts else []),
        _loss(row.loss),
        _difference(row.difference),
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


def _loss(summary: Summary) -> str:
    error = "" if summary.standard_error is None else f" ± {summary.standard_error:.4f}"
    return f"{summary.mean:.4f}{error}"


def _difference(difference: PairedDifference | None) -> str:
    if difference is None:
        return "-"
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.4f}"
    return str(difference)


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
    difference = row.difference
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
        "difference": _number(difference.mean if difference else None, "+.6f"),
        "difference_standard_error": _number(difference.standard_error if difference else None),
        "difference_low": _number(difference.low if difference else None, "+.6f"),
        "difference_high": _number(difference.high if difference else None, "+.6f"),
        "p_value": _number(difference.p_value if difference else None, ".4g"),
        "confidence": f"{comparison.confidence:.6g}",
        "verdict": row.verdict,
        **_matched(row),
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


def _matched(row: Row) -> dict[str, str]:
    """The difference to a baseline that has as much of something."""
    what, other, found = row.matched or ("", "", None)
    return {
        "matched": what,
        "matched_with": other,
        "matched_difference": _number(found.mean if found else None, "+.6f"),
        "matched_low": _number(found.low if found else None, "+.6f"),
        "matched_high": _number(found.high if found else None, "+.6f"),
    }


def _number(value: float | None, digits: str = ".6f") -> str:
    return "" if value is None else format(value, digits)
