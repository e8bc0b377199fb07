"""What a report shows across runs: Jacobians against the loss, momentum by preconditioner, hybrids, balance."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from browser import open_browser, watched
from reported import copied, measured_as, measurements, report_of
from runs import small_run
from stepformer.measure import measured
from stepformer.pages.reports.collect import RunData, read_run
from stepformer.pages.reports.figures import factorial
from stepformer.pages.reports.page import page_html
from stepformer.pages.reports.paper import markdown_report, plot_charts
from stepformer.pages.reports.published import tokens_alike

NAMES = [f"{name}-s{seed}" for name in ("vanilla", "yurii", "tmm") for seed in (42, 43)]


def with_jacobians(study: Path, folder: Path, persistence: list[float], **changes: dict[str, Any]) -> list[Path]:
    """Copies of all runs of the study whose blocks have these persistences; `changes` of some results, by name."""
    found = []
    for name, value in zip(NAMES, persistence, strict=True):
        jacobian = measurements()["jacobian"] | {"windows_hash": "abc", "tokens": 64}
        whole = jacobian["summary"]["block"] | {"persistence": value, "mean_stable_rank": -value, "mean_spread": 2.0}
        jacobian["summary"] = {"block": whole}
        run = copied(study, folder, name)
        result = jacobian | changes.get(name, {})
        record = read_run(run).record
        assert record is not None
        measured.save(run, "jacobian", step=record.best_step, settings={}, result=result)
        found.append(run)
    return found


@pytest.mark.slow
def test_jacobians_against_the_loss(study: Path, tmp_path: Path) -> None:
    """Persistence in the order of the losses: a rank correlation of 1, and of its opposite -1."""
    losses = [read_run(study / name).record.best_val_loss for name in NAMES]  # type: ignore[union-attr]
    assert len(set(losses)) == 6
    report = report_of(*with_jacobians(study, tmp_path, losses))
    table = report.tables["propagation"]
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    exact = f"{2 / 720:.2g}"  # of all orders of six runs two are as far from zero; of three architectures two of six
    assert rows["persistence"] == ["+1.00", exact, "6", "+1.00", "0.33", "3"]
    assert rows["mean stable rank"] == ["−1.00", exact, "6", "−1.00", "0.33", "3"]  # noqa: RUF001
    assert rows["mean spread"] == ["–", "–", "6", "–", "–", "3"]  # noqa: RUF001
    charts = {chart.title: chart for chart in report.charts["propagation"].charts}
    assert list(charts) == ["Loss against persistence", "Loss against mean spread", "Loss against mean stable rank"]
    drawn = charts["Loss against persistence"]
    assert drawn.points
    assert sorted((line.x[0], line.y[0]) for line in drawn.lines) == sorted((loss, loss) for loss in losses)
    assert [row[-3].text for row in report.tables["jacobian"].rows] == [f"{loss:.4f}" for loss in losses]
    page, paper = page_html(report), markdown_report(report, {"propagation"})
    assert '"points":true' in page
    assert "![Jacobians and loss](propagation.png)" in paper
    pytest.importorskip("matplotlib")
    plot_charts(report.charts["propagation"], report.labels, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_the_page_draws_a_point_for_each_run(study: Path, tmp_path: Path) -> None:
    report = report_of(*with_jacobians(study, tmp_path, [5.0, 4.0, 3.0, 3.5, 1.0, 2.0]))
    (tmp_path / "index.html").write_text(page_html(report))
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 800})
        problems = watched(page)
        page.goto((tmp_path / "index.html").as_uri())
        figure = page.locator("[data-part=propagation] figure").first
        figure.scroll_into_view_if_needed()
        assert figure.locator("circle").count() == 6
        edges = figure.locator("svg[role=img]").bounding_box()
        assert edges is not None
        page.mouse.move(edges["x"] + edges["width"] - 30, edges["y"] + 60)  # beside the run of persistence 5 alone
        assert figure.locator(".tip tbody tr").count() == 1
        assert problems == []


def test_only_what_was_measured_alike_is_correlated(study: Path, tmp_path: Path) -> None:
    other = {"vanilla-s42": {"windows_hash": "other"}}
    report = report_of(*with_jacobians(study, tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], **other))
    table = report.tables["propagation"]
    assert {row[3].text for row in table.rows} == {"5"}
    assert table.notes[-1] == "Left out, as measured or trained on something else: vanilla s42."


def test_two_runs_have_no_rank_correlation(study: Path, tmp_path: Path) -> None:
    runs = with_jacobians(study, tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    report = report_of(*runs[:2])
    assert "propagation" not in report.tables
    assert not report.charts["propagation"]
    alone = report_of(runs[0], runs[2], runs[4]).tables["propagation"]  # one seed of each
    assert [column.title for column in alone.columns][1:] == ["rank correlation", "p", "runs"]


def cell_runs(study: Path, losses: dict[str, list[float]], **changes: Any) -> list[RunData]:
    """Runs of architectures that ended at these losses, a run for each."""
    known = read_run(study / "vanilla-s42")
    assert known.record is not None
    found = []
    for name, values in losses.items():
        config = small_run(Path("tales"), name, **changes)
        for seed, loss in enumerate(values):
            record = dataclasses.replace(known.record, best_val_loss=loss, label=name, seed=seed)
            found.append(dataclasses.replace(known, label=name, seed=seed, config=config, record=record))
    return found


def test_momentum_by_preconditioner(study: Path) -> None:
    """The paper's grid: rows of momentum, columns of preconditioners, and what momentum changes in each."""
    losses = {
        "vanilla": [3.0, 3.2], "hb": [2.9], "yurii": [2.8], "tmm": [2.75], "rmsprop": [3.15], "adam": [3.0],
        "ortho": [3.3], "muon": [3.25], "shampoo": [3.4], "soap": [3.35], "adamw": [1.0],
    }  # fmt: skip
    table = factorial(cell_runs(study, losses))
    assert table is not None
    assert [column.title for column in table.columns][1:] == [
        "no preconditioner", "per coordinate", "spectral", "full matrix",
    ]  # fmt: skip
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["none", "vanilla 3.1000", "rmsprop 3.1500", "ortho 3.3000", "shampoo 3.4000"],
        ["heavy ball", "hb 2.9000", "adam 3.0000", "muon 3.2500", "soap 3.3500"],
        ["Nesterov", "yurii 2.8000", "–", "–", "–"],  # noqa: RUF001
        ["triple momentum", "tmm 2.7500", "–", "–", "–"],  # noqa: RUF001
        ["heavy ball − none", "−0.2000", "−0.1500", "−0.0500", "−0.0500"],  # noqa: RUF001
    ]


def test_the_grid_needs_two_rows_and_two_columns(study: Path) -> None:
    for names in (("vanilla", "hb", "tmm"), ("vanilla", "rmsprop", "ortho"), ("vanilla",)):
        assert factorial(cell_runs(study, {name: [3.0] for name in names})) is None
    assert factorial([]) is None
    parallel = cell_runs(study, {"vanilla": [3.0], "hb": [2.9], "rmsprop": [3.1]}, splitting="parallel")
    assert factorial(parallel) is None


def test_the_grid_has_published_losses_of_as_many_tokens_and_leaves_out_other_budgets(study: Path) -> None:
    runs = cell_runs(study, {"vanilla": [3.0], "hb": [2.9], "rmsprop": [3.1], "adam": [2.95]})
    for run in runs:
        assert run.config is not None
        run.config = dataclasses.replace(run.config, recipe="momentum-streams-openwebtext")
    assert runs[-1].record is not None
    runs[-1].record = dataclasses.replace(runs[-1].record, tokens=1)
    table = factorial(runs)
    assert table is not None
    assert [cell.text for cell in table.rows[1][1:3]] == ["hb 2.9000", "–"]  # noqa: RUF001
    assert table.notes[-1] == "Left out, as measured or trained on something else: adam s0."
    as_many = tokens_alike(1_310_720, runs[0])
    assert as_many is not None
    for run in runs:
        assert run.record is not None
        first = {as_many: (run.record.best_val_loss - 0.5, 9.0)}
        run.record = dataclasses.replace(run.record, first=first)
    table = factorial(runs)
    assert table is not None
    assert table.rows[1][1].text == "hb 2.4000 (published 2.9453)"
    assert table.rows[0][2].text == "rmsprop 2.6000 (published 3.0153)"
    assert table.notes[0].endswith("Published ones are of as many tokens.")


def test_other_architectures_are_in_no_cell(study: Path) -> None:
    losses = {"vanilla": [3.0], "hb": [2.9], "rmsprop": [3.1], "value-tables": [2.0], "tmm-zero": [2.1], "adamw": [2.2]}
    table = factorial(cell_runs(study, losses))
    assert table is not None
    shown = " ".join(cell.text for row in table.rows for cell in row)
    assert not any(name in shown for name in ("value-tables", "tmm-zero", "adamw"))
    rotary = factorial(cell_runs(study, {name: losses[name] for name in list(losses)[:3]}, positions="rotary"))
    assert rotary is not None
    assert rotary.rows[1][1].text == "hb 2.9000"


def test_hybrids_and_balance_have_their_tables(study: Path, tmp_path: Path) -> None:
    report = report_of(measured_as(copied(study, tmp_path)))
    assert [[cell.text for cell in row] for row in report.tables["hybrid"].rows] == [
        ["yurii s42", "all layers", "2.5000"],
        ["yurii s42", "cutoff 1", "2.7500"],
    ]
    row = [cell.text for cell in report.tables["balance"].rows[0]]
    assert row[:7] == ["yurii s42", "oracle", "4", "1", "1.5", "0.2", "0.97"]
    titles = [chart.title for chart in report.charts["balance"].charts]
    assert titles[0] == "Distance of D from a scalar"
    assert report.charts["balance"].charts[0].choices == ["oracle, attn", "oracle, mlp"]
    page, paper = page_html(report), markdown_report(report, {"balance"})
    for words in ("cutoff 1", "Balance of second moments"):
        assert words in page
        assert words in paper
