"""Comparison of finished runs: statistics against known values, refusals, tables and the plot."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from stepformer.base.errors import InputError, StepformerError, UnknownNameError
from stepformer.base.files import write_json
from stepformer.present.style import new_figure, save_figure, say_below
from stepformer.present.tables import MINUS
from stepformer.study import (
    Comparison,
    Facts,
    RunRecord,
    compare,
    load_records,
    plot_comparison,
)
from stepformer.study.differences import differences, flat, recorded
from stepformer.study.plots import draw_comparison
from stepformer.training import run_config

BUDGET, EVALUATIONS = 8000, 8
RECORDED, HASH = run_config("vanilla").to_dict(), run_config("vanilla").hash


def write_run(root: Path, label: str, number: int, final: float, *, start: float = 4.0, **changes: Any) -> Path:
    """A run folder whose evaluation loss falls on a straight line from `start` to `final`."""
    folder = root / f"{label}-{number}"
    folder.mkdir(parents=True)
    result = {
        "format": 1,
        "title": label,
        "preset": "",
        "label": label,
        "seed": number,
        "config_hash": HASH,
        "pairing": "pair",
        "steps": 80,
        "tokens": BUDGET,
        "val_loss": final,
        "best_val_loss": final,
        "best_step": 80,
        "val_tokens": 6144,
        "val_hash": "0123456789abcdef0123456789abcdef",
        "train_seconds": 10.0,
        "tokens_per_second": 800.0,
        "parameters": 1000,
        "unigram_entropy": 3.5,
        "weights_sha256": hashlib.sha256(f"{label} {number}".encode()).hexdigest(),
        "status": "finished",
    }
    write_json(folder / "result.json", result | changes)
    record = {"format": 1, "stepformer": "0.5.0", "config": RECORDED, "label": label}
    write_json(folder / "run.json", record)
    lines: list[dict[str, Any]] = []
    for i in range(EVALUATIONS + 1):
        step, tokens = 80 * i // EVALUATIONS, BUDGET * i // EVALUATIONS
        if step:
            lines.append(
                {"kind": "train", "step": step, "tokens": tokens, "loss": 3.0, "grad_norm": 1.0, "seconds": 1.0}
            )
        loss = start + (final - start) * i / EVALUATIONS
        lines.append({"kind": "eval", "step": step, "tokens": tokens, "val_loss": loss, "seconds": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def runs(root: Path, losses: dict[str, dict[int, float]], **changes: Any) -> list[RunRecord]:
    return load_records(
        write_run(root, label, seed, loss, **changes) for label, seeds in losses.items() for seed, loss in seeds.items()
    )


def three(root: Path) -> Comparison:
    losses = {
        "vanilla": {42: 2.00, 43: 2.02, 44: 1.99},
        "yurii": {42: 1.90, 43: 1.925, 44: 1.885},
        "tmm": {42: 2.05, 43: 1.99, 44: 2.00},
    }
    return compare(runs(root, losses), "vanilla")


def test_comparison_by_hand(tmp_path: Path) -> None:
    comparison = three(tmp_path)
    base, yurii, tmm = comparison.rows
    assert [row.label for row in comparison.rows] == ["vanilla", "yurii", "tmm"]
    assert (base.verdict, yurii.verdict, tmm.verdict) == ("baseline", "better", "no difference shown")
    assert base.difference is None
    assert base.tokens_fraction == pytest.approx(1.0)
    assert yurii.difference is not None
    assert yurii.difference.mean == pytest.approx(-0.1)
    # straight lines from 4: the baseline's loss is met after (4 - base) / (4 - other) of the budget
    hand = np.mean([2.00 / 2.10, 1.98 / 2.075, 2.01 / 2.115])
    assert yurii.tokens_fraction == pytest.approx(hand)
    assert (tmm.reached, tmm.tokens_fraction) == (1, None)
    assert (comparison.tokens, comparison.val_tokens, comparison.seeds) == (BUDGET, 6144, (42, 43, 44))
    assert comparison.unigram_entropy == 3.5
    assert [note for note in comparison.notes if "tmm" in note or "yurii" in note] == []
    assert "among 2" in comparison.notes[-1]
    assert "10%" in comparison.notes[-1]


def test_rows_that_learned_less_than_counting_are_told(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, "vanilla", 42, 3.4), write_run(tmp_path, "yurii", 42, 3.6)]
    told = "Above the unigram entropy, which counting tokens reaches: yurii."
    assert told in compare(load_records(folders), "vanilla").remarks


def test_the_baseline_may_be_any_label(tmp_path: Path) -> None:
    records = runs(tmp_path, {"a": {1: 2.0, 2: 2.1}, "b": {1: 1.9, 2: 2.0}})
    assert [row.label for row in compare(records, "b").rows] == ["b", "a"]
    assert compare(records, "b").rows[1].verdict == "worse"


def test_speed(tmp_path: Path) -> None:
    records = runs(tmp_path, {"a": {1: 2.0}}) + runs(
        tmp_path, {"b": {1: 1.9}}, train_seconds=12.5, tokens_per_second=640.0, parameters=2000
    )
    row = compare(records, "a").rows[1]
    assert (row.speed_ratio, row.time_ratio) == (pytest.approx(0.8), pytest.approx(1.25))
    assert row.parameters == 2000


def test_seeds_of_unequal_speed_are_told(tmp_path: Path) -> None:
    records = runs(tmp_path, {"vanilla": {1: 3.0, 2: 3.1}, "yurii": {1: 2.9, 2: 3.0}})
    slow = [*records[:-1], dataclasses.replace(records[-1], tokens_per_second=records[-1].speed / 2.3)]
    (told,) = [note for note in compare(slow, "vanilla").remarks if "unequal" in note]
    assert told == "Seeds of one row ran at unequal speeds, yurii 2.3 x: seconds and speeds are rough."
    assert not [note for note in compare(records, "vanilla").remarks if "unequal" in note]


def test_a_prompt_shows_the_table_and_write_keeps_it(tmp_path: Path) -> None:
    found = three(tmp_path / "runs")
    assert repr(found) == str(found)
    written = found.write(tmp_path / "out")
    assert [path.name for path in written] == ["comparison.md", "comparison.csv"]
    assert written[0].read_text() == str(found)
    assert written[1].read_text() == found.details.csv()


def test_seconds_are_those_of_steps_that_do_not_compile(tmp_path: Path) -> None:
    slow = {"start_steps": 3, "start_seconds": 40.0, "train_seconds": 40.0 + 77 * 0.25, "tokens_per_second": 99.0}
    fast = {"start_steps": 6, "start_seconds": 80.0, "train_seconds": 80.0 + 74 * 0.125, "tokens_per_second": 50.0}
    records = runs(tmp_path, {"a": {1: 2.0}}, **slow) + runs(tmp_path, {"b": {1: 1.0}}, **fast)
    assert [record.seconds for record in records] == pytest.approx([20.0, 10.0])
    row = compare(records, "a").rows[1]
    assert row.time_ratio == pytest.approx(0.5)
    assert row.speed_ratio == pytest.approx(2.0)
    assert row.tokens_fraction == pytest.approx(2 / 3)  # from 4 to 1, and the other ends at 2
    assert row.seconds_fraction == pytest.approx(1 / 3)
    written = list(csv.DictReader(io.StringIO(compare(records, "a").details.csv())))
    assert [line["seconds_by_seed"] for line in written] == ["20.000000", "10.000000"]
    assert [line["start_seconds_by_seed"] for line in written] == ["40.000000", "80.000000"]
    (old,) = runs(tmp_path, {"c": {1: 2.0}})
    assert (old.seconds, old.speed) == (10.0, 800.0)
    (short,) = runs(tmp_path, {"d": {1: 2.0}}, start_steps=80, start_seconds=10.0)
    assert short.seconds == 10.0


def test_rows_may_have_budgets_of_their_own(tmp_path: Path) -> None:
    losses = {1: 2.0, 2: 2.1}
    records = runs(tmp_path, {"a": losses}, pairing="x/y/16x4x80/256")
    folders = [write_run(tmp_path, "b", seed, loss - 0.1, pairing="x/y/16x4x60/256") for seed, loss in losses.items()]
    for folder in folders:  # three quarters of the budget
        result = json.loads((folder / "result.json").read_text())
        kept = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= 60]
        last = {"kind": "eval", "step": 60, "tokens": 6000, "val_loss": result["val_loss"]}
        (folder / "metrics.jsonl").write_text("\n".join([*kept, json.dumps(last)]) + "\n")
        write_json(folder / "result.json", {**result, "steps": 60, "tokens": 6000, "best_step": 60, "train_seconds": 9})
    records += load_records(folders)
    with pytest.raises(InputError, match=r"8,000 and 6,000 training tokens \(`compare --allow steps` permits that\)"):
        compare(records, "a")
    found = compare(records, "a", facts=Facts(allowed=("steps",)))
    assert found.rows[1].verdict == "better, other budget"
    assert found.rows[1].difference is not None
    assert found.rows[1].difference.mean == pytest.approx(-0.1)
    own = "b: other budget, 6,000 tokens (75.0% of the baseline's) in 90.0% of its seconds, with a schedule of its own."
    assert own in found.notes
    text = found.table.markdown()
    assert "| 6,000 |" in " ".join(text.split())
    assert "after training on" not in text
    others = runs(tmp_path, {"c": {1: 2.0}}, pairing="x/y/16x8x80/256")
    with pytest.raises(InputError, match="different batches"):
        compare([*records, *others], "a", facts=Facts(allowed=("steps",)))
    told = dataclasses.asdict(Facts("a", allowed=("steps",)))
    assert Facts.of_study({"facts": told}).own_budgets
    older = {key: value for key, value in told.items() if key != "allowed"} | {"own_budgets": True}
    assert Facts.of_study({"facts": older}).own_budgets


def test_unpaired_seeds_are_left_out_and_reported(tmp_path: Path) -> None:
    comparison = compare(runs(tmp_path, {"a": {1: 2.0, 2: 2.1, 3: 2.2}, "b": {2: 2.0, 3: 2.1, 4: 9.0}}), "a")
    row = comparison.rows[1]
    assert row.difference is not None
    assert row.difference.seeds == (2, 3)
    assert row.difference.mean == pytest.approx(-0.1)
    assert row.seeds == (2, 3, 4)
    assert "b: seed 4 left out of the difference, the baseline has no such run." in comparison.notes
    assert "b: seed 1 of the baseline left out of the difference, there is no such run." in comparison.notes
    for text in (comparison.table.markdown(), printed(comparison), comparison.details.csv()):
        assert "seed 4 left out" in " ".join(text.split())


def test_no_common_seed(tmp_path: Path) -> None:
    comparison = compare(runs(tmp_path, {"a": {1: 2.0}, "b": {2: 1.9}}), "a")
    row = comparison.rows[1]
    assert (row.verdict, row.difference, row.speed_ratio, row.tokens_fraction) == ("no common seed", None, None, None)
    plot_comparison(comparison, tmp_path / "plot.png")
    assert "no common seed" in comparison.table.markdown()


def test_small_differences_need_four_pairs(tmp_path: Path) -> None:
    losses = {"a": {1: 2.0, 2: 2.1, 3: 2.2}, "b": {1: 1.998, 2: 2.0979, 3: 2.1981}}
    comparison = compare(runs(tmp_path / "three", losses), "a")
    assert comparison.rows[1].verdict == "better"
    assert comparison.notes == (
        "b: a difference under 0.003 is not to be claimed from 3 paired seeds; it needs at least 4.",
    )
    assert "better *" in printed(comparison)
    assert "better \\*" in comparison.table.markdown()
    losses["a"][4], losses["b"][4] = 2.3, 2.298
    comparison = compare(runs(tmp_path / "four", losses), "a")
    assert comparison.rows[1].verdict == "better"
    assert comparison.notes == ()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"val_hash": "beef"}, r"different splits \(hashes 0123456789ab and beef\)"),
        ({"val_tokens": 5000}, r"different numbers of tokens \(6,144 and 5,000\)"),
        ({"pairing": "other"}, r"different batches \(pairing pair and other\)"),
    ],
)
def test_refuses_runs_that_do_not_measure_one_thing(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    records = runs(tmp_path, {"a": {1: 2.0}}) + runs(tmp_path, {"b": {1: 1.9}}, **change)
    with pytest.raises(StepformerError, match=sentence):
        compare(records, "a")


def test_what_another_optimizer_reads_is_no_difference(tmp_path: Path) -> None:
    """Its default was another one when the first of these runs of Muon was stored."""
    old, new = write_run(tmp_path, "old", 42, 2.0), write_run(tmp_path, "new", 42, 1.9)
    record = json.loads((old / "run.json").read_text())
    assert record["config"]["optim"]["name"] == "muon"
    record["config"]["optim"]["probe"] = 4096
    write_json(old / "run.json", record)
    assert differences({folder.name: recorded(folder) for folder in (old, new)}) == []
    words = {"muon": [], "trust": ["optim.name=trust"], "less": ["optim.name=trust", "probe=512"]}
    rows = {label: flat(run_config("vanilla", some)) for label, some in words.items()}
    found = {difference.key: difference.values for difference in differences(rows)}
    assert found["optim.probe"] == {"trust": 2048, "less": 512}
    assert "optim.factor_damping" not in found


def test_refuses_unequal_budgets_doubles_and_mixed_labels(tmp_path: Path) -> None:
    a, b = runs(tmp_path, {"a": {1: 2.0}, "b": {1: 1.9}})
    with pytest.raises(StepformerError, match="budgets are 8,000 and 9,000"):
        compare([a, dataclasses.replace(b, tokens=9000)], "a")
    with pytest.raises(StepformerError, match="both seed 1 of 'a'"):
        compare([a, b, a], "a")
    with pytest.raises(StepformerError, match="not one architecture"):
        compare([a, b, dataclasses.replace(a, seed=2, parameters=7)], "a")
    with pytest.raises(StepformerError, match="no runs to compare"):
        compare([], "a")
    with pytest.raises(StepformerError, match="confidence level"):
        compare([a, b], "a", confidence=1.0)
    with pytest.raises(UnknownNameError, match="No run is labelled 'c'"):
        compare([a, b], "c")


def test_loads_what_was_written(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path, "a", 7, 2.0, unigram_entropy=None, preset="nesterov-lie-trotter"))
    assert (record.label, record.seed, record.val_loss, record.unigram_entropy) == ("a", 7, 2.0, None)
    assert record.preset == "nesterov-lie-trotter"
    assert record.curve[0] == (0, 4.0)
    assert record.curve[-1] == (BUDGET, 2.0)
    assert len(record.curve) == EVALUATIONS + 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"val_loss": "low"}, "val_loss is 'low', not a number"),
        ({"seed": 1.5}, "seed is 1.5, not a whole number"),
        ({"seed": True}, "seed is True, not a whole number"),
        ({"val_hash": None}, "val_hash is None, not a text"),
        ({"train_seconds": 0}, "train_seconds is 0, below 1e-09"),
        ({"format": 2}, "has format 2; a newer stepformer wrote it"),
        ({"status": "diverged"}, "status is 'diverged', not one of 'finished'"),
        ({"val_loss": 1.7}, "do not end with the loss in result.json"),
        ({"steps": 70}, "do not end with the loss in result.json"),
    ],
)
def test_damaged_results(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    folder = write_run(tmp_path, "a", 1, 2.0, **change)
    with pytest.raises(InputError, match=sentence) as raised:
        RunRecord.load(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_and_cut_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no run folder"):
        RunRecord.load(tmp_path / "none")
    folder = write_run(tmp_path, "a", 1, 2.0)
    result = folder / "result.json"
    whole = json.loads(result.read_text())
    del whole["pairing"]
    write_json(result, whole)
    with pytest.raises(InputError, match="pairing is missing"):
        RunRecord.load(folder)
    result.write_text(json.dumps(whole | {"val_loss": float("nan")}))
    with pytest.raises(InputError, match="is damaged: it is not valid JSON"):
        RunRecord.load(folder)
    result.write_text(json.dumps(whole)[:50])
    with pytest.raises(InputError, match="is damaged: it is not valid JSON"):
        RunRecord.load(folder)
    result.write_text("[1]")
    with pytest.raises(InputError, match="not a JSON object"):
        RunRecord.load(folder)
    result.unlink()
    with pytest.raises(InputError, match="There is no result of a finished run"):
        RunRecord.load(folder)


def test_damaged_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 1, 2.0)
    path = folder / "metrics.jsonl"
    whole = RunRecord.load(folder)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines)[:-20])  # the last evaluation is cut: the result has it
    assert RunRecord.load(folder) == whole
    path.write_bytes(b"".join(lines) + b'{"kind": "train", "note": "\xc3')
    assert RunRecord.load(folder) == whole
    path.write_bytes(b"".join([*lines[:2], b'{"kind": "ev\n', *lines[2:]]))
    with pytest.raises(InputError, match=r"damaged: line 3 is damaged"):
        RunRecord.load(folder)
    path.write_bytes(b"".join([lines[0], b"3\n", *lines[1:]]))
    with pytest.raises(InputError, match=r"damaged: line 2 is damaged"):
        RunRecord.load(folder)
    path.write_bytes(b"".join([lines[0], b'{"kind": "eval", "step": 5, "tokens": 500}\n', *lines[1:]]))
    with pytest.raises(InputError, match=r"damaged in line 2: val_loss is missing"):
        RunRecord.load(folder)
    path.write_bytes(b"".join(line for line in lines if b'"train"' in line))
    with pytest.raises(InputError, match="has no evaluation"):
        RunRecord.load(folder)
    path.unlink()
    with pytest.raises(InputError, match="There is no metrics file"):
        RunRecord.load(folder)


def test_what_oracles_say_about_themselves_is_no_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 1, 2.0)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"kind": "eval"', '"kind": "eval", "capped_rows": 0.25, "of_a_plugin": 3'))
    assert RunRecord.load(folder).val_loss == 2.0


def test_a_resumed_run_counts_its_later_evaluations(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 1, 2.0)
    whole = RunRecord.load(folder)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lost = json.dumps({"kind": "eval", "step": 50, "tokens": 5000, "val_loss": 9.0, "seconds": 1.0}) + "\n"
    path.write_text("".join([*lines[:9], lost, *lines[9:]]))
    assert RunRecord.load(folder) == whole


def printed(comparison: Comparison, width: int = 120) -> str:
    out = Console(width=width, file=io.StringIO(), highlight=False)
    out.print(comparison.table.rich(width))
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_terminal_table(tmp_path: Path) -> None:
    text = printed(three(tmp_path))
    row = next(line for line in text.splitlines() if line.startswith("yurii"))
    for part in ("1.9033 ± 0.0117", "-0.1000 [-0.1124, -0.0876]", "better", "95.2%", "1.00 x", "1,000"):
        assert part in row
    assert "1 of 3" in text
    flat = " ".join(text.split())
    for part in (
        "6,144 tokens of split 0123456789ab",
        "seeds 42, 43, 44",
        "95% confidence",
        "entropy of the validation text: 3.5",
    ):
        assert part in flat
    assert max(map(len, text.splitlines())) <= 120
    narrow = printed(three(tmp_path / "narrow"), 80)
    assert max(map(len, narrow.splitlines())) <= 80
    for part in ("difference ", "-0.1000", "[-0.1124, -0.0876]", "1.9033", "± 0.0117"):
        assert part in narrow


def test_markdown_has_equal_columns(tmp_path: Path) -> None:
    text = three(tmp_path).table.markdown()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert len({len(line) for line in table}) == 1
    assert {line.count("|") for line in table} == {12}
    for part in ("6,144 tokens of split 0123456789ab", "seeds 42, 43, 44", "95% confidence"):
        assert part in text
    odd = compare(runs(tmp_path / "odd", {"a|b": {1: 2.0}, "x_y *z*": {1: 1.9}}), "a|b")
    assert "a\\|b" in odd.table.markdown()
    assert "x\\_y \\*z\\*" in odd.table.markdown()


def test_csv_reads_back(tmp_path: Path) -> None:
    comparison = compare(runs(tmp_path, {"a, b": {1: 2.0, 2: 2.1}, 'k="1"\n[red]': {1: 1.9, 2: 2.2}}), "a, b")
    rows = list(csv.DictReader(io.StringIO(comparison.details.csv())))
    assert [row["architecture"] for row in rows] == ["a, b", 'k="1"\n[red]']
    difference = comparison.rows[1].difference
    assert difference is not None
    for name, value in (("difference", difference.mean), ("difference_low", difference.low)):
        assert float(rows[1][name]) == pytest.approx(value, abs=2e-6)  # six decimals
    assert rows[1]["difference"][0] in "+-"
    assert rows[0]["difference"] == ""
    for row in rows:
        assert (row["val_tokens"], row["val_hash"]) == ("6144", comparison.val_hash)
        assert (row["seeds"], row["confidence"]) == ("1 2", "0.95")
    assert "[red]" in printed(comparison)


def test_one_seed_everywhere(tmp_path: Path) -> None:
    comparison = compare(runs(tmp_path, {"a": {1: 2.0}, "b": {1: 1.9}}), "a")
    assert comparison.rows[1].verdict == "one seed: no interval"
    text = comparison.table.markdown()
    assert "one seed: no interval" in text
    assert "±" not in text.split("\n", 1)[1]
    row = list(csv.DictReader(io.StringIO(comparison.details.csv())))[1]
    assert (row["difference"], row["difference_low"], row["loss_standard_error"]) == ("-0.100000", "", "")
    plot_comparison(comparison, tmp_path / "plot.png")
    assert picture_size(tmp_path / "plot.png")


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, every chunk's checksum verified."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, kinds = 8, []
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        chunk = data[position + 4 : position + 8 + length]
        assert zlib.crc32(chunk) == struct.unpack(">I", data[position + 8 + length : position + 12 + length])[0]
        kinds.append(chunk[:4])
        position += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    return struct.unpack(">II", data[16:24])


def test_plot(tmp_path: Path) -> None:
    pyplot_before = "matplotlib.pyplot" in sys.modules
    plot_comparison(three(tmp_path), tmp_path / "new" / "plot.png")
    width, height = picture_size(tmp_path / "new" / "plot.png")
    assert 1000 < width < 2500
    assert 500 < height < 1500
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plot.png"]


def test_what_is_said_below_a_picture_fits_under_it() -> None:
    for inches in (4.0, 6.5, 11.0):
        figure = new_figure((inches, 3.0))
        words = "evaluated on 92,160 tokens of the second half (f20c031d7e8d) of split 0e9f8cbc95ad; seeds 50, 51, 52"
        say_below(figure, f"{words}; unigram entropy 7.114\nthe rows also differ in {words}")
        box = next(text for text in figure.texts if "second half" in text.get_text()).get_window_extent()
        assert 0.6 * inches * figure.dpi < box.width < inches * figure.dpi


def test_a_picture_names_intervals_that_its_dots_hide(tmp_path: Path) -> None:
    (beside,) = draw_comparison(three(tmp_path)).axes[1].child_axes
    names = [label.get_text().replace(MINUS, "-") for label in beside.get_yticklabels()]
    number = r"[+-]0\.\d{4}"
    assert [bool(re.match(rf"{number} \[{number}, {number}\]\n", name)) for name in names] == [True, True]


def test_a_picture_says_what_it_leaves_out(tmp_path: Path) -> None:
    comparison = three(tmp_path)
    assert draw_comparison(comparison).axes[0].get_ylabel() == "nats per token (fall from chance cut off)"
    few = [dataclasses.replace(row, records=[_ends(record) for record in row.records]) for row in comparison.rows]
    whole = dataclasses.replace(comparison, rows=tuple(few))
    assert draw_comparison(whole).axes[0].get_ylabel() == "nats per token"


def _ends(record: RunRecord) -> RunRecord:
    return dataclasses.replace(record, curve=(record.curve[0], record.curve[-1]))


def test_a_picture_is_what_its_name_says(tmp_path: Path) -> None:
    for name, begins in (("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a.PNG", b"\x89PNG"), ("a", b"\x89PNG")):
        for _ in range(2):
            figure = new_figure((1, 1))
            figure.text(0.5, 0.5, "x")
            before = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b""
            save_figure(figure, tmp_path / name)
            assert (tmp_path / name).read_bytes().startswith(begins)
        assert name == "a.svg" or (tmp_path / name).read_bytes() == before  # an SVG draws names of its own
    assert b"/Type3" not in (tmp_path / "a.pdf").read_bytes()  # journals refuse such letters
    with pytest.raises(InputError, match="pictures are written as png, pdf, svg"):
        save_figure(new_figure((1, 1)), tmp_path / "a.jpg")


def test_plot_of_odd_comparisons(tmp_path: Path) -> None:
    plot_comparison(compare(runs(tmp_path / "1", {"a": {1: 2.0}}), "a"), tmp_path / "alone.png")
    plot_comparison(compare(runs(tmp_path / "2", {"$a": {1: 2.0}, "_b_$^": {1: 2.0}}), "$a"), tmp_path / "odd.png")
    plot_comparison(compare(runs(tmp_path / "3", {"a": {1: 4.0}, "b": {1: 4.0}}), "a"), tmp_path / "flat.png")
    plot_comparison(
        compare(runs(tmp_path / "4", {"a" * 90: {1: 4.0}, "b " * 45: {1: 3.0}}), "a" * 90), tmp_path / "long.png"
    )
    for name in ("alone", "odd", "flat", "long"):
        assert picture_size(tmp_path / f"{name}.png")


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = three(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(StepformerError, match=r"pip install 'stepformer\[plot\]'"):
        plot_comparison(comparison, tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()
