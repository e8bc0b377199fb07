"""Parts of a report: published figures, settings, coefficients, measurements of one run and of several, forgetting."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reported import changed, copied, measured_as, measurements, report_of, with_measurements
from stepformer.base.errors import InputError
from stepformer.base.files import write_json
from stepformer.cli import main
from stepformer.measure import measured
from stepformer.pages.reports import samples as sampling
from stepformer.pages.reports.collect import Gathered, RunData, gather, read_run
from stepformer.pages.reports.contents import Report, build
from stepformer.pages.reports.page import page_html, script_json
from stepformer.pages.reports.paper import markdown_report
from stepformer.present.tables import NOTHING
from stepformer.study.comparison import Facts
from stepformer.training import load_run

# Parts


def test_published_figures_come_with_their_caveats(study: Path, tmp_path: Path) -> None:
    folder = copied(study, tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    facts["config"]["recipe"] = "yuriiformer-tinystories"
    write_json(folder / "run.json", facts)
    report = report_of(folder)
    (table,) = report.published
    record = report.runs[0].record
    assert record
    ours = [f"{loss:.4f}" for loss in (record.best_val_loss, record.val_loss, record.train_loss)]
    # 512 tokens are not what the paper evaluated on: no number of ours stands beside its losses
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["yurii", "4,915,200", "1.0780", NOTHING, "1.0900", NOTHING, "0.8960", ours[2], "0", NOTHING],
        ["yurii", "512", NOTHING, ours[0], NOTHING, ours[1], NOTHING, NOTHING, "1", NOTHING],
    ]
    notes = " ".join(table.notes)
    assert "of the first 4,915,200 tokens of a validation split, on which ours was not evaluated" in notes
    assert "best validation loss" in notes
    assert "Not the published setting, so not a reproduction: " in notes
    assert "model.n_layer 2 instead of 12" in notes
    assert "163,812,168 parameters" in notes
    assert "Published figures" in page_html(report)


def test_published_losses_stand_beside_losses_of_as_many_tokens(study: Path, tmp_path: Path) -> None:
    """1,310,720 tokens of a recipe's split, and here, where the split has fewer, all of them."""
    folder = with_recipe(copied(study, tmp_path), "momentum-streams-tinystories")
    facts = json.loads((folder / "run.json").read_text())
    length = facts["corpus"]["splits"]["val"]["tokens"]
    whole = (length - 1) // 16 * 16
    assert whole > 512

    def table(**values: Any) -> list[list[str]]:
        changed(folder / "result.json", **values)
        (found,) = report_of(folder).published
        assert any("on which ours was not evaluated" in note for note in found.notes) != ("first" in values)
        assert [column.title for column in found.columns[1:6]] == [
            "validation tokens", "published best", "ours best", "published final", "ours final",
        ]  # fmt: skip
        return [[cell.text for cell in row[1:6]] for row in found.rows]

    record = report_of(folder).runs[0].record
    assert record
    own = ["512", NOTHING, f"{record.best_val_loss:.4f}", NOTHING, f"{record.val_loss:.4f}"]
    assert table() == [["1,310,720", "1.1299", NOTHING, NOTHING, NOTHING], own]
    assert table(first={str(whole): 1.25}) == [[f"{whole:,}", "1.1299", NOTHING, NOTHING, "1.2500"], own]
    facts["corpus"]["splits"]["val"]["tokens"] = 3_000_000
    write_json(folder / "run.json", facts)
    beside = [f"{1_310_720:,}", "1.1299", NOTHING, NOTHING, "1.5000"]
    rest = [f"{2_999_984:,}", NOTHING, NOTHING, NOTHING, "1.2500"]
    assert table(first={"1310720": 1.5, "2999984": 1.25}) == [beside, own, rest]


def test_training_losses_of_fixed_tokens_are_compared(study: Path) -> None:
    report = report_of(study)
    assert report.comparison
    details = report.comparison.details
    cells = {column.title: [row[i] for row in details.rows] for i, column in enumerate(details.columns)}
    for label, loss in zip(cells["architecture"], cells["train_loss"], strict=True):
        stored = [json.loads(path.read_text())["train_loss"] for path in study.glob(f"{label.text}-s*/result.json")]
        assert float(loss.text) == pytest.approx(sum(stored) / 2, abs=1e-6)  # margin: its digits
    for table in ("comparison", "runs"):
        assert "training loss" in [column.title for column in report.tables[table].columns]


def with_recipe(folder: Path, name: str, tokenizer: str = "gpt2") -> Path:
    facts = json.loads((folder / "run.json").read_text())
    facts["config"]["recipe"] = name
    facts["corpus"]["tokenizer"]["name"] = tokenizer
    write_json(folder / "run.json", facts)
    return folder


def like_the_paper(folder: Path, shift: float = 0.0) -> str:
    """Measurements of the quantities that a recipe has published values of; returns the run's id."""
    found = measurements()
    found["hessian"]["curve"] |= {"alpha": [-0.5, 0.0, 0.5], "range": 8.0 + shift}
    for layer in found["jacobian"]["layers"]:
        layer["block"] = {**layer["block"], "k": 64}
    found["jacobian"]["summary"]["block"] |= {"legacy": {"persistence": 1.2}}
    found["perplexity"] = {
        "texts": [
            {"name": "wikitext", "mode": "blocks", "stride": None, "perplexity": 90.0 + shift, "tokens": 512},
            {"name": "wikitext", "mode": "sliding", "stride": 8, "perplexity": 80.0, "tokens": 600},
            {"name": "tales", "mode": "blocks", "perplexity": 7.0, "tokens": 600},
        ],
        "mean_perplexity": 100.0,
        "protocol": "mean over wikitext, lambada, c4; blocks",
    }
    entry = {"shots": 10, "items": 200, "of": 10_042, "acc": 0.26, "acc_norm": 0.25 + shift}
    found["tasks"] = {"tasks": {"hellaswag@10": entry, "hellaswag@0": entry, "arc_easy@0": entry | {"items": None}}}
    for kind, result in found.items():
        measured.save(folder, kind, step=12, settings={}, result=result)
    return str(json.loads((folder / "run.json").read_text())["id"])


def test_published_measurements_stand_beside_ours(study: Path, tmp_path: Path) -> None:
    recipe = "momentum-streams-openwebtext"
    one, two = (with_recipe(copied(study, tmp_path, f"yurii-s{seed}"), recipe) for seed in (42, 43))
    entry = {"init": {"id": like_the_paper(one)}, "steps": [0, 9], "direction": "a -> b", "forgetting": 0.5}
    like_the_paper(two, 0.01)
    gathered = gather([one, two])
    table = {"settings": {"native": False}, "runs": [entry, {"init": {"id": "another"}, "forgetting": 9.0}]}
    gathered.forgetting = [(tmp_path, table), (tmp_path, {"settings": {"native": True}, "runs": [entry]})]
    losses, found = build(gathered).published
    assert losses.rows[0][2].text == "2.9413"
    assert {cells[0].text for cells in found.rows} == {"yurii"}
    assert [[cell.text for cell in (*cells[1:6], cells[7])] for cells in found.rows] == [
        ["HellaSwag, acc_norm as a fraction", "0.3158", "published", "0.255", "2", "200 of 10,042 items"],
        ["trace of the Hessian per parameter", "0.0001394", "published", "0.31", "2", "4,096 tokens"],
        ["eigenvalue of largest magnitude", "167.7", "published", "20", "2", "4,096 tokens"],
        ["range of the loss curve", "8.54", "published", "8.005", "2", "4,096 tokens"],
        ["persistence, sum of log sigma_64 of the blocks", "10.35", "recomputed by us", "0.8", "2", "2 layers"],
        ["sum of log sigma_11, given as persistence", "14.44", "published", "1.2", "2", "2 layers"],
        ["forgetting", "0.6735", "published", "0.5", "1", "9 steps, a -> b"],
        ["perplexity of WikiText", "51.78", "published", "90", "2", "512 tokens, blocks"],
        ["perplexity of WikiText", "51.78", "published", "80", "2", "600 tokens, sliding 8"],
        ["mean perplexity of WikiText, LAMBADA and C4", "44.08", "published", "100", "2", "blocks"],
    ]  # fmt: skip
    notes = " ".join(found.notes)
    assert "Published: gai2026momentum, the authors' result files. Recomputed by us: from values that" in notes
    assert "Not the same scale: the published model has 163,812,168 parameters and 14,745,600,000 training" in notes
    assert "neither confirm nor contradict" in notes
    assert "what else was measured" in page_html(build(gathered))


def test_other_quantities_are_not_put_beside_published_ones(study: Path, tmp_path: Path) -> None:
    """Another tokenizer, another singular value, another curve: the rows are gone, and the loss says why."""
    folder = with_recipe(copied(study, tmp_path), "momentum-streams-openwebtext", "bytes")
    like_the_paper(folder)
    result = measurements()
    for kind in ("jacobian", "hessian"):  # 12 singular values; a curve from -1 to 1
        measured.save(folder, kind, step=12, settings={}, result=result[kind])
    losses, found = report_of(folder).published
    assert [cells[1].text for cells in found.rows] == [
        "HellaSwag, acc_norm as a fraction",
        "trace of the Hessian per parameter",
        "eigenvalue of largest magnitude",
    ]
    assert "Ours has the tokenizer 'bytes', the published one 'gpt2'" in " ".join(losses.notes)
    assert len(report_of(with_recipe(folder, "yuriiformer-tinystories")).published) == 1  # which measured nothing else
    _, found = report_of(with_recipe(folder, "yuriiformer-openwebtext")).published
    assert [[cell.text for cell in (*cells[1:5], cells[6])] for cells in found.rows] == [
        ["HellaSwag, acc_norm as a fraction", "0.318 ± 0.005", "published", "0.25", "10 shots"],
        ["HellaSwag, acc_norm as a fraction", "0.312 ± 0.005", "published", "0.25", "0 shots"],
        ["ARC-Easy, acc_norm as a fraction", "0.411 ± 0.01", "published", "0.25", "0 shots"],
    ]
    assert found.notes[0] == "Published: zimin2026yuriiformer, Table 4."


def test_settings_that_differ_are_marked(study: Path) -> None:
    table = report_of(study).tables["differing"]
    row = next(row for row in table.rows if row[0].text == "model.template")
    assert [cell.text for cell in row] == ["model.template", "gd", "nesterov", "triple-momentum"]
    assert [cell.marked for cell in row] == [False, False, True, True]
    assert all(row[0].text != "train.seed" for row in table.rows)


def test_coefficients_of_the_checkpoint_and_of_the_measurement(study: Path, tmp_path: Path) -> None:
    gathered = gather([study])
    sampling.ask_models(gathered.runs, None, tmp_path, device="cpu")
    charts = {chart.title: chart for chart in build(gathered).charts["coefficients"].charts}
    lines = charts["mu_attn"].lines
    assert {(line.label, line.seed) for line in lines} == {(n, s) for n in ("yurii", "tmm") for s in (42, 43, None)}
    wanted = [layer["mu_attn"] for layer in load_run(study / "yurii-s42", device="cpu").model.coefficients()]
    assert next(line.y for line in lines if (line.label, line.seed) == ("yurii", 42)) == wanted
    measured_run = report_of(with_measurements(copied(study, tmp_path / "copy")))
    charts = {chart.title: chart for chart in measured_run.charts["coefficients"].charts}
    assert charts["mu_attn"].lines[0].y == [0.9, 0.8]
    assert charts["r, mean of 2"].lines[0].y == [0.2, 0.2]


def test_every_measurement_has_its_place(study: Path, tmp_path: Path) -> None:
    report = report_of(with_measurements(copied(study, tmp_path)))
    assert {name for name, charts in report.charts.items() if charts} == {
        "coefficients",
        "depth",
        "jacobian",
        "balance",
        "hessian",
    }
    (surface,) = report.charts["hessian"].surfaces
    assert [row[0] for row in surface.loss] == [2.5, 3.0, 3.5, 4.0, 4.5]  # along y, the second direction: a = -1, b
    assert surface.loss[0] == [2.5, 1.75, 1.5, 1.75, 2.5]  # along x, the first: a * a at b = -1
    titles = [chart.title for chart in report.charts["depth"].charts]
    assert "Similarity of successive updates" in titles
    spectrum = report.charts["jacobian"].charts[0]
    assert spectrum.choices == ["layer 0", "layer 1"]
    assert report.tables["hessian"].rows[0][2].text == "20"
    assert "had not converged" in report.tables["hessian"].notes[0]
    assert [cell.text for cell in report.tables["jacobian"].rows[0][1:3]] == ["12", "0.8"]
    assert "had not settled and may be too low: yurii s42" in report.tables["jacobian"].notes[0]
    assert report.tables["perplexity"].rows[0][3].text == "12.182"
    assert report.tables["tasks"].rows[0][4].text == "32.50 ± 7.40"
    assert not report.missing


# Measurements of several runs


def windows(digest: str, tokens: int = 4096, **settings: Any) -> dict[str, Any]:
    return {"windows_hash": digest, "tokens": tokens, "settings": settings}


def test_runs_that_were_not_measured_alike_are_named(study: Path, tmp_path: Path) -> None:
    ours, legacy = windows("aaaabbbbcccc", protocol="ours"), windows("aaaabbbbcccc", protocol="legacy")
    few = measurements()["jacobian"]
    for layer in few["layers"]:
        layer["block"] = {**layer["block"], "k": 4}
    text = {"name": "tales", "mode": "blocks", "perplexity": 9.0, "tokens": 512, "hash": "1234"}
    seen = {**text, "seen": True}
    one, two, three = (copied(study, tmp_path, name) for name in ("vanilla-s42", "yurii-s42", "tmm-s42"))
    measured_as(one, hessian=ours, jacobian=windows("aaaabbbbcccc"), depth=windows("a"), perplexity={"texts": [seen]})
    measured_as(two, hessian=ours, jacobian=few | windows("aaaabbbbcccc"), depth=windows("a"))
    other = {"tasks": {"choice@0": {"task": "choice", "shots": 0, "items": 20, "acc": 0.5}}}
    changed_text = {"texts": [text | {"hash": "5678"}]}
    measured_as(
        three, hessian=legacy, jacobian=windows("d", 99), depth=windows("b"), perplexity=changed_text, tasks=other
    )
    report = report_of(one, two, three)
    shown = [(row[0].text, row[1].text) for row in report.tables["perplexity"].rows]
    assert {name for name, text in shown if text.endswith(" *")} == {"vanilla s42"}
    assert report.tables["perplexity"].notes == ["* The run was trained or validated on this text."]
    assert report_of(two, three).tables["perplexity"].notes == []
    assert report.cautions == {
        "hessian": [
            "tmm s42 was measured on other windows or with other settings (protocol) than vanilla s42 and yurii s42: "
            "do not compare these rows and lines."
        ],
        "jacobian": [
            "yurii s42 was measured on other windows or with other settings (k) than vanilla s42: "
            "do not compare these rows and lines.",
            "tmm s42 was measured on other windows or with other settings (windows hash, tokens, k) than vanilla s42 "
            "and yurii s42: do not compare these rows and lines.",
        ],
        "depth": [
            "tmm s42 was measured on other windows or with other settings (windows hash) than vanilla s42 and "
            "yurii s42: do not compare these rows and lines."
        ],
        "perplexity": [
            "tales: tmm s42 was scored on other tokens or read in another way (hash) than vanilla s42 and yurii s42: "
            "do not compare these rows."
        ],
        "tasks": [
            "choice: tmm s42 was asked other items or with other shots (items) than vanilla s42 and yurii s42: "
            "do not compare these rows."
        ],
    }
    cells = [[cell.text for cell in (row[1], *row[-2:])] for row in report.tables["jacobian"].rows]
    assert cells == [["12", "4,096", "aaaabbbb"], ["4", "4,096", "aaaabbbb"], ["12", "99", "d"]]
    assert [cell.text for cell in report.tables["hessian"].rows[2][-4:]] == ["legacy", "4,096", "aaaabbbb", "12"]
    page, paper = page_html(report), markdown_report(report, {})
    for sentence in (sentence for found in report.cautions.values() for sentence in found):
        assert f'<p class="note caution">{sentence}</p>' in page
        # without pictures the paper has nothing about depth to warn of
        assert f"**{sentence}**" in paper or sentence in report.cautions["depth"]


def test_runs_that_were_measured_alike_have_no_caution(study: Path, tmp_path: Path) -> None:
    for name in ("vanilla-s42", "yurii-s42"):
        measured_as(copied(study, tmp_path, name), hessian=windows("a"), jacobian=windows("a"), depth=windows("a"))
    report = report_of(tmp_path / "vanilla-s42", tmp_path / "yurii-s42")
    assert report.cautions == {}
    assert 'caution"' not in page_html(report)


def test_a_mean_is_of_runs_that_were_measured_alike(study: Path, tmp_path: Path) -> None:
    folders = [copied(study, tmp_path, f"yurii-s{seed}") for seed in (42, 43)]
    for second, seeds in (("a", {42, 43, None}), ("b", {42, 43})):
        for folder, digest in zip(folders, ("a", second), strict=True):
            measured_as(folder, depth=windows(digest), jacobian=windows(digest), hessian=windows(digest))
        report = report_of(*folders)
        for part in ("depth", "jacobian", "hessian"):
            for chart in report.charts[part].charts:
                assert {line.seed for line in chart.lines} == seeds, (part, chart.title)


def test_what_only_some_runs_were_measured_for_is_listed_with_the_command(study: Path, tmp_path: Path) -> None:
    whole = with_measurements(copied(study, tmp_path, "yurii-s42"))
    one, two = (copied(study, tmp_path, name) for name in ("tmm-s42", "vanilla-s42"))
    result = measurements()
    measured.save(one, "depth", step=12, settings={}, result=result["depth"])
    report = report_of(two, whole, one)
    sentence = "Not measured of vanilla s42: what happens inside, layer by layer"
    assert (sentence, f"stepformer diagnose {two} --depth") in report.missing
    sentence = "Not measured of vanilla s42 and tmm s42: the curvature of the loss"
    assert (sentence, "stepformer diagnose RUN --hessian") in report.missing
    assert f"{sentence} (<code>stepformer diagnose RUN --hessian</code>)." in page_html(report)
    assert sentence in markdown_report(report, {})


def test_tasks_are_told_in_the_words_of_the_terminal(study: Path, tmp_path: Path) -> None:
    entry = {"task": "hellaswag", "shots": 10, "items": 200, "of": 10_042, "cut": 12, "acc": 0.26, "acc_norm": 0.255}
    hellaswag = entry | {"acc_stderr": 0.031, "acc_norm_stderr": 0.0309}
    lambada = {"task": "lambada", "shots": 0, "items": 50, "of": 50, "cut": 0, "acc": 0.5}
    lambada |= {"perplexity": 123_456.0, "perplexity_stderr": 7.1234567, "f1[x]": 0.25, "f1_stderr[x]": 0.125}
    folder = measured_as(
        copied(study, tmp_path),
        tasks={"tasks": {"hellaswag@10": hellaswag, "lambada@0": lambada}},
        perplexity={"mean_perplexity": 44.0806, "protocol": "mean over wikitext, lambada, c4; blocks"},
    )
    report = report_of(folder)
    table = report.tables["tasks"]
    titles = ["run", "task", "shots", "items", "acc %", "acc_norm %", "chance %", "other"]
    assert [column.title for column in table.columns] == titles
    assert [[cell.text for cell in row[1:]] for row in table.rows] == [
        ["hellaswag", "10", "first 200 of 10,042", "26.00 ± 3.10", "25.50 ± 3.09", "25", "–"],  # noqa: RUF001
        ["lambada", "0", "50", "50.00", "–", "–", "f1[x] 0.25 ± 0.12, perplexity 123,500 ± 7.1"],  # noqa: RUF001
    ]
    assert table.notes == [
        "hellaswag 10-shot: the first 200 of 10,042 items (yurii s42).",
        "hellaswag 10-shot: 12 prompts exceed the context and lost their beginning (yurii s42).",
    ]
    lambada["perplexity_stderr"] = 200_000.0
    wide = report_of(measured_as(folder, tasks={"tasks": {"lambada@0": lambada}})).tables["tasks"]
    assert wide.rows[0][-1].text.endswith("perplexity 123,500 (error unknown)")
    mean = [cell.text for cell in report.tables["perplexity"].rows[-1][:4]]
    assert mean == ["yurii s42", "mean over wikitext, lambada, c4", "blocks", "44.081"]


def test_units_say_more_than_titles(study: Path, tmp_path: Path) -> None:
    report = report_of(with_measurements(copied(study, tmp_path)))
    units = {chart.title: chart.y for charts in report.charts.values() for chart in charts.charts}
    assert units["Norm of x"] == units["Norm of the update"] == "root mean square"
    assert units["Energy of attention"] == units["Stable rank"] == ""
    for title, unit in units.items():
        assert not unit or unit not in title.lower(), title


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def test_what_was_measured_before_the_end_is_told(study: Path, tmp_path: Path) -> None:
    run = measured_as(copied(study, tmp_path))
    last = read_run(run).record
    assert last is not None
    for kind, step in (("perplexity", 1), ("tasks", last.steps), ("hessian", last.best_step)):
        whole = measured.load(run, kind)
        assert whole is not None
        measured.save(run, kind, step=step, settings=whole["settings"], result=whole["result"])
    notes = [note for note in read_run(run).notes if "measured after step" in note]
    assert "Its perplexity was measured after step 1, before it was finished: measure it again." in notes
    assert not any("tasks" in note or "hessian" in note for note in notes)


@pytest.mark.slow
def test_whatever_a_measurement_lacks_the_page_is_made(study: Path) -> None:
    """Each field of each kind is left out or replaced by something else, one at a time."""
    run = read_run(study / "yurii-s42")
    tried = 0
    for kind, result in measurements(layers=1).items():
        for path in places(result):
            for instead in (None, "words", math.nan, [None], {"x": {}}):
                broken = copy.deepcopy(result)
                inner: Any = broken
                for key in path[:-1]:
                    inner = inner[key]
                inner[path[-1]] = instead
                tried += 1
                run.measured = {kind: {"step": "x", "result": broken}}
                report = one(run)
                assert "nan" not in script_json(
                    [dataclasses.asdict(c) for c in report.charts[kind].charts] if kind in report.charts else []
                )
    assert tried > 400


def one(run: RunData) -> Report:
    report = build(Gathered([run], None, Facts(), [], []))
    page_html(report)
    markdown_report(report, {})
    return report


# Forgetting


def test_forgetting_is_shown_as_it_is_found(study: Path, tmp_path: Path) -> None:
    copied(study, tmp_path)
    rows = [{"before": 2.5, "label": "yurii", "after": 2.75}, {"label": "tmm", "gap": 12, "after": None}]
    curves = {
        "folder": "elsewhere/yurii-s42",
        "direction": "a -> b",
        "steps": [0, 5, 9],
        "source_loss": [2.0, 2.1, None],
    }
    (tmp_path / "forgetting.json").write_text(json.dumps({"rows": rows, "runs": [curves, {"folder": "unknown"}, 3]}))
    report = report_of(tmp_path)
    (table,), (chart,) = report.forgetting, report.charts["forgetting"].charts
    assert [(line.label, line.x, line.y, line.choice) for line in chart.lines] == [
        ("yurii", [0.0, 5.0], [2.0, 2.1], "a -> b")
    ]
    assert [column.title for column in table.columns] == ["label", "before", "after", "gap"]
    assert [cell.text for cell in table.rows[0][:3]] == ["yurii", "2.5000", "2.7500"]
    (tmp_path / "forgetting.json").write_text('{"something": "else"}')
    assert report_of(tmp_path).forgetting == []
    (tmp_path / "forgetting.json").write_text('["something else"]')
    with pytest.raises(InputError, match=r"table of forgetting .* is damaged"):
        report_of(tmp_path)


@pytest.mark.slow
def test_a_study_of_both_directions_of_fine_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPFORMER_HOME", str(tmp_path))
    root = tmp_path / "both"
    command = ["finetune", "--pretrain", "vanilla", "yurii", "--corpora", "tales:village", "tales:space", "--quiet"]
    command += [
        "--seeds",
        "2",
        "--out",
        str(root),
        "count=40",
        "tokenizer=bytes",
        "n_layer=1",
        "n_head=2",
        "context=16",
    ]
    command += ["device=cpu", "d_model=16", "batch=4", "steps=3", "eval_tokens=128", "finetune.steps=2"]
    assert main(command) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["report", str(root), "--out", str(tmp_path / "report"), "--quiet", "--no-samples"]) == 0
    kept = json.loads((root / "forgetting.json").read_text())["rows"]
    row = next(row for row in kept if row["forgetting_difference"] is not None)
    said = capsys.readouterr().out
    shown = f"{row['forgetting_difference']:+.4f}".replace("-", "−")  # noqa: RUF001
    assert (
        f"Forgetting, village -> space, against vanilla: yurii {shown} nats per token (95% confidence interval" in said
    )
    report = report_of(root)
    assert len(report.runs) == 8
    assert set(report.labels) == {
        f"{name} ({a}-to-{b})" for name in ("vanilla", "yurii") for a, b in (("village", "space"), ("space", "village"))
    }
    (table,) = report.forgetting
    assert [cell.text for cell in table.rows[1][:3]] == ["yurii", "village -> space", "2"]
    column = next(i for i, column in enumerate(table.columns) if column.title == "forgetting")
    assert table.rows[1][column].value == pytest.approx(row["forgetting"])
    source = report.charts["forgetting"].charts[0]
    assert source.choices == ["village -> space", "space -> village"]
    assert {line.seed for line in source.lines} == {42, 43, None}
    (note,) = [note for note in report.notes if "before their fine-tuning" in note]
    assert "pretrain-space" in note
    assert "pretrain-village" in note
    assert len(report_of(root, root / "pretrain-space").runs) == 12
    (root / "forgetting.json").rename(root / "forgetting-native.json")  # as with --native alone
    assert len(report_of(root).runs) == 8
    (root / "forgetting-native.json").unlink()
    with pytest.raises(InputError, match=r"It holds studies: name them, e\.g\. '.*pretrain-space'"):
        gather([root])
