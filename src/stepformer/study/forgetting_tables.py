"""Forgetting and plasticity as tables: the one that is shown, the one with everything, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepformer.present.tables import Column, Table, text
from stepformer.study.forgetting import Direction, ForgettingRow
from stepformer.study.statistics import PairedDifference, Summary, seed_words, several_intervals
from stepformer.study.tables import percent, with_error, with_interval

FORMAT = 1
AMOUNTS = {"forgetting": "source", "plasticity": "target"}  # and the corpus whose loss they are of
MARK = "*"  # beside a difference that has a note against claiming it


def forgetting_table(directions: Sequence[Direction]) -> Table:
    """For the terminal and Markdown, and what it is a table of."""
    interval = percent(directions[0].confidence)
    numbers = (
        *("n", "source loss", "forgetting ± se", f"difference [{interval} CI]"),
        *("target loss", "plasticity ± se", f"difference [{interval} CI]"),
    )
    columns = [Column("direction"), Column("architecture"), *(Column(title, numeric=True) for title in numbers)]
    rows = [list(map(text, _cells(direction, row))) for direction in directions for row in direction.rows]
    return Table(columns, rows, "Forgetting", facts(directions))


def forgetting_details(directions: Sequence[Direction]) -> Table:
    """One line for each architecture and direction, with every number."""
    records = [_record(direction, row) for direction in directions for row in direction.rows]
    rows = [[text("" if value is None else value) for value in record.values()] for record in records]
    return Table([Column(key) for key in records[0]], rows)


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
    first, record = directions[0], directions[0].first.record
    seeds = sorted({seed for d in directions for row in d.rows for seed in row.seeds})
    interval = percent(first.confidence)
    found = [
        "Forgetting F: rise of the source loss. Plasticity P: fall of the target loss. Nats per token, "
        f"{record.steps:,} fine-tuning steps of {record.tokens // record.steps:,} tokens; {seed_words(seeds)}.",
        *(
            f"{d.name}: source loss on {d.first.source_tokens:,} tokens of split {d.first.source_hash[:12]}, target "
            f"loss on {d.first.record.val_tokens:,} tokens of split {d.first.record.val_hash[:12]}."
            for d in directions
        ),
        f"± is the standard error over seeds. Differences are to {first.baseline}, paired by seed, with {interval} "
        "intervals (Student's t); 'less' or 'more' where the interval excludes zero.",
    ]
    rows = [row for direction in directions for row in direction.rows]
    differences = [d for row in rows for d in (row.forgetting_difference, row.plasticity_difference)]
    found += several_intervals(differences, first.confidence)
    return found + [f"{MARK} {note}" for direction in directions for note in direction.notes]


def _cells(direction: Direction, row: ForgettingRow) -> list[str]:
    cells = [direction.name, row.label, str(len(row.runs))]
    for what, corpus in AMOUNTS.items():
        cells.append(f"{row.mean(corpus, 0):.4f} -> {row.mean(corpus, -1):.4f}")
        cells += [with_error(getattr(row, what)), _difference(getattr(row, f"{what}_difference"))]
    return cells


def _difference(difference: PairedDifference | None) -> str:
    """With a word for less or more than the baseline, or nothing when the interval does not exclude zero."""
    words = {"better": "less", "worse": "more"}
    provisional = difference is not None and difference.provisional
    return with_interval(difference, MARK if provisional else words.get(difference.verdict, "") if difference else "")


def _record(direction: Direction, row: ForgettingRow) -> dict[str, Any]:
    record: dict[str, Any] = {
        "direction": direction.name,
        "architecture": row.label,
        "baseline": direction.baseline,
        "seeds": " ".join(map(str, row.seeds)),
        "n": len(row.runs),
    }
    for what, corpus in AMOUNTS.items():
        summary: Summary = getattr(row, what)
        difference: PairedDifference | None = getattr(row, f"{what}_difference")
        record |= {
            f"{corpus}_before": row.mean(corpus, 0),
            f"{corpus}_after": row.mean(corpus, -1),
            what: summary.mean,
            f"{what}_standard_error": summary.standard_error,
            f"{what}_difference": difference and difference.mean,
            f"{what}_difference_low": difference and difference.low,
            f"{what}_difference_high": difference and difference.high,
        }
    return record | {"confidence": direction.confidence}
