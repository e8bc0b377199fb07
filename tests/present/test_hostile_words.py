"""Words of a stranger's run folder in cards and reports are shown as words: they make no tag, row, key or macro."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from markdown_it import MarkdownIt

from reported import changed, copied, report_of
from stepformer.base.files import write_json
from stepformer.data.tokenizers import valid
from stepformer.measure import measured
from stepformer.pages.reports.contents import Report
from stepformer.pages.reports.page import page_html
from stepformer.pages.reports.paper import latex_tables, markdown_report
from stepformer.present.tables import Cell, Column, Table, latex_text, listed, markdown_text
from stepformer.training.loading import LoadedRun, load_run

CARD = "stepformer.exchange.huggingface.card"
HARMLESS = "words"
HOSTILE = (
    "<script>alert(1)</script>",
    "x\n---\nfoo: bar",
    "$\\input{x}$ % & # ^ ~ _ \\",
    "a \\| b | `c` \\",
    "[x]: http://example.com",
    "```\n# heading\n```",
    "a | b",
    "'\"><img src=x onerror=alert(1)>",
    "x: {y: [z",
    "\\end{tabular}\\input{x}",
    "[x] \\\\",
    "* x",
    "~~~ `` ~~x~~ *y* __z__",
    "[a](javascript:alert(1)) ![b](http://example.com/b.png)",
    "<!-- x",
    "- x",
    "1. x",
    "> # x",
    "&lt;b&gt; &#60;",
    "{{data}} {{sections}} \\1",
    "\x1b[31m\x07red\x9b\u2028next\x85line\r\nlast",
    "\udc80",
)


def shown(word: str) -> str:
    """What is to be read of a word: all of it on one line, without what cannot be seen."""
    return " ".join("".join(c for c in valid(word) if c.isspace() or unicodedata.category(c) != "Cc").split())


def markdown(text: str) -> tuple[list[str], list[str]]:
    """The structure of a Markdown text, words left out, and the words of each of its places."""
    structure, words = [], []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        if token.type == "inline":
            inside = token.children or []
            structure += [part.type for part in inside if part.type not in ("text", "code_inline")]
            words.append("".join(part.content for part in inside))
        else:
            structure.append(f"{token.type} {token.tag} {token.info}")
    return structure, words


class Tags(HTMLParser):
    """The tags of a page with the names of their attributes, and its words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[Any] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, [name for name, _ in attrs]))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_comment(self, data: str) -> None:
        self.tags.append("comment")


def in_environment(folder: Path, word: str) -> None:
    write_json(
        folder / "environment.json",
        {
            "versions": {"python": word, "torch": word, word: word},
            "device": {"cpu": word, "cores": word, word: word},
            "platform": word,
            "threads": 3,
            "git": {"revision": word, "changed": True},
            "command": ["/bin/stepformer", word, word],
        },
    )


def in_measurements(folder: Path, word: str) -> None:
    text = {"name": word, "mode": word, "stride": 3, "nats": 2.0, "perplexity": 7.4, "bits_per_byte": 1.5}
    text |= {"tokens": 10, "hash": word}
    texts = {"texts": [text], "mean_perplexity": 7.4, "protocol": word}
    task = {"task": word, "shots": 1, "items": 5, "of": 9, "acc": 0.5, "acc_stderr": 0.1, word: 1.5}
    measured.save(folder, "perplexity", step=1, settings={"x": word}, result=texts)
    measured.save(folder, "tasks", step=1, settings={"lm_eval": word}, result={"tasks": {word: task}})
    found: dict[str, Any] = {"trace": {"mean": 1.0, "standard_error": 0.1}, "tokens": 10, "windows_hash": word}
    found["settings"] = {"protocol": word}
    measured.save(folder, "hessian", step=1, settings={"protocol": word, word: word}, result=found)


# The card of an exported model


@pytest.fixture(scope="module")
def loaded(study: Path) -> LoadedRun:
    return load_run(study / "yurii-s42", device="cpu")


def with_words(loaded: LoadedRun, folder: Path, word: str, *, imported: bool) -> LoadedRun:
    """A run all of whose words are `word`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(loaded.folder.path, folder, ignore=shutil.ignore_patterns("checkpoints"))
    in_environment(folder, word)
    in_measurements(folder, word)
    measured.save(folder, word.replace("/", "").replace("\udc80", "") or "x", step=1, settings={}, result={})
    result = json.loads((folder / "result.json").read_text())
    write_json(folder / "result.json", {**result, "device": word})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items() if k != "check"} | {"val_hash": word} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record: dict[str, Any] = {**loaded.record, "label": word, "precision": word, "plugins": [f"x/{word}"]}
    splits = {word: {"hash": word, "tokens": 3}}
    record |= {"corpus": {"folder": f"x/{word}", "splits": splits}, "init": {"id": word, "step": 3}}
    if imported:
        record["imported"] = {"kind": word, "files": {word: word}, "step": 3, word: word}
    return replace(loaded, folder=type(loaded.folder)(folder), record=record)


SOME = pytest.mark.parametrize("count", [6, pytest.param(len(HOSTILE), marks=pytest.mark.slow)])


@SOME
@pytest.mark.parametrize("imported", [False, True])
def test_cards_have_the_same_structure_whatever_the_words_are(
    loaded: LoadedRun, tmp_path: Path, imported: bool, count: int
) -> None:
    card = pytest.importorskip(CARD, reason="needs transformers", exc_type=ImportError)

    def made(word: str) -> tuple[list[str], list[str]]:
        text: str = card.model_card(with_words(loaded, tmp_path / "run", word, imported=imported))
        assert text == valid(text)
        return markdown(text)

    structure, _ = made(HARMLESS)
    assert structure.count("table_open table ") == 5 - imported
    for word in HOSTILE[:count]:
        found, words = made(word)
        assert found == structure, word
        assert shown(word) in words, word


def test_headers_hold_names_as_they_are(loaded: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    card = pytest.importorskip(CARD, reason="needs transformers", exc_type=ImportError)
    import yaml

    for word in (*HOSTILE, "no", "1", "null", "~", "- x", "# x", "'", "x: y"):
        monkeypatch.setattr(card, "preset_of", lambda config, word=word: SimpleNamespace(name=word))
        text = f"{card.header(loaded.config.model, gpt2=False)}\n\n# Title\n"
        found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        assert found
        assert text[found.end() :] == "\n# Title\n", word
        header = yaml.safe_load(found[1])
        assert header.keys() == {"library_name", "pipeline_tag", "tags"}
        assert header["tags"][:2] == ["stepformer", word]


def test_titles_and_commands_of_a_card(loaded: LoadedRun) -> None:
    card = pytest.importorskip(CARD, reason="needs transformers", exc_type=ImportError)
    structure, _ = markdown(card.loading(HARMLESS, HARMLESS, False))
    for word in HOSTILE:
        assert markdown(card.loading(word, word, False))[0] == structure, word


# Reports


def hostile_report(study: Path, folder: Path, word: str) -> Report:
    shutil.rmtree(folder, ignore_errors=True)
    run = copied(study, folder)
    changed(run / "result.json", label=word, device=word)
    record = json.loads((run / "run.json").read_text())
    corpus = {**record["corpus"], "folder": f"x/{word}"}
    changed(run / "run.json", label=word, stepformer=word, corpus=corpus)
    in_environment(run, word)
    in_measurements(run, word)
    (run / "measured" / "depth.json").write_text(json.dumps({"format": word}))
    (run / "forgetting.json").write_text(json.dumps({"rows": [{word: word}]}))
    return report_of(run, copied(study, folder, "vanilla-s42"), title=word)


@SOME
def test_reports_have_the_same_structure_whatever_the_words_are(study: Path, tmp_path: Path, count: int) -> None:
    def made(word: str) -> tuple[Tags, tuple[list[str], list[str]], Report]:
        report = hostile_report(study, tmp_path / "runs", word)
        return Tags(page_html(report)), markdown(valid(markdown_report(report, {}))), report

    page, (structure, _), _ = made(HARMLESS)
    assert ("script", ["type", "id"]) in page.tags
    for word in HOSTILE[:count]:
        found, (parts, words), report = made(word)
        assert found.tags == page.tags, word
        data = next(text for text in found.words if text.startswith('{"labels"'))
        assert json.loads(data)["labels"] == report.labels
        assert parts == structure, word
        assert shown(word) in words, word
        assert report.comparison is not None
        (latex,) = latex_tables(report, report.comparison)
        check_latex(valid(latex), 4, len(report.labels))
        assert f"{latex_text(f'{listed(report.labels)} on')} " in latex, word


ESCAPED = re.compile(
    r"\\(?:textbackslash|textasciitilde|textasciicircum|textless|textgreater|textbar|textendash|`)\{\}|\\[&%$#_{}]"
    r"|\$(?:\\pm|\\times|-)\$|(?<=-)\{\}(?=-)|\\begin\{tabular\}\[t\]\{@\{\}r@\{\}\}|\\\\\{\}|\\end\{tabular\}"
)
SPECIAL = r"[\\$%#_{}~^`|\x00-\x1f\x7f]|--"
FRAME = re.compile(
    r"% needs \\usepackage\{booktabs\}\n\\begin\{table\}\n\\centering\n"
    r"(?:\\caption\{(?P<caption>.*)\}\n)?(?:\\label\{[\w:-]+\}\n)?\\small\\setlength\{\\tabcolsep\}\{4pt\}\n"
    r"\\begin\{tabular\}\{@\{\}(?:[lr]|p\{(?:4|2\.3)cm\})+@\{\}\}\n\\end\{tabular\}\n"
    r"(?:\\par\\smallskip\\footnotesize\\raggedright\n(?P<notes>(?:.*\\par\n)+))?\\end\{table\}\n$"
)


def check_latex(text: str, columns: int, rows: int) -> None:
    """A table of so many rows and columns in which every special character is written as one, also beside the rows."""
    head, body = text.split(r"\midrule" + "\n")
    body, end = body.split(r"\bottomrule" + "\n")
    beside = FRAME.match(head.rpartition("\n\\toprule\n")[0] + "\n" + end)
    assert beside, text
    for words in (beside["caption"] or "", *(beside["notes"] or "").split("\\par\n")):
        assert not re.search(f"{SPECIAL}|&", ESCAPED.sub("x", words)), words
    lines = body.splitlines()
    assert len(lines) == rows
    for line in (head.splitlines()[-1], *lines):
        plain = ESCAPED.sub("x", line.removeprefix("{}")).removesuffix(r" \\")
        assert plain.count("&") == columns - 1, line
        assert not re.search(SPECIAL, plain), line
        assert not line.startswith(("[", "(", "*")), line  # of the line above, LaTeX would think


def test_every_way_to_begin_a_paragraph_or_a_row() -> None:
    structure, _ = markdown(HARMLESS)
    for word in (*HOSTILE, "+ x", "-", "--- x", "12) x", "=== x", "| a | b |", "\tx", "    x", "_ _ _", "* * *"):
        found, words = markdown(valid(markdown_text(word)))
        assert found == structure, word
        assert words == [shown(word)]
        for code in (False, True):
            table = Table([Column("a"), Column("b", True)], [[Cell(word, code=code), Cell(word)]] * 2)
            assert markdown(valid(table.markdown())) == markdown(table_of(shown(word))), word
            check_latex(replace(table, caption=word, notes=[word]).latex("tab:x"), 2, 2)


def table_of(words: str) -> str:
    """A table with these words, by entities."""
    cell = "".join(f"&#{ord(character)};" for character in words)
    return "| a | b |\n|---|--:|\n" + f"| {cell} | {cell} |\n" * 2


def test_a_spreadsheet_calculates_no_words() -> None:
    names = ["=HYPERLINK(1)", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "'=1", "vanilla", "a-b=c"]
    table = Table([Column("name"), Column("loss", True)], [[Cell(name, name), Cell("x", -0.5)] for name in names])
    lines = list(csv.DictReader(io.StringIO(table.csv(), newline="")))
    assert [line["name"] for line in lines] == [*(f"'{name}" for name in names[:6]), *names[6:]]
    assert {line["loss"] for line in lines} == {"-0.5"}
    pytest.importorskip("pandas")
    assert table.to_frame()["name"].tolist() == names
