"""The files of a report: for a paper, with hostile words in them, and the page as a browser shows it."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import open_browser, watched
from reported import LIMIT, NAMES, changed, copied, measured_as, measurements, report_of, with_measurements
from stepformer.base.errors import InputError
from stepformer.base.files import write_json
from stepformer.catalogue import citations
from stepformer.cli import main
from stepformer.data import Corpus
from stepformer.measure import measured
from stepformer.pages.reports import paper
from stepformer.pages.reports import samples as sampling
from stepformer.pages.reports.collect import gather
from stepformer.pages.reports.contents import Report, build
from stepformer.pages.reports.method import method
from stepformer.pages.reports.page import _looks, page_html, script_json
from stepformer.pages.reports.paper import files_of, look, markdown_report, refuse_foreign, write_paper
from stepformer.pages.reports.samples import Drawing, Samples
from stepformer.present.tables import TIMES, Cell, Table, columns
from stepformer.study import compare, load_records

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror='window.harmed=1'><b>\u2028&\"'`${1}{{data}}"


@pytest.fixture(scope="module")
def made(study: Path) -> Path:
    """The folder of a report on the study, made by the command."""
    out = study.parent / "report"
    assert main(["report", str(study), "--out", str(out), "--tokens", "8", "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


# Files for a paper


def test_the_method_is_what_all_runs_have_in_common(study: Path) -> None:
    runs = gather([study]).runs
    config = runs[0].config
    assert config
    steps, each = config.train.steps, config.train.batch * config.model.context
    model, data, training, machine, seeds, optimizer = method(runs)
    own = config.model
    assert model == f"Model: {own.n_layer} layers, width {own.d_model}, {own.n_head} heads, context {own.context}."
    wider = dataclasses.replace(config, model=own.replace(mlp_hidden=48))
    others = [*runs, dataclasses.replace(runs[0], config=wider)]
    assert method(others)[0] == f"{model[:-1]}, mlp_hidden not the same in all rows (settings that differ)."
    corpus = Corpus(Path(runs[0].facts["corpus"]["folder"]))
    for split in ("train", "val"):
        assert f"{len(corpus.split(split)):,} tokens (hash {corpus.split(split).hash})" in data
    assert f"tokenizer {corpus.tokenizer.name} with {corpus.vocab_size:,} ids" in data
    assert f"{steps:,} steps of {each:,} tokens" in training
    assert f"{steps * each:,} tokens in all" in training
    warm = f"{max(1, steps // 10)} step of linear warm-up"
    where, ran = runs[0].environment["device"], runs[0].facts["precision"]
    assert machine == f"Computation: {ran} on {where['cpu']}, {where['cores']} cores."
    assert "; momentum 0.95; AdamW with betas 0.9 and 0.95; gradients clipped" in optimizer
    gpus, asked = {"gpu": "H200", "gpus": 8, "cuda": "13"}, {"config": {"train": {"device": "auto"}}}
    elsewhere = replace(runs[0], environment={"device": gpus, "ranks": 2}, facts={**runs[0].facts, **asked})
    assert f"Computation: {ran} on 2 {TIMES} H200, CUDA 13." in method([elsewhere])
    assert "Computation: not the same in all rows (environment)." in method([*runs, elsewhere])
    assert f"{config.optim.name}, cosine schedule after {warm}, towards 10% of the peak rates; lr" in optimizer
    assert config.optim.floor == 0.1
    assert seeds == "Seeds: 42, 43 in every row."
    assert "Seeds: vanilla 42, 43; yurii 42, 43; tmm 42." in method(runs[:-1])
    assert "Seeds: 42." in method(runs[:1])
    for schedule, said in (
        ("wsd", ", falling linearly from step 10 on, towards 10% of the peak rates; lr"),
        ("constant", "; lr"),
    ):
        other = replace(runs[0], config=replace(config, optim=replace(config.optim, schedule=schedule)))
        assert f"{schedule} schedule after {warm}{said}" in method([other])[-1]
    assert f"lr {config.optim.lr:g}" in optimizer
    half = replace(runs[0], config=replace(config, train=replace(config.train, eval_half="second")))
    whole, used = len(Corpus(Path(runs[0].facts["corpus"]["folder"])).split("val")), runs[0].record.val_tokens
    assert used < whole
    assert data.endswith(f" for validation, the first {used:,} evaluated.")
    assert method([half])[1].endswith(f" for validation, the first {used:,} of the second half evaluated.")
    whole_half = replace(half, record=replace(half.record, val_tokens=whole // 2))
    assert method([whole_half])[1].endswith(" for validation, all of the second half evaluated.")
    longer = replace(runs[0], config=replace(config, train=replace(config.train, steps=steps + 1)), facts={})
    apart = "not the same in all rows (settings that differ)."
    said = [model, data, f"Training: {apart}", machine, seeds, optimizer]  # the warm-up is as long
    assert method([*runs, longer]) == said
    tuned = replace(runs[0], config=replace(config, optim=replace(config.optim, lr=0.123)))
    *others, said = method([*runs, tuned])
    assert others == [model, data, training, machine, seeds]
    assert "; lr not the same in all rows (settings that differ)" in said
    assert f"lr_norm {config.optim.lr_norm:g}" in said
    assert "lr 0" not in said
    assert "clipped" in said


def test_the_method_says_what_was_searched(study: Path, tmp_path: Path) -> None:
    """In the words of each study; a remark that only begins alike is none."""
    for name in ("a", "b"):
        shutil.copytree(study, tmp_path / name)
        plan = json.loads((tmp_path / name / "study.json").read_text())
        own = {"search": f"Search: lr = {name}x.", "remarks": ["Search: tuned to lr 1."]}
        changed(tmp_path / name / "study.json", facts={**plan["facts"], "baseline": "vanilla", **own})
    for names in ("a", "ab"):
        report = report_of(*(tmp_path / name for name in names))
        (said,) = re.findall(r"## Method\n(.*?)\n## ", markdown_report(report, {}), re.DOTALL)
        assert said.endswith("\n" + " ".join(f"Search: lr = {name}x." for name in names) + "\n")
        assert "tuned to" not in said


@pytest.mark.usefixtures("few_charts")
def test_nothing_of_an_earlier_report_stays(made: Path, study: Path, tmp_path: Path) -> None:
    """A table that lies beside a report is of its runs: here the second one has nothing to compare."""
    out, run = tmp_path / "out", copied(study, tmp_path / "runs")
    shutil.copytree(made, out)
    latex = (out / "comparison.tex").read_text()
    assert "Parameters against those of" in latex
    assert not any(word in latex for word in ("rough", "match parameters"))  # there are no times, and no commands
    (out / "notes.csv").write_text("mine")
    (run / "result.json").unlink()
    assert main(["report", str(run), "--out", str(out), "--no-samples", "--quiet"]) == 0
    assert not [*out.glob("comparison.*")]
    assert not (out / "differences.png").exists()
    assert (out / "notes.csv").read_text() == "mine"
    assert sorted(json.loads((out / ".cache" / "files.json").read_text())) == sorted(
        path.name for path in out.iterdir() if path.name not in (".cache", "notes.csv")
    )


def test_the_command_writes_page_and_paper(made: Path, study: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert {"index.html", "report.md", "comparison.csv", "comparison.tex", "runs.csv", "curves.pdf"} <= names
    assert {"curves.png", "differences.png", "coefficients.png"} <= names
    written_once = re.findall(r"^@\w+\{(.*),$", (made / "references.bib").read_text(), re.MULTILINE)
    cited = {key for run in gather([study]).runs for key in citations(run.config.model, run.config.optim.name)}
    assert sorted(written_once) == sorted(cited)
    assert {"vaswani2017attention", "nesterov1983method", "vanscoy2018fastest", "jordan2024muon"} <= cited
    text = (made / "report.md").read_text()
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (made / picture).read_bytes().startswith(b"\x89PNG")
    records = load_records(sorted(study.glob("*-s4?")))
    row = next(row for row in compare(records, "vanilla").rows if row.label == "tmm")
    with (made / "comparison.csv").open() as file:
        written = {line["architecture"]: line for line in csv.DictReader(file)}
    assert float(written["tmm"]["loss"]) == pytest.approx(row.loss.mean, abs=1e-6)
    with (made / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6
    assert "train.seed" not in text
    assert "stepformer train" in text


@pytest.mark.slow
def test_pictures_of_everything(study: Path, tmp_path: Path) -> None:
    report = report_of(with_measurements(copied(study, tmp_path)))
    written = {path.name for path in write_paper(report, tmp_path / "out")}
    assert {"curves.png", "coefficients.png", "depth.png", "jacobian.png", "hessian.png"} <= written


def test_curves_say_that_their_beginning_is_cut(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(paper, "save_figure", lambda figure, paths: drawn.append(figure))
    paper.plot_curves(report_of(study), tmp_path / "curves.pdf")
    validation, training = (axes.get_ylabel() for axes in drawn[0].axes)
    assert validation == "nats per token"  # of four evaluations all are needed
    assert training == "nats per token (fall from chance cut off)"


@pytest.mark.parametrize("name", ["index.html", "report.md", "runs.csv", "curves.png"])
def test_files_of_others_are_not_written_over(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    foreign = tmp_path / name
    foreign.write_text("# mine\n<title>mine</title>")
    (tmp_path / "notes.txt").write_text("mine too")
    assert main(["report", str(study), "--out", str(tmp_path), "--no-samples", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert f"'{foreign}' was not made by a report and would be written over: name another folder" in said
    assert len(said.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {name, "notes.txt"}


@pytest.mark.slow
def test_a_report_is_written_over_by_the_next_one_and_nothing_else_is(study: Path, tmp_path: Path) -> None:
    for other in ("kept", "notes.txt"):
        (tmp_path / other).write_text("mine")
    for _ in range(2):
        assert main(["report", str(study), "--out", str(tmp_path), "--no-samples", "--quiet"]) == 0
    assert (tmp_path / "kept").read_text() == (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "hessian.png").write_text("mine, beside a report that has none")
    report = report_of(measured_as(copied(study, tmp_path / "runs")))
    assert "hessian.png" in files_of(report)
    with pytest.raises(InputError, match=r"hessian\.png' was not made by a report"):
        refuse_foreign(tmp_path, files_of(report))


def test_a_folder_that_cannot_be_made_is_blamed(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "report"
    assert main(["report", str(study), "--out", str(out), "--no-samples", "--quiet"]) == 2
    assert f"The folder --out '{out}' cannot be made: Not a directory." in capsys.readouterr().err


def test_the_command_says_that_there_are_no_pictures(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(study), "--out", str(tmp_path), "--no-samples", "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == "note: There are no pictures: they need matplotlib, pip install 'stepformer[plot]'.\n"
    assert said.out.endswith("comparison.tex\n")
    assert not said.out.endswith("\n\n")


def test_lines_on_top_of_each_other_have_other_dashes() -> None:
    signs = [look(index) for index in range(19)]
    assert signs[0]["linestyle"] == "-"
    assert len({(sign["color"], str(sign["linestyle"])) for sign in signs}) == 19
    assert len({str(sign["linestyle"]) for sign in signs[:8]}) == 8  # also without colours
    page = [_looks(index) for index in range(19)]
    assert len(set(page)) == 19
    assert all(" d" in words for words in page[1:])


def test_without_matplotlib_there_is_a_note(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_paper(report_of(study), tmp_path)
    assert not list(tmp_path.glob("*.png"))
    assert "pip install 'stepformer[plot]'" in (tmp_path / "report.md").read_text().replace("\\", "")


def test_words_are_escaped_in_markdown_and_latex() -> None:
    table = Table(columns("a_b", "n"), [[Cell("x|y <i>*"), Cell("50% & $1")]])
    assert "| x\\|y \\<i>\\* | 50% & $1 |" in table.markdown()
    assert r"x\textbar{}y \textless{}i\textgreater{}* & 50\% \& \$1 \\" in table.latex()
    assert r"a\_b & n \\" in table.latex()


# Hostile words


def hostile_report(study: Path, root: Path) -> Report:
    folder = copied(study, root)
    changed(folder / "result.json", label=HOSTILE)
    write_json(folder / "environment.json", {"platform": HOSTILE, "command": ["stepformer", HOSTILE]})
    depth = measurements()["depth"]
    depth["layers"][0]["coefficients"] = {HOSTILE: 1.0}
    measured.save(folder, "depth", step=1, settings={}, result=depth)
    write_json(root / "forgetting.json", {"rows": [{HOSTILE: HOSTILE}]})
    samples = Samples([HOSTILE], Drawing(), {HOSTILE: {HOSTILE: HOSTILE, "vanilla": HOSTILE}}, notes=[HOSTILE])
    gathered = gather([study / "vanilla-s42", folder])
    gathered.forgetting = gather([root]).forgetting
    gathered.notes = [HOSTILE]
    return build(gathered, samples=samples, title=HOSTILE)


def test_data_cannot_leave_its_script() -> None:
    text = script_json({"label": HOSTILE, "values": [math.nan, math.inf, 1.5]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"label": HOSTILE, "values": [None, None, 1.5]}


def test_hostile_words_are_escaped_everywhere(study: Path, tmp_path: Path) -> None:
    page = page_html(hostile_report(study, tmp_path))
    assert "<img" not in page
    assert page.count("</script>") == 2  # the data's and the script's own
    assert page.count("<script") == 2


@pytest.mark.slow
def test_words_that_are_no_unicode_do_not_stop_a_report(study: Path, tmp_path: Path) -> None:
    folder = copied(study, tmp_path)
    changed(folder / "result.json", label="x\udc80y")
    write_json(folder / "environment.json", {"platform": "a\udcffb"})
    report = report_of(folder)
    assert report.labels == ["x\N{REPLACEMENT CHARACTER}y"]
    write_paper(report, tmp_path / "out")
    assert "a\N{REPLACEMENT CHARACTER}b" in (tmp_path / "out/report.md").read_text()
    page_html(report).encode()


def test_a_damaged_checkpoint_is_a_note(study: Path, tmp_path: Path) -> None:
    folder = copied(study, tmp_path)
    for weights in folder.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(b"\xff" * weights.stat().st_size)  # as long as before
    gathered = gather([folder])
    sampling.ask_models(gathered.runs, None, tmp_path / "cache", device="cpu")
    assert any("Its model could not be asked: " in note for note in build(gathered).notes)


# The page in a browser


def opened(browser: Browser, path: Path, **settings: Any) -> tuple[Page, list[str]]:
    page = browser.new_context(viewport={"width": 1200, "height": 900}, **settings).new_page()
    problems = watched(page)
    page.goto(path.resolve().as_uri())
    page.set_default_timeout(5000)
    return page, problems


def written_page(report: Report, folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(page_html(report), encoding="utf-8")
    return path


def ticks(page: Page, kind: str = "evaluation", which: str = "xtick") -> list[str]:
    return page.locator(f"[data-kind={kind}] text.{which}").all_text_contents()


def test_the_page_opens_without_errors_and_draws_its_charts(browser: Browser, made: Path) -> None:
    page, problems = opened(browser, made / "index.html")
    assert (made / "index.html").stat().st_size < LIMIT
    assert page.locator("h1").inner_text() == "vanilla, yurii and tmm on tales-bytes"
    paths = page.locator("[data-kind=evaluation] path.line")
    assert paths.count() == 9  # two seeds and their mean, three times
    for i in range(9):
        assert paths.nth(i).get_attribute("d").count("L") == 3  # four evaluations
    assert page.locator("[data-kind=training] path.line").first.get_attribute("d").count("L") == 11
    assert page.locator("[data-part=coefficients] figure").count() >= 6
    assert page.locator(".sample").count() == 9
    box = paths.first.bounding_box()
    assert box["width"] > 200
    assert problems == []


def test_tables_are_sorted_by_their_headers_both_ways(browser: Browser, made: Path) -> None:
    page, problems = opened(browser, made / "index.html")
    table = page.locator("section[aria-labelledby=comparison] table")
    header = table.locator("th", has_text="final loss")
    losses = [float(x) for x in table.locator("tbody tr td:nth-child(3)").all_inner_texts()]

    def shown() -> list[float]:
        return [float(x) for x in table.locator("tbody tr td:nth-child(3)").all_inner_texts()]

    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert shown() == sorted(losses)
    header.locator("button").press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    assert shown() == sorted(losses, reverse=True)
    names = table.locator("th", has_text="architecture")
    names.locator("button").click()
    assert header.get_attribute("aria-sort") == "none"
    assert [name.strip() for name in table.locator("tbody th").all_inner_texts()] == ["tmm", "vanilla", "yurii"]
    table.locator("th", has_text="difference").locator("button").click()
    assert table.locator("tbody th").last.inner_text().strip() == "vanilla"  # the baseline has none: last
    assert problems == []


def test_the_x_axis_is_chosen(browser: Browser, made: Path) -> None:
    page, problems = opened(browser, made / "index.html")
    label = page.locator("[data-kind=evaluation] text.xlabel")
    assert label.text_content() == "step"
    assert ticks(page) == ["0", "5", "10"]
    page.locator("button[data-name=tokens]").click()
    assert label.text_content() == "training tokens"
    assert ticks(page)[-1] == "1500"  # 12 steps of 8 x 16 tokens end at 1536
    assert page.locator("button[data-name=tokens]").get_attribute("aria-pressed") == "true"
    assert page.locator("button[data-name=step]").get_attribute("aria-pressed") == "false"
    page.locator("button[data-name=time]").click()
    assert label.text_content() == "time in training steps (s)"
    assert page.locator("[data-kind=evaluation] path.line").count() == 9
    assert problems == []


def test_an_architecture_is_hidden_in_all_charts_and_shown_again(browser: Browser, made: Path) -> None:
    page, problems = opened(browser, made / "index.html")
    lines = page.locator("path.line[data-group='1']")
    before = lines.count()
    assert before > 12
    entry = page.locator("[data-part=curves] .legend button[data-group='1']")
    assert entry.inner_text() == "yurii"
    entry.click()
    assert lines.count() == 0
    assert entry.get_attribute("aria-pressed") == "false"
    assert (
        page.locator("[data-part=coefficients] .legend button[data-group='1']").get_attribute("aria-pressed") == "false"
    )
    assert page.locator("[data-kind=evaluation] path.line[data-group='0']").count() == 3
    page.locator("[data-part=curves] .legend .all").click()
    assert lines.count() == before
    entry.click(modifiers=["Shift"])
    assert page.locator("[data-kind=evaluation] path.line").count() == 3
    entry.click()
    assert page.locator("[data-kind=evaluation] text.empty").text_content() == "all hidden"
    assert problems == []


def test_values_of_all_runs_are_read_under_the_pointer(browser: Browser, made: Path, study: Path) -> None:
    page, problems = opened(browser, made / "index.html")
    chart = page.locator("[data-kind=evaluation] svg[role=img]")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 16, box["y"] + 120)
    tip = page.locator("[data-kind=evaluation] .tip")
    assert tip.locator("caption").inner_text() == "step 12"
    rows = {
        row.locator("th").inner_text().strip(): row.locator("td").all_inner_texts()
        for row in tip.locator("tbody tr").all()
    }
    for name in NAMES:
        losses = [run.val_loss for run in load_records([study / f"{name}-s42", study / f"{name}-s43"])]
        assert rows[name] == [f"{value:.4f}" for value in (sum(losses) / 2, *losses)]
    chart.press("Home")
    assert tip.locator("caption").inner_text() == "step 0"
    chart.press("ArrowRight")
    assert tip.locator("caption").inner_text() == "step 4"
    assert problems == []


def test_zoom_and_logarithmic_axes(browser: Browser, made: Path) -> None:
    page, problems = opened(browser, made / "index.html")
    chart = page.locator("[data-kind=evaluation] svg[role=img]")
    chart.scroll_into_view_if_needed()
    whole = ticks(page)
    reset = page.locator("button[data-name=reset]")
    assert not reset.is_visible()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 104, steps=4)
    assert page.locator("rect.selection").count() == 1
    page.mouse.up()
    near = ticks(page)
    assert near != whole
    assert float(near[0]) > 5
    assert ticks(page, "training") == near  # both charts show the same range
    reset.click()
    assert ticks(page) == whole
    chart.press("+")
    assert ticks(page) != whole
    chart.press("Escape")
    assert ticks(page) == whole
    page.locator("button[data-name=logx]").click()
    assert "0" not in ticks(page)
    level = page.locator("[data-kind=evaluation] line.gridline").nth(0).get_attribute("y1")
    page.locator("button[data-name=logy]").click()
    assert page.locator("[data-kind=evaluation] line.gridline").nth(0).get_attribute("y1") != level
    assert problems == []


def test_hostile_words_are_shown_and_not_run(browser: Browser, study: Path, tmp_path: Path) -> None:
    path = written_page(hostile_report(study, tmp_path), tmp_path)
    page, problems = opened(browser, path)
    shown = re.sub(r"\s+", " ", HOSTILE)
    assert re.sub(r"\s+", " ", page.locator("h1").inner_text()) == shown
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0
    assert re.sub(r"\s+", " ", page.locator(".sample p").first.inner_text()) == shown + shown
    assert page.locator("[data-kind=evaluation] path.line").count() == 2
    entry = page.locator("[data-part=curves] .legend button[data-group='1']")
    assert re.sub(r"\s+", " ", entry.inner_text()) == shown
    page.locator("[data-kind=evaluation] svg[role=img]").press("End")
    assert shown in re.sub(r"\s+", " ", page.locator("[data-kind=evaluation] .tip").inner_text())
    assert page.evaluate("window.harmed") is None
    assert problems == []


def test_all_measurements_are_drawn(browser: Browser, study: Path, tmp_path: Path) -> None:
    page, problems = opened(browser, written_page(report_of(with_measurements(copied(study, tmp_path))), tmp_path))
    for part in ("coefficients", "depth", "jacobian", "hessian"):
        charts = page.locator(f"[data-part={part}] figure svg[role=img]")
        assert charts.count() >= 2
        for i in range(charts.count()):
            assert charts.nth(i).locator("path.line").count() == 1, (part, i)
    colours = page.evaluate(
        "() => { const c = document.querySelector('canvas');"
        "return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size }"
    )
    assert colours > 10
    select = page.locator("[data-part=jacobian] select").first
    assert select.locator("option").all_inner_texts() == ["layer 0", "layer 1"]
    select.select_option("layer 1")
    assert page.locator("[data-part=jacobian] figure").first.locator("path.line").count() == 1
    assert page.locator("#notes").count() == 0
    assert problems == []


def test_a_page_about_little_says_what_is_missing(browser: Browser, study: Path, tmp_path: Path) -> None:
    folder = copied(study, tmp_path)
    for name in ("result.json", "metrics.jsonl", "environment.json"):
        (folder / name).unlink()
    page, problems = opened(browser, written_page(report_of(folder), tmp_path))
    assert (
        page.locator(".verdict").inner_text() == "No run has finished a training here, so there is nothing to compare."
    )
    notes = page.locator("section[aria-labelledby=notes]").inner_text()
    assert "yurii s42: Unfinished: step 0 of 12." in notes
    assert "There are no curves: There is no metrics file" in notes
    assert "Not measured: the curvature of the loss (stepformer diagnose RUN --hessian)." in notes
    assert page.locator("#curves").count() == 0
    assert problems == []


def test_narrow_dark_printed_and_without_script(browser: Browser, made: Path) -> None:
    page, problems = opened(browser, made / "index.html", color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator("[data-kind=evaluation] svg[role=img]").bounding_box()["width"] <= 400
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert not page.locator(".controls").is_visible()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
    assert problems == []
    plain, problems = opened(browser, made / "index.html", java_script_enabled=False)
    assert "JavaScript" in plain.locator("noscript").inner_text()
    assert plain.locator("section[aria-labelledby=comparison] tbody tr").count() == 3
    assert problems == []


def test_everything_has_a_name(browser: Browser, made: Path) -> None:
    """Controls, tables and charts can be told apart without seeing them; every link leads to a section."""
    page, _ = opened(browser, made / "index.html")
    nameless = page.evaluate(
        "() => [...document.querySelectorAll('button, select, svg[role=img], [role=region], table, a')].filter(e =>"
        "!(e.getAttribute('aria-label') || e.textContent.trim() || e.caption)).map(e => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == page.evaluate(
        "document.querySelectorAll('[id]').length"
    )
