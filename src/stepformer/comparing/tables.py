"""A comparison as a table: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from typing import Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from stepformer.comparing.statistics import Comparison, PairedDifference, Row, Summary, seed_words

MARK = " *"  # beside a verdict that has a note against claiming it
TEXT_COLUMNS = (0, 4)  # the others are numbers, to the right
BEST, PARAMETERS = 5, 8
WIDE = 112


def rich_table(comparison: Comparison, width: int = 120) -> Table:
    """For `console.print`; under 112 columns it stacks cells and leaves best loss and parameters to the other forms."""
    wide = width >= WIDE
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # beside the blank that the box puts between columns
        header_style="bold",
        caption=escape("\n" + "\n".join(_facts(comparison) + _notes(comparison))),
        caption_justify="left",
        caption_style="",
    )
    # two words above each other save the width that long names need
    header = [text.replace(" to ", " to\n").replace("best ", "best\n") for text in _header(comparison)]
    rows = [_cells(row) for row in comparison.rows]
    if not wide:
        header = [text.replace(" ±", "\n±").replace(" [", "\n[") for text in header]
        rows = [
            [cell.replace(" ±", "\n±").replace(" [", "\n[") if 2 <= c <= 3 else cell for c, cell in enumerate(row)]
            for row in rows
        ]
    names = max(len(row.label) for row in comparison.rows)
    roomy = wide and names <= 21  # longer names take the room of columns that say least
    whole_names = names <= (33 if wide else 14)  # otherwise they fold, before numbers would be cut
    shown = [column for column in range(len(header)) if roomy or column not in (BEST, PARAMETERS)]
    for column in shown:
        justify: Literal["left", "right"] = "left" if column in TEXT_COLUMNS else "right"
        no_wrap = column not in TEXT_COLUMNS or (column == 0 and whole_names)
        table.add_column(escape(header[column]), justify=justify, no_wrap=no_wrap, overflow="fold", vertical="top")
    for row, cells in zip(comparison.rows, rows, strict=True):
        style = None if row.provisional else {"better": "green", "worse": "red"}.get(row.verdict)
        table.add_row(*(escape(cells[column]) for column in shown), style=style)
    return table


def markdown_text(comparison: Comparison) -> str:
    """A GitHub table, padded so that it also reads well as text, followed by what was measured and the notes."""
    lines = [[_cell(text) for text in _header(comparison)]]
    lines += [[_cell(text) for text in _cells(row)] for row in comparison.rows]
    # at least two: a delimiter such as "-:" needs its hyphen
    widths = [max(2, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    rule = ["-" * w if c in TEXT_COLUMNS else "-" * (w - 1) + ":" for c, w in enumerate(widths)]
    out = []
    for line in [lines[0], rule, *lines[1:]]:
        cells = (
            t.ljust(w) if c in TEXT_COLUMNS else t.rjust(w) for c, (t, w) in enumerate(zip(line, widths, strict=True))
        )
        out.append(f"| {' | '.join(cells)} |")
    facts = " ".join(_inline(fact) for fact in _facts(comparison))
    return "\n".join([*out, "", facts, *(f"\n{_inline(note)}" for note in _notes(comparison))]) + "\n"


def csv_text(comparison: Comparison) -> str:
    """One line per architecture under one header; every line carries what was measured, so lines can be pooled."""
    rows = [_record(comparison, row) for row in comparison.rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _header(comparison: Comparison) -> list[str]:
    return [
        "architecture",
        "n",
        "final loss ± se",
        f"difference [{percent(comparison.confidence)} CI]",
        "verdict",
        "best loss",
        "tokens to baseline",
        "speed",
        "parameters",
    ]


def _cells(row: Row) -> list[str]:
    return [
        row.label,
        str(row.loss.n),
        _loss(row.loss),
        _difference(row.difference),
        row.verdict + (MARK if row.provisional else ""),
        f"{row.best.mean:.4f}",
        reach(row),
        "-" if row.speed_ratio is None else f"{row.speed_ratio:.2f} x",
        f"{row.parameters:,}",
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


def _facts(comparison: Comparison) -> list[str]:
    return [
        f"Loss in nats per token on {comparison.val_tokens:,} tokens of split {comparison.val_hash[:12]}, after "
        f"training on {comparison.tokens:,} tokens; {seed_words(comparison.seeds)}.",
        f"Differences are to {comparison.baseline}, paired by seed, with {percent(comparison.confidence)} confidence "
        "intervals (Student's t).",
        "Tokens to baseline: part of the budget after which the baseline's final loss was reached, or how many seeds "
        "reached it. Speed: training tokens per second over the baseline's.",
        *([f"Unigram entropy of the corpus: {e:.4f}."] if (e := comparison.unigram_entropy) is not None else []),
    ]


def _notes(comparison: Comparison) -> list[str]:
    marked = {note for row in comparison.rows if row.provisional for note in row.notes[:1]}
    return [f"{MARK.strip()} {note}" if note in marked else note for note in comparison.notes]


def percent(confidence: float) -> str:
    return f"{100 * confidence:.6g}%"


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")


def _inline(text: str) -> str:
    """Text that Markdown shows as it is: a label with underscores, a `*` that is a mark."""
    for character in "\\`*_<":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")


def _record(comparison: Comparison, row: Row) -> dict[str, str | int]:
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
        "reached_baseline": row.reached,
        "tokens_fraction": _number(row.tokens_fraction),
        "speed_ratio": _number(row.speed_ratio),
        "time_ratio": _number(row.time_ratio),
        "parameters": row.parameters,
        "train_tokens": comparison.tokens,
        "val_tokens": comparison.val_tokens,
        "val_hash": comparison.val_hash,
        "unigram_entropy": _number(comparison.unigram_entropy),
        "notes": " ".join(row.notes),
    }


def _number(value: float | None, digits: str = ".6f") -> str:
    return "" if value is None else format(value, digits)
