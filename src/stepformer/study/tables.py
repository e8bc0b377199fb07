"""Comparisons and forgetting as tables: what is shown, and what has everything, for CSV, JSON and pandas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepformer.present.tables import Column, Table, tabulated, text
from stepformer.study.forgetting import AMOUNTS, Direction, ForgettingRow
from stepformer.study.records import Compared, HeldOutRows, Row, RunRecord, verdict_of
from stepformer.study.statistics import PairedDifference, Summary, seed_words, several_intervals, summarise

HUES = {"better": "green", "worse": "red"}  # of a row in a terminal
MARK = " *"  # beside a verdict that has a note against claiming it


def summary_table(comparison: Compared) -> Table:
    """For the terminal, Markdown and notebooks: every row, then what was measured and what has to be known."""
    budgets = len({row.records[0].tokens for row in comparison.rows}) > 1
    texts = len({_text(row) for row in comparison.rows}) > 1
    own = next((row.matched[0] for row in comparison.rows if row.matched and row.matched[2] != row.difference), "")
    seeds = Column("n", numeric=True, printed=len({row.loss.n for row in comparison.rows}) > 1)
    interval = Column(f"difference [{percent(comparison.confidence)} CI]", numeric=True)
    speed = Column("speed", numeric=True, printed=False)
    fields = [
        (Column("architecture"), lambda row: text(row.label, style=HUES.get(row.verdict * (not row.provisional), ""))),
        (seeds, lambda row: text(row.loss.n)),
        (Column("tokens", numeric=True), lambda row: text(f"{row.records[0].tokens:,}")),
        (Column("evaluated on", numeric=True), lambda row: text(_text(row))),
        (Column("final loss ± se", numeric=True), lambda row: text(with_error(row.loss))),
        (interval, lambda row: text(with_interval(row.difference))),
        (Column(f"at equal {own}", numeric=True), lambda row: text(with_interval(row.matched and row.matched[2]))),
        (Column("parameters", numeric=True), lambda row: text(f"{row.parameters:,}")),
        (Column("verdict", printed=False), lambda row: text(row.verdict + MARK * row.provisional)),
        (Column("best loss", numeric=True, spare=1), lambda row: text(f"{row.best.mean:.4f}")),
        (Column("tokens to baseline", numeric=True, spare=2), lambda row: text(reach(row, row.tokens_fraction))),
        (Column("time to baseline", numeric=True, spare=1), lambda row: text(reach(row, row.seconds_fraction))),
        (Column("time", numeric=True, spare=2), lambda row: text(_in_seconds(row.seconds))),
        (speed, lambda row: text(f"{r:.2f} x" if (r := row.speed_ratio) is not None else "-")),
    ]
    marked = {note for row in comparison.rows if row.provisional for note in row.notes[:1]}
    notes = [f"{MARK.strip()} {note}" if note in marked else note for note in comparison.notes]
    table = tabulated(comparison.rows, fields, "Comparison with the baseline", [*_facts(comparison), *notes])
    return table.without(place for place, there in ((2, budgets), (3, texts), (6, own)) if not there)


def held_out_tables(comparison: Compared) -> list[Table]:
    """For each text that nothing was chosen by the losses of all rows."""
    found = []
    for held in comparison.held_out:
        rows = []
        own = next((what for label, (what, _, to) in held.matched.items() if to != held.differences.get(label)), "")
        titles = ["loss ± se", f"difference [{percent(comparison.confidence)} CI]", *[f"at equal {own}"] * bool(own)]
        seeds = Column("n", numeric=True, printed=len({len(losses) for losses in held.losses.values()}) > 1)
        columns = [Column("architecture"), seeds, *(Column(title, numeric=True) for title in titles)]
        columns.append(Column("verdict", printed=False))
        for row in comparison.rows:
            losses, matched = held.losses[row.label], held.matched.get(row.label)
            cells = [row.label, len(losses), _mean(losses), with_interval(held.differences.get(row.label))]
            cells += [with_interval(matched and matched[2])] * bool(own)
            rows.append([text(value) for value in (*cells, _judged(row, held))])
        on = f"Held-out text {held.name}: {held.tokens:,} tokens, hash {held.hash}; final weights, evaluated once."
        found.append(Table(columns, rows, on, list(held.notes)))
    return found


def _mean(losses: Mapping[int, float]) -> str:
    return with_error(summarise(losses.values())) if losses else "-"


def _judged(row: Row, held: HeldOutRows) -> str:
    difference = held.differences.get(row.label)
    if row.is_baseline or difference is None:
        return "baseline" if row.is_baseline else "no common seed"
    found = verdict_of(difference, None if row.other_budget else held.matched.get(row.label))
    return f"{found}{', other budget' * row.other_budget}{MARK * difference.provisional}"


def full_table(comparison: Compared) -> Table:
    """One line per architecture; every line carries what was measured, so lines can be pooled."""
    return _of_records([_record(comparison, row) for row in comparison.rows])


def _of_records(records: Sequence[Mapping[str, Any]]) -> Table:
    rows = [[text("" if value is None else value) for value in record.values()] for record in records]
    return Table([Column(key) for key in records[0]], rows)


def reach(row: Row, fraction: float | None) -> str:
    """Part of the budget to the baseline's loss: a mean when every common seed got there, else how many did."""
    if fraction is not None:
        return f"{fraction:.1%}"
    some = f"{row.reached} of {len(row.common_seeds)}" if row.reached else "never"
    return some if row.common_seeds else "-"


def _in_seconds(time: float) -> str:
    return f"{time:,.0f} s" if time >= 100 else f"{time:.3g} s"


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


def evaluated_on(comparison: Compared) -> str:
    """The validation text."""
    settings = comparison.rows[0].records[0].settings
    half, split = settings.get("train.eval_half", "all"), comparison.val_hash
    if half == "all":
        return f"on {comparison.val_tokens:,} tokens of split {split[:12]}"
    whole = str(settings.get("data.corpus", split)).split()[-1]  # no file has the hash of a half
    return f"on {comparison.val_tokens:,} tokens of the {half} half ({split[:12]}) of split {whole[:12]}"


def losses_of(comparison: Compared) -> str:
    """What the losses are losses of."""
    on = evaluated_on(comparison)
    if len({_text(row) for row in comparison.rows}) > 1:
        on = "of each row's own text"
    elif comparison.paired and len({row.records[0].tokens for row in comparison.rows}) == 1:
        on += f", after training on {comparison.tokens:,} tokens"
    return f"Loss in nats per token {on}; {seed_words(comparison.seeds)}."


def differences_of(comparison: Compared) -> str:
    """What the differences are differences to, and what their intervals are."""
    level = f"{percent(comparison.confidence)} confidence intervals (Student's t)"
    return f"Differences are to {comparison.baseline}, paired by seed, with {level}."


def _facts(comparison: Compared) -> list[str]:
    differences = [
        differences_of(comparison),
        "Tokens to baseline: part of the budget after which the baseline's final loss was reached, or how many seeds "
        "reached it; time to baseline: part of its seconds. Both are points of the row's whole schedule, not runs that "
        "end there. Time: of a run's training steps, without compiling, evaluating and saving. Speed: training "
        "tokens per second over the baseline's.",
    ]
    unpaired = ["The rows differ in their batches, their budget or what they are evaluated on: nothing can be paired."]
    return [
        losses_of(comparison),
        *(differences if comparison.paired else unpaired),
        *(
            [f"Unigram entropy of the validation text: {e:.4f}."]
            if (e := comparison.unigram_entropy) is not None
            else []
        ),
    ]


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
        "train_loss": _number(row.train.mean if row.train else None),
        "loss_by_seed": _by_seed(record.val_loss for record in row.records),
        "best_loss_by_seed": _by_seed(record.best_val_loss for record in row.records),
        "seconds_by_seed": _by_seed(record.seconds for record in row.records),
        "start_seconds_by_seed": _by_seed(record.start_seconds for record in row.records),
        "order_by_seed": _by_seed(_same_order(record, base) for record, base in _with_baseline(comparison, row)),
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
        "seconds_fraction": _number(row.seconds_fraction),
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
        **{key: value for held in comparison.held_out for key, value in _held_out(held, row).items()},
    }


def _held_out(held: HeldOutRows, row: Row) -> dict[str, str | int]:
    losses, difference = held.losses[row.label], held.differences.get(row.label)
    to_that = found[2] if (found := held.matched.get(row.label)) else None
    summary = summarise(losses.values()) if losses else None
    facts: dict[str, str | int] = {
        "loss": _number(summary.mean if summary else None),
        "loss_standard_error": _number(summary.standard_error if summary else None),
        "loss_by_seed": _by_seed(losses.get(seed, math.nan) for seed in row.seeds),
        "difference": _of(difference, "mean"),
        "difference_standard_error": _of(difference, "standard_error", ".6f"),
        "difference_low": _of(difference, "low"),
        "difference_high": _of(difference, "high"),
        "p_value": _of(difference, "p_value", ".4g"),
        "matched_difference": _of(to_that, "mean"),
        "matched_low": _of(to_that, "low"),
        "matched_high": _of(to_that, "high"),
        "tokens": held.tokens,
        "hash": held.hash,
    }
    return {f"held_out_{held.name}_{key}": value for key, value in facts.items()}


def _by_seed(values: Iterable[float]) -> str:
    return " ".join(map(_number, values))


def _with_baseline(comparison: Compared, row: Row) -> list[tuple[RunRecord, RunRecord]]:
    """The runs of a row, each with the baseline's of the same seed; none unless every seed has one."""
    others = {record.seed: record for record in comparison.rows[0].records}
    return [(record, others[record.seed]) for record in row.records] if {*row.seeds} <= others.keys() else []


def _same_order(record: RunRecord, base: RunRecord) -> float:
    """Part of the evaluations after a tenth of the tokens that order two runs as the last one does."""
    other, later = dict(base.curve), [tokens for tokens, _ in record.curve if 10 * tokens > record.tokens]
    apart = [loss - other[tokens] for tokens, loss in record.curve if tokens in other and tokens in later]
    return sum((one < 0) == (apart[-1] < 0) for one in apart) / len(apart) if apart else math.nan


def _of(difference: PairedDifference | None, name: str, digits: str = "+.6f") -> str:
    return _number(getattr(difference, name, None), digits)


def _number(value: float | None, digits: str = ".6f") -> str:
    return "" if value is None else format(value, digits)


def forgetting_table(directions: Sequence[Direction]) -> Table:
    """For the terminal and Markdown, and what it is a table of."""
    titles, rows = ["direction", "architecture", "n"], []
    for what, corpus in AMOUNTS.items():
        titles += [f"{corpus} loss", f"{what} ± se", f"difference [{percent(directions[0].confidence)} CI]"]
    for direction, row in _rows(directions):
        cells = [direction.name, row.label, str(len(row.runs))]
        for what, corpus in AMOUNTS.items():
            cells.append(f"{row.mean(corpus, 0):.4f} -> {row.mean(corpus, -1):.4f}")
            cells += [with_error(row.amount(what)), _less_or_more(row.differences[what])]
        rows.append(list(map(text, cells)))
    columns = [Column(title, numeric=place > 1) for place, title in enumerate(titles)]
    return Table(columns, rows, "Forgetting", _forgetting_facts(directions))


def forgetting_details(directions: Sequence[Direction]) -> Table:
    """One line for each architecture and direction, with every number."""
    return _of_records([_forgetting_row(*found) for found in _rows(directions)])


def forgetting_record(directions: Sequence[Direction], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as JSON values: `rows` by architecture and direction, `runs` with their curves."""
    return {
        "format": 1,
        "kind": "forgetting",
        "direction": "; ".join(direction.name for direction in directions),
        "settings": dict(settings),
        "rows": [_forgetting_row(*found) for found in _rows(directions)],
        "runs": [
            {
                "direction": direction.name,
                "architecture": row.label,
                "seed": run.seed,
                "folder": str(run.folder),
                "init": dict(run.start),
                **{what: getattr(run, what) for what in AMOUNTS},
                "steps": list(run.evaluated),
                "source_loss": list(run.source),
                "target_loss": list(run.target),
            }
            for direction, row in _rows(directions)
            for run in row.runs
        ],
        "evaluated": [
            {
                "direction": direction.name,
                "source_tokens": direction.first.source_tokens,
                "source_hash": direction.first.source_hash,
                "target_tokens": direction.first.val_tokens,
                "target_hash": direction.first.val_hash,
            }
            for direction in directions
        ],
    }


def _rows(directions: Sequence[Direction]) -> list[tuple[Direction, ForgettingRow]]:
    return [(direction, row) for direction in directions for row in direction.rows]


def _forgetting_facts(directions: Sequence[Direction]) -> list[str]:
    """What has to be known to read the table."""
    first, record = directions[0], directions[0].first
    seeds = sorted({run.seed for _, row in _rows(directions) for run in row.runs})
    differences = [found for _, row in _rows(directions) for found in row.differences.values()]
    return [
        "Forgetting F: rise of the source loss. Plasticity P: fall of the target loss. Nats per token, "
        f"{record.steps:,} fine-tuning steps of {record.tokens // record.steps:,} tokens; {seed_words(seeds)}.",
        *(
            f"{d.name}: source loss on {d.first.source_tokens:,} tokens of split {d.first.source_hash[:12]}, target "
            f"loss on {d.first.val_tokens:,} tokens of split {d.first.val_hash[:12]}."
            for d in directions
        ),
        f"± is the standard error over seeds. Differences are to {first.baseline}, paired by seed, with "
        f"{percent(first.confidence)} intervals (Student's t); 'less' or 'more' where the interval excludes zero.",
        *several_intervals(differences, first.confidence),
        *(f"{MARK.strip()} {note}" for direction in directions for note in direction.notes),
    ]


def _less_or_more(difference: PairedDifference | None) -> str:
    """With a word for less or more than the baseline, or nothing when the interval does not exclude zero."""
    word = {"better": "less", "worse": "more"}.get(difference.verdict, "") if difference else ""
    return with_interval(difference, MARK.strip() if difference and difference.provisional else word)


def _forgetting_row(direction: Direction, row: ForgettingRow) -> dict[str, Any]:
    record: dict[str, Any] = {
        "direction": direction.name,
        "architecture": row.label,
        "baseline": direction.baseline,
        "seeds": " ".join(str(run.seed) for run in row.runs),
        "n": len(row.runs),
    }
    for what, corpus in AMOUNTS.items():
        summary, difference = row.amount(what), row.differences[what]
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
