"""Forgetting and plasticity as tables: for the terminal, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from stepformer.comparing.forgetting import Direction, ForgettingRow
from stepformer.comparing.statistics import PairedDifference, Summary, seed_words
from stepformer.comparing.tables import percent

FORMAT = 1
MARK = "*"  # beside a difference that has a note against claiming it
TEXT = 2  # columns of words, to the left


def forgetting_table(directions: Sequence[Direction], width: int = 120) -> Table:
    """For `console.print`; under 170 columns cells are stacked."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
        caption=escape("\n" + "\n".join(facts(directions))),
        caption_justify="left",
        caption_style="",
    )
    wide = width >= 170

    def shown(text: str) -> str:
        return escape(text if wide else text.replace(" [", "\n[").replace(" ±", "\n±").replace(" -> ", "\n-> "))

    for column, title in enumerate(_header(directions)):
        table.add_column(shown(title), justify="left" if column < TEXT else "right", no_wrap=True, vertical="top")
    for direction in directions:
        for row in direction.rows:
            last = row is direction.rows[-1]
            table.add_row(*map(shown, _cells(direction, row)), end_section=last)
    return table


def forgetting_markdown(directions: Sequence[Direction]) -> str:
    """A table that also reads well as text, and what it is a table of."""
    lines = [_header(directions), *(_cells(d, row) for d in directions for row in d.rows)]
    lines = [[text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_") for text in line] for line in lines]
    widths = [max(2, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    rule = ["-" * width if column < TEXT else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    out = []
    for line in [lines[0], rule, *lines[1:]]:
        cells = [
            text.ljust(w) if c < TEXT else text.rjust(w) for c, (text, w) in enumerate(zip(line, widths, strict=True))
        ]
        out.append(f"| {' | '.join(cells)} |")
    said = [fact.replace("*", "\\*").replace("_", "\\_") for fact in facts(directions)]
    return "\n".join([*out, "", *said]) + "\n"


def forgetting_csv(directions: Sequence[Direction]) -> str:
    """One line for each architecture and direction."""
    rows = [_record(direction, row) for direction in directions for row in direction.rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def forgetting_record(directions: Sequence[Direction], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as JSON values: `rows` by architecture and direction, `runs` with their curves."""
    return {
        "format": FORMAT,
        "kind": "forgetting",
        "direction": "; ".join(direction.name for direction in directions),
        "settings": dict(settings),
        "rows": [_record(direction, row) for direction in directions for row in direction.rows],
        "runs": [
            {
                "direction": direction.name,
                "architecture": row.label,
                "seed": run.record.seed,
                "folder": str(run.record.folder),
                "init": dict(run.start),
                "forgetting": run.forgetting,
                "plasticity": run.plasticity,
                "steps": list(run.steps),
                "source_loss": list(run.source),
                "target_loss": list(run.target),
            }
            for direction in directions
            for row in direction.rows
            for run in row.runs
        ],
        "evaluated": [
            {
                "direction": direction.name,
                "source_tokens": direction.first.source_tokens,
                "source_hash": direction.first.source_hash,
                "target_tokens": direction.first.record.val_tokens,
                "target_hash": direction.first.record.val_hash,
            }
            for direction in directions
        ],
    }


def facts(directions: Sequence[Direction]) -> list[str]:
    """What has to be known to read the table."""
    first = directions[0]
    seeds = sorted({seed for d in directions for row in d.rows for seed in row.seeds})
    interval = percent(first.confidence)
    found = [
        "Forgetting F: rise of the source loss. Plasticity P: fall of the target loss. Nats per token, "
        f"{first.first.record.steps:,} fine-tuning steps of {_step_tokens(first):,} tokens; {seed_words(seeds)}.",
        *(
            f"{d.name}: source loss on {d.first.source_tokens:,} tokens of split {d.first.source_hash[:12]}, target "
            f"loss on {d.first.record.val_tokens:,} tokens of split {d.first.record.val_hash[:12]}."
            for d in directions
        ),
        f"± is the standard error over seeds. Differences are to {first.baseline}, paired by seed, with {interval} "
        "intervals (Student's t); 'less' or 'more' where the interval excludes zero.",
    ]
    intervals = sum(
        difference is not None and difference.low is not None
        for d in directions
        for row in d.rows
        for difference in (row.forgetting_difference, row.plasticity_difference)
    )
    if intervals > 1:
        chance = min(1.0, intervals * (1 - first.confidence))
        found.append(
            f"Each interval holds on its own: among {intervals}, the chance that at least one misses the true "
            f"difference is up to {chance:.0%}."
        )
    return found + [f"{MARK} {note}" for direction in directions for note in direction.notes]


def _step_tokens(direction: Direction) -> int:
    record = direction.first.record
    return record.tokens // record.steps


def _header(directions: Sequence[Direction]) -> list[str]:
    interval = percent(directions[0].confidence)
    return [
        "direction",
        "architecture",
        "n",
        "source loss",
        "forgetting ± se",
        f"difference [{interval} CI]",
        "target loss",
        "plasticity ± se",
        f"difference [{interval} CI]",
    ]


def _cells(direction: Direction, row: ForgettingRow) -> list[str]:
    return [
        direction.name,
        row.label,
        str(len(row.runs)),
        f"{row.mean('source', 0):.4f} -> {row.mean('source', -1):.4f}",
        _mean(row.forgetting),
        _difference(row.forgetting_difference),
        f"{row.mean('target', 0):.4f} -> {row.mean('target', -1):.4f}",
        _mean(row.plasticity),
        _difference(row.plasticity_difference),
    ]


def _mean(summary: Summary) -> str:
    error = "" if summary.standard_error is None else f" ± {summary.standard_error:.4f}"
    return f"{summary.mean:.4f}{error}"


def _difference(difference: PairedDifference | None) -> str:
    if difference is None:
        return "-"
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.4f}"
    word = MARK if difference.provisional else amount_word(difference)
    return f"{difference.mean:+.4f} {word}".rstrip() + f" [{difference.low:+.4f}, {difference.high:+.4f}]"


def amount_word(difference: PairedDifference) -> str:
    """Less or more than the baseline, or nothing when the interval does not exclude zero."""
    if difference.low is None or difference.high is None:
        return ""
    return "less" if difference.high < 0 else "more" if difference.low > 0 else ""


def _record(direction: Direction, row: ForgettingRow) -> dict[str, Any]:
    record: dict[str, Any] = {
        "direction": direction.name,
        "architecture": row.label,
        "baseline": direction.baseline,
        "seeds": " ".join(map(str, row.seeds)),
        "n": len(row.runs),
    }
    for what, corpus in (("forgetting", "source"), ("plasticity", "target")):
        summary: Summary = getattr(row, what)
        difference: PairedDifference | None = getattr(row, f"{what}_difference")
        record |= {
            f"{corpus}_before": row.mean(corpus, 0),
            f"{corpus}_after": row.mean(corpus, -1),
            what: summary.mean,
            f"{what}_standard_error": summary.standard_error,
            f"{what}_difference": difference.mean if difference else None,
            f"{what}_difference_low": difference.low if difference else None,
            f"{what}_difference_high": difference.high if difference else None,
        }
    return record | {"confidence": direction.confidence}
