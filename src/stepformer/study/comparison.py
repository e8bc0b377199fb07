"""What a set of finished runs says about the difference between architectures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepformer.base.errors import InputError
from stepformer.base.files import write_text
from stepformer.present.tables import Table, markdown_text
from stepformer.study import statistics
from stepformer.study.differences import LISTED, MATCHED, Difference, differences
from stepformer.study.grids import best_point
from stepformer.study.held_out import HeldOut
from stepformer.study.plots import draw_comparison, plot_comparison
from stepformer.study.records import Compared, Facts, Row, RunRecord, by_label, check_alike, matched_words, values
from stepformer.study.tables import full_table, held_out_tables, summary_table

# What may differ between the seeds of one row: the machine they ran on, what else was imported, how the work was cut
# into pieces, and the runs they began with.
ALIKE = {
    "val_hash": "they were evaluated on different splits (hashes {:.12} and {:.12})",
    "val_tokens": "they were evaluated on different numbers of tokens ({:,} and {:,})",
    "tokens": "their budgets are {:,} and {:,} training tokens (`compare --allow steps` permits that)",
    "pairing": "the same seed gives them different batches (pairing {} and {})",
}
OWN_BUDGETS = {  # of rows that may be of different lengths
    **{fact: said for fact, said in ALIKE.items() if fact.startswith("val_")},
    "same_batches": ALIKE["pairing"],
}
SAME_SIZE = 0.05  # as far apart as matched baselines may be
REMEDY = "; `--match parameters` adds a baseline of equal size"
ROUGH = "seconds and speeds are rough."
FEW_STEPS = 50
UNEVEN = 1.2  # the fastest seed of a row over the slowest, from where the machine had something else to do
BETWEEN_SEEDS = (*LISTED, "train.init", "train.micro_batch", "train.device", "train.parallel", "train.graph")


def time_ratio(baseline: Mapping[int, RunRecord], other: Mapping[int, RunRecord]) -> float:
    """Training time per token over the baseline's: 1.2 takes a fifth longer for the same tokens."""
    seconds = [{seed: run.seconds / run.tokens for seed, run in runs.items()} for runs in (baseline, other)]
    return statistics.mean_ratio(*seconds)


def speeds_apart(row: Row) -> float:
    """The speed of the fastest seed over that of the slowest."""
    speeds = [record.speed for record in row.records]
    return max(speeds) / min(speeds)


@dataclass(frozen=True, repr=False)
class Comparison(Compared):
    """A comparison with its forms."""

    @property
    def table(self) -> Table:
        """What is shown: `.rich()`, `.markdown()`, `.html()`, `.latex()`."""
        return summary_table(self)

    @property
    def tables(self) -> list[Table]:
        """What is shown, and a table for each held-out text."""
        return [self.table, *held_out_tables(self)]

    @property
    def details(self) -> Table:
        """Everything, a line for each row: `.csv()`."""
        return full_table(self)

    def to_frame(self) -> Any:
        """`details` as a pandas.DataFrame; numbers are numbers."""
        return self.details.to_frame()

    def plot(self, path: str | Path | None = None) -> Any:
        """The curves and differences: a figure that a notebook shows, or a PNG in `path`."""
        return draw_comparison(self) if path is None else plot_comparison(self, path)

    def __str__(self) -> str:
        first, *others = self.tables
        return "\n".join([first.markdown(), *(f"{markdown_text(t.caption)}\n\n{t.markdown()}" for t in others)])

    def __repr__(self) -> str:  # what a prompt shows
        return str(self)

    def write(self, folder: str | Path) -> list[Path]:
        """What is shown and everything, as comparison.md and .csv in this folder; `plot` draws the picture."""
        made = {Path(folder, "comparison.md"): str(self), Path(folder, "comparison.csv"): self.details.csv()}
        for path, text in made.items():
            write_text(path, text)
        return list(made)

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self.tables)


def compare(
    records: Iterable[RunRecord],
    baseline: str,
    confidence: float = 0.95,
    facts: Facts | None = None,
    held_out: Iterable[HeldOut] = (),
) -> Comparison:
    """Compare runs by label with the runs labelled `baseline`; refuses runs whose losses do not measure one thing.

    Settings in which rows differ are listed, unless they make an architecture or `facts` says that they were meant.
    """
    statistics.check_confidence(confidence)
    records, facts = list(records), facts or Facts()
    if not records:
        raise InputError("There are no runs to compare.")
    if not facts.axes:
        check_alike(records, OWN_BUDGETS if facts.own_budgets else ALIKE)
    found = by_label(records, baseline)
    # a grid over batch, steps or context has losses and no paired differences
    pairs = facts.own_budgets and not facts.axes
    pairs = pairs or len({(run.pairing, run.tokens, run.val_hash, run.val_tokens) for run in records}) == 1
    matches = facts.matches if baseline == facts.baseline else {}  # those are made from the study's own baseline
    rows, between = [], list[str]()
    for label, runs in found.items():
        _check_one_row(list(runs.values()))
        row = _row(label, found[baseline] if pairs else {}, runs, label == baseline, confidence)
        what, other = matches.get(label, ("", ""))
        if not pairs:
            row = replace(row, paired=False, notes=())
        elif found.get(other, {}).keys() & runs.keys():
            row = _matched(row, what, other, found[other], confidence)
        rows.append(row)
        # what is not the same for all seeds of a row and may change their losses or times
        apart = differences({f"seed {seed}": runs[seed].settings for seed in sorted(runs)}, one_row=True)
        between += [f"The seeds of {label} differ in {one}." for one in apart if one.key.startswith(LISTED)]
    told = {other for row in rows if row.matched for other in (row.label, row.matched[1])}
    sizes = {
        row.label: row.parameters / rows[0].parameters - 1 for row in rows if not facts.axes and row.label not in told
    }
    if unequal := [f"{label} {size:+.0%}" for label, size in sizes.items() if abs(size) > SAME_SIZE]:
        between.append(f"Parameters against those of {baseline}: {', '.join(unequal)}{REMEDY}.")
    entropies = {record.unigram_entropy for record in records}
    if (steps := max(record.steps for record in records)) < FEW_STEPS:
        between.append(f"{steps} steps are few: what helps at the start need not help later.")
    if untrained := [row.label for row in rows if row.loss.mean > (row.records[0].unigram_entropy or math.inf)]:
        between.append(f"Above the unigram entropy, which counting tokens reaches: {', '.join(untrained)}.")
    if any(record.settings.get("machine.sharing") for record in records):
        between.append(f"Some runs shared their device with others of the study: {ROUGH}")
    elif uneven := {row.label: ratio for row in rows if (ratio := speeds_apart(row)) > UNEVEN}:
        said = ", ".join(f"{label} {ratio:.1f} x" for label, ratio in uneven.items())
        between.append(f"Seeds of one row ran at unequal speeds, {said}: {ROUGH}")
    chosen = best_point(rows, facts.axes, confidence if pairs else None)
    remarks = [*filter(None, [facts.search]), *facts.remarks, *chosen, *between]
    failed = {other for label, (_, other) in matches.items() if label in found} - {*found}
    remarks += [f"There is no finished run of {other}: nothing is compared with it." for other in sorted(failed)]
    return Comparison(
        baseline=baseline,
        rows=tuple(rows),
        remarks=tuple(remarks),
        confidence=confidence,
        tokens=max(record.tokens for record in records),
        val_tokens=records[0].val_tokens,
        val_hash=records[0].val_hash,
        seeds=tuple(sorted({record.seed for record in records})),
        unigram_entropy=entropies.pop() if len(entropies) == 1 else None,
        differences=tuple(_all_differences(found, facts)),
        held_out=tuple(text.rows(found, baseline, confidence, matches) for text in held_out),
        axes=facts.axes,
    )


def _matched(row: Row, what: str, other: str, runs: Mapping[int, RunRecord], confidence: float) -> Row:
    """The row with its difference to another baseline, which has as much of something."""
    own = {record.seed: record for record in row.records}
    difference = statistics.paired(values(runs, "val_loss"), values(own, "val_loss"), confidence)
    matched = (what, other, difference)
    if row.difference == difference:
        return replace(row, matched=matched)
    said = matched_words(row.label, matched)
    if what == "time":
        said += f"; in training it took {time_ratio(runs, own):.2f} x its time"
    notes = (*row.notes, f"{said}.", *statistics.too_small(f"{row.label} to {other}", difference))
    return replace(row, matched=matched, notes=notes)


def _check_one_row(runs: Sequence[RunRecord]) -> None:
    """The seeds of a row are one architecture, made by one code under one set of settings."""
    for record in runs[1:]:
        both = f"'{runs[0].folder}' and '{record.folder}' are both labelled '{record.label}' but"
        if record.parameters != runs[0].parameters:
            counts = f"{runs[0].parameters:,} and {record.parameters:,} parameters"
            raise InputError(f"{both} have {counts}: they are not one architecture.")
        for apart in differences({str(run.folder): run.settings for run in (runs[0], record)}, one_row=True):
            fresh = apart.key == "train.init" and not all(apart.values.values())
            if fresh or not apart.key.startswith(BETWEEN_SEEDS):
                raise InputError(f"{both} are not one row: they differ in {apart}.")


def _all_differences(of: Mapping[str, Mapping[int, RunRecord]], facts: Facts) -> list[Difference]:
    """Settings in which rows differ on any seed, each once; baselines made larger differ in size on purpose."""
    found: dict[str, Difference] = {}
    meant = (*facts.meant, *facts.axes)
    larger = {other for _, other in facts.matches.values()} - {facts.baseline}
    for seed in sorted({seed for runs in of.values() for seed in runs}):
        rows = {label: runs[seed].settings for label, runs in of.items() if seed in runs}
        named = {label: settings for label, settings in rows.items() if label not in larger}
        for difference in [*differences(named, meant), *differences(rows, (*meant, *MATCHED))]:
            found.setdefault(difference.key, difference)
    return sorted(found.values(), key=lambda difference: difference.meant)


def _row(
    label: str, base: Mapping[int, RunRecord], runs: Mapping[int, RunRecord], is_baseline: bool, confidence: float
) -> Row:
    common = sorted(base.keys() & runs.keys())
    records = tuple(runs[seed] for seed in sorted(runs))
    known = [record.train_loss for record in records if record.train_loss is not None]
    reached = {seed: statistics.tokens_to_reach(runs[seed].curve, base[seed].val_loss) for seed in common}
    there = {seed: tokens for seed, tokens in reached.items() if tokens is not None}
    fractions = [tokens / base[seed].tokens for seed, tokens in there.items()]
    times = [tokens / runs[seed].speed / base[seed].seconds for seed, tokens in there.items()]
    all_reached = bool(common) and len(fractions) == len(common)
    other_budget = not is_baseline and any(runs[seed].tokens != base[seed].tokens for seed in common)
    alike = [(runs[s].weights_sha256, runs[s].val_loss) == (base[s].weights_sha256, base[s].val_loss) for s in common]
    identical = bool(common) and all(alike)
    difference, speeds = None, (values(base, "speed"), values(runs, "speed"))
    if common and not is_baseline:
        difference = statistics.paired(values(base, "val_loss"), values(runs, "val_loss"), confidence)
    notes = statistics.too_small(label, difference)
    for some, others, of, why in (
        (runs, base, "", "the baseline has no such run"),
        (base, runs, " of the baseline", "there is no such run"),
    ):
        if alone := sorted(some.keys() - others.keys()):
            notes.append(f"{label}: {statistics.seed_words(alone)}{of} left out of the difference, {why}.")
    if other_budget:
        seconds = statistics.mean_ratio(values(base, "seconds"), values(runs, "seconds"))
        part = statistics.mean_ratio(values(base, "tokens"), values(runs, "tokens"))
        length = f"{records[0].tokens:,} tokens ({part:.1%} of the baseline's) in {seconds:.1%} of its seconds"
        notes.append(f"{label}: other budget, {length}, with a schedule of its own.")
    return Row(
        label=label,
        is_baseline=is_baseline,
        records=records,
        loss=statistics.summarise(record.val_loss for record in records),
        best=statistics.summarise(record.best_val_loss for record in records),
        train=statistics.summarise(known) if len(known) == len(records) else None,
        difference=difference,
        common_seeds=tuple(common),
        reached=len(fractions),
        tokens_fraction=statistics.summarise(fractions).mean if all_reached else None,
        seconds_fraction=statistics.summarise(times).mean if all_reached else None,
        speed_ratio=statistics.mean_ratio(*speeds) if common else None,
        time_ratio=time_ratio(base, runs) if common else None,
        parameters=records[0].parameters,
        notes=() if is_baseline or identical else tuple(notes),
        identical=identical,
        other_budget=other_budget,
    )
