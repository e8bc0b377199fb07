"""One table in every form."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from rich.console import Console

from stepformer.present.tables import NOTHING, Cell, Column, Table, listed, number, of_texts, text


def made(names: tuple[str, ...] = ("plain", "a|b_c <i>")) -> Table:
    columns = [
        Column("architecture"),
        Column("final loss ± se", numeric=True, key="loss"),
        Column("verdict"),
        Column("tokens to baseline", numeric=True, spare=1),
        Column("best loss", numeric=True, spare=2),
    ]
    rows = [
        [text(name, style="green"), Cell("1.9033 ± 0.0117", 1.9033), text("better"), number(0.5, ".1%"), number(None)]
        for name in names
    ]
    return Table(columns, rows, "Losses", ["Nats per token."])


def drawn(table: Table, width: int) -> str:
    out = Console(width=width, file=io.StringIO(), highlight=False)
    out.print(table.rich(width))
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_a_terminal_that_is_wide_enough_has_all_of_it() -> None:
    found = drawn(made(), 100)
    row = next(line for line in found.splitlines() if line.startswith("a|b_c <i>"))
    for part in ("1.9033 ± 0.0117", "better", "50.0%", NOTHING):
        assert part in row
    assert "Nats per token." in found
    assert "Too wide" not in found


def test_a_narrow_one_loses_spare_columns_and_then_stacks() -> None:
    table = made()
    titles = [[column.title for column in table.fitting(width).columns] for width in (100, 46, 42)]
    assert [len(found) for found in titles] == [5, 4, 3]
    assert "tokens to baseline" not in titles[1]
    for width in (46, 42, 33):
        found = drawn(table, width)
        assert max(map(len, found.splitlines())) <= width
        assert "Too wide for this terminal: tokens to baseline" in " ".join(found.split())
    assert "\n± 0.0117" in table.fitting(33).rows[0][1].text
    assert table.fitting(1000) == table


def test_markdown_csv_html_and_latex() -> None:
    table = made()
    lines = table.markdown().splitlines()
    assert len({len(line) for line in lines[:4]}) == 1
    assert "a\\|b\\_c \\<i>" in lines[3]
    assert lines[1].count(":") == 3  # numbers to the right
    assert lines[-1] == "Nats per token."
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert rows[1]["architecture"] == "a|b_c <i>"
    assert (rows[0]["loss"], rows[0]["best loss"]) == ("1.9033", "")
    page = table.html(mark=lambda name: f"[{len(name)}]")
    assert "[9]a|b_c &lt;i&gt;" in page
    assert 'data-value="1.9033"' in page
    assert page == table.html(mark=lambda name: f"[{len(name)}]")
    latex = table.latex("tab:one").splitlines()
    assert latex[1:5] == [r"\begin{table}", r"\centering", r"\caption{Losses}", r"\label{tab:one}"]
    below = [r"\par\smallskip\footnotesize\raggedright", r"Nats per token.\par", r"\end{table}"]
    assert latex[-4:] == [r"\end{tabular}", *below]
    assert r"a\textbar{}b\_c \textless{}i\textgreater{} & 1.9033 $\pm$ 0.0117" in table.latex()
    signs = of_texts(("row-1", "difference"), [("a-2", "-0.0120 [-0.03, +0.01]")])
    assert r"a-2 & $-$0.0120 [$-$0.03, +0.01] \\" in signs.latex()
    noted = replace(signs, caption="50% _a_", notes=["* say `--match x --- y`"])
    assert "\\caption{50\\% \\_a\\_}\n\\small" in noted.latex()
    assert "\n* say \\`{}-{}-match x -{}-{}- y\\`{}\\par\n\\end{table}\n" in noted.latex()
    notes = ["Loss: in nats. Best loss: of all evaluations. It is lower. Loss ratio: of two."]
    assert "\nLoss: in nats. Loss ratio: of two.\\par\n" in replace(table, notes=notes).latex()  # no such column
    pandas = pytest.importorskip("pandas")
    assert isinstance(table.to_frame(), pandas.DataFrame)
    assert table.to_frame()["loss"].tolist() == [1.9033, 1.9033]


def test_a_table_for_a_paper_is_no_wider_than_its_text() -> None:
    interval = "-0.2935 [-0.4801, -0.1068]"
    columns = [Column("name"), Column("loss ± se", True), *[Column(f"at {i} [CI]", True) for i in (1, 2)]]
    columns.append(Column("verdict", printed=False))
    cells = ["vanilla-parameters-of-yurii", "3.9008 ± 0.0641", interval, interval, "worse"]
    wide = Table(columns, [list(map(text, cells))], notes=["Loss: in nats. Verdict: worse or better."])
    lines = wide.latex().splitlines()
    assert r"\begin{tabular}{@{}p{2.3cm}rrr@{}}" in lines

    def two(first: str, second: str) -> str:
        return rf"\begin{{tabular}}[t]{{@{{}}r@{{}}}}{first}\\{{}}{second}\end{{tabular}}"

    below = two("$-$0.2935", "[$-$0.4801, $-$0.1068]")
    heads = ["name", two("loss", r"$\pm$ se"), two("at 1", "[CI]"), two("at 2", "[CI]")]
    assert [line.removesuffix(r" \\").split(" & ") for line in lines if " & " in line] == [
        heads,
        ["vanilla-parameters-of-yurii", two("3.9008", r"$\pm$ 0.0641"), below, below],
    ]
    assert "Loss: in nats.\\par" in lines
    narrow = wide.without([3])
    assert r"\begin{tabular}{@{}lrr@{}}" in narrow.latex()
    assert "3.9008 $\\pm$ 0.0641 & $-$0.2935 [" in narrow.latex()


def test_plain_text() -> None:
    first, second, *_ = made(("x",)).plain().splitlines()
    assert first == "architecture  final loss ± se  verdict  tokens to baseline  best loss"
    assert second.endswith(NOTHING)


def test_names_in_a_sentence() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefgh")) == "a, b, c, d, e and 3 more"
