"""Texts that nothing was chosen by: every run is evaluated on them once."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runs import make_corpus
from stepformer.base.errors import InputError
from stepformer.base.files import write_json
from stepformer.cli import main
from stepformer.data import open_source
from stepformer.data.prepare import prepare
from stepformer.measure.evaluation import Reading, measure_texts, open_text, perplexity
from stepformer.measure.measured import Journal
from stepformer.study import Facts, compare, load_records
from stepformer.study.held_out import HeldOut, evaluate_held_out
from stepformer.study.records import by_label
from stepformer.study.statistics import paired
from stepformer.training import load_run
from stepformer.training.stopping import Watch

LABELS = ("vanilla", "yurii")
SMALL = ["n_layer=1", "n_head=2", "d_model=16", "context=16", "batch=4", "eval_tokens=256", "device=cpu", "steps=4"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A file, tokens and a prepared corpus."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "letters.txt").write_text("The old lighthouse keeper wrote a letter every evening.\n" * 20)
    (folder / "tokens_val.bin").write_bytes(b"".join((n % 256).to_bytes(2, "little") for n in range(500)))
    other = make_corpus(folder / "others", count=6, dialect="space").folder
    return [str(folder / "letters.txt"), str(folder / "tokens_val.bin"), str(other)]


@pytest.fixture(scope="module")
def done(corpus: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "s"
    assert main([*asked(out, corpus), *(word for text in texts for word in ("--held-out", text))]) == 0
    return out


def asked(out: Path, corpus: Path) -> list[str]:
    return ["compare", "vanilla", "yurii", "--seeds", "2", "--out", str(out), "--quiet", f"corpus={corpus}", *SMALL]


def test_the_table_has_the_losses_of_final_weights(done: Path, texts: list[str]) -> None:
    rows = list(csv.DictReader((done / "comparison.csv").read_text().splitlines()))
    markdown = (done / "comparison.md").read_text()
    for where in texts:
        losses: dict[str, dict[int, float]] = {"vanilla": {}, "yurii": {}}
        for label, seed in ((label, seed) for label in losses for seed in (42, 43)):
            run = load_run(done / f"{label}-s{seed}", "last", "cpu")
            text = open_text(where, run.tokenizer)
            (entry,) = measure_texts(run, [text], Reading(), quiet=True)["texts"]
            losses[label][seed] = entry["nats"]
        difference = paired(losses["vanilla"], losses["yurii"])
        key = f"held_out_{text.name}_"
        for row in rows:
            shown = [float(word) for word in row[f"{key}loss_by_seed"].split()]
            assert shown == pytest.approx(list(losses[row["architecture"]].values()), abs=1e-6)
            assert row[f"{key}hash"] == entry["hash"]
            assert int(row[f"{key}tokens"]) == entry["tokens"]
        assert float(rows[1][f"{key}difference"]) == pytest.approx(difference.mean, abs=2e-6)
        assert float(rows[1][f"{key}difference_low"]) == pytest.approx(difference.low, abs=2e-6)
        assert f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]" in markdown
        assert f"{entry['tokens']:,} tokens, hash {entry['hash']}; final weights, evaluated once." in markdown


def test_no_run_is_evaluated_twice(
    done: Path, corpus: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*args: Any, **kwargs: Any) -> float:
        raise AssertionError("evaluated again")

    monkeypatch.setattr(perplexity, "total_nats", never)
    before = (done / "comparison.md").read_text()
    held_out = [word for text in texts for word in ("--held-out", text)]
    assert main([*asked(done, corpus), *held_out]) == 0
    assert (done / "comparison.md").read_text() == before
    runs = [str(done / f"{label}-s{seed}") for label in ("yurii", "vanilla") for seed in (42, 43)]
    other = str(done.parent / "other")
    assert main(["compare", "--runs", *runs, "--baseline", "vanilla", "--out", other, *held_out]) == 0
    assert "Held-out text letters" in capsys.readouterr().out


@pytest.mark.usefixtures("few_charts")
def test_a_report_has_what_was_found(done: Path, corpus: Path, tmp_path: Path) -> None:
    assert main(["report", str(done), "--out", str(tmp_path / "r"), "--no-samples", "--quiet"]) == 0
    _, part = (done / "comparison.md").read_text().split("Held-out text letters:")
    rows = [line for line in part.split("Held-out text")[0].splitlines() if line.startswith("| yurii")]
    assert rows
    said = (tmp_path / "r" / "report.md").read_text()
    assert rows[0] in said
    assert "Not measured: downstream tasks" in said
    assert "Not measured: perplexity on other texts" not in said
    assert "without compiling" in said.split("## All runs")[0]  # one time is not the other
    assert "of all training steps, also those that compile" in said.split("## All runs")[1]
    assert "Held-out text letters:" in (tmp_path / "r" / "index.html").read_text()
    latex = (tmp_path / "r" / "comparison.tex").read_text()
    first, letters, *others = latex.split(r"\end{table}")
    paired = r"Differences are to vanilla, paired by seed, with 95\% confidence intervals (Student's t).}"
    about = rf"\caption{{vanilla and yurii on {corpus.name}. "
    assert re.search(
        rf"{re.escape(about)}Loss in nats .* after training on 256 tokens; seeds 42, 43\. {re.escape(paired)}", first
    )
    assert f"{about}Held-out text letters: " in letters
    assert f"evaluated once. Loss in nats per token; seeds 42, 43. {paired}" in letters
    assert re.findall(r"\\label\{(.*)\}", latex) == [f"tab:comparison-{number}" for number in (1, 2, 3, 4)]
    assert latex.count("Differences are to vanilla") == len(others) + 1 == 4  # in captions, and not in the notes again
    assert "held_out_letters_loss" in (tmp_path / "r" / "comparison.csv").read_text()


def test_runs_may_be_a_study(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--runs", str(done), "--out", str(tmp_path), "--quiet"]) == 0
    rows = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    assert [(row["architecture"], row["seeds"]) for row in rows] == [("vanilla", "42 43"), ("yurii", "42 43")]
    assert "Parameters against those of vanilla: yurii +" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("word", "why"), [("steps=2", "their budgets are"), ("lr=0.5", "The rows differ in optim.lr")])
def test_runs_that_cannot_be_compared_are_refused_before_they_are_evaluated(
    done: Path,
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    word: str,
    why: str,
) -> None:
    other = str(tmp_path / "other")
    assert main(["train", "yurii", f"corpus={corpus}", *SMALL, word, "--out", other, "--label", "b", "--quiet"]) == 0

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr("stepformer.cli.compare.evaluate_held_out", never)
    runs = ["--runs", str(done / "vanilla-s42"), other]
    assert main(["compare", *runs, "--held-out", texts[0], "--out", str(tmp_path / "o"), "--quiet"]) == 2
    assert why in capsys.readouterr().err


def test_a_text_that_runs_were_evaluated_on_stays_in_their_table(done: Path, corpus: Path, tmp_path: Path) -> None:
    """To leave it out would be a choice; what is new beside them was not evaluated, and that is said."""
    new = str(tmp_path / "hb-s42")
    assert main(["train", "hb", f"corpus={corpus}", *SMALL, "--out", new, "--label", "hb", "--quiet"]) == 0
    assert main(["compare", "--runs", str(done), new, "--out", str(tmp_path / "o"), "--quiet"]) == 0
    said = (tmp_path / "o" / "comparison.md").read_text()
    held_out = [part.split("Held-out text")[0] for part in said.split("Held-out text letters: ")[1:]]
    assert len(held_out) == 1
    assert "Not evaluated on it: hb-s42;" in held_out[0]
    assert said.count("Not evaluated on it") == said.count("Held-out text") == 3
    (row,) = [line for line in held_out[0].splitlines() if line.startswith("| yurii")]
    assert row.split("|")[3] in (done / "comparison.md").read_text().split("Held-out text letters: ")[1]


def test_sizes_are_told_where_no_equal_baseline_was_compared(done: Path) -> None:
    """A study's matched baselines are those of its own baseline."""
    records = load_records(done / f"{label}-s{seed}" for label in LABELS for seed in (42, 43))
    facts = Facts(baseline="vanilla", matches={"yurii": ("parameters", "vanilla-parameters-of-yurii")})
    for baseline, other in (("yurii", "vanilla -"), ("vanilla", "yurii +")):  # whose wider baseline is not there
        said = compare(records, baseline, facts=facts).remarks
        assert any(remark.startswith(f"Parameters against those of {baseline}: {other}") for remark in said)
    wider = [replace(record, label=facts.matches["yurii"][1]) for record in records if record.label == "yurii"]
    assert not any(
        "Parameters against" in remark for remark in compare([*records, *wider], "vanilla", facts=facts).remarks
    )


def test_what_was_tuned_for_other_rows_is_not_told(done: Path, tmp_path: Path) -> None:
    study = tmp_path / "s"
    shutil.copytree(done, study)
    plan = json.loads((study / "study.json").read_text())
    plan["facts"]["remarks"] = ["vanilla: tuned to lr 1.", "yurii: tuned to lr 2."]
    write_json(study / "study.json", {key: value for key, value in plan.items() if key != "checksum"})
    runs = [str(study / f"vanilla-s{seed}") for seed in (42, 43)]
    assert main(["compare", "--runs", *runs, "--out", str(tmp_path / "o"), "--quiet"]) == 0
    said = (tmp_path / "o" / "comparison.md").read_text()
    assert "vanilla: tuned" in said
    assert "yurii: tuned" not in said


def test_few_tokens_are_told(done: Path) -> None:
    entries = json.loads((done / "vanilla-s42" / "measured" / "held-out.json").read_text())["result"]["texts"]
    for tokens, told in ((384, True), (9_999, True), (10_000, False)):
        runs = by_label(load_records(done / f"{label}-s{seed}" for label in LABELS for seed in (42, 43)), "vanilla")
        entry = {**entries[0], "tokens": tokens}
        text = HeldOut("letters", {run.folder: entry for seeds in runs.values() for run in seeds.values()})
        notes = " ".join(text.rows(runs, "vanilla", 0.95, {}).notes)
        assert (f"{tokens:,} tokens are few (under 10,000): the intervals are over seeds alone" in notes) == told


def test_weights_that_are_gone_are_told(
    done: Path, corpus: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "s"
    shutil.copytree(done, study)
    shutil.rmtree(study / "yurii-s43" / "measured")
    shutil.rmtree(study / "yurii-s43" / "checkpoints")
    shutil.rmtree(study / "yurii-s42" / "checkpoints")  # it was evaluated before
    assert main([*asked(study, corpus), "--held-out", texts[0]]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "yurii-s43 is not evaluated on letters: The last checkpoint of" in said
    row = list(csv.DictReader((study / "comparison.csv").read_text().splitlines()))[1]
    assert row["held_out_letters_loss_by_seed"].endswith(" nan")
    assert row["held_out_letters_difference_low"] == ""  # one pair
    # another text under the same name is another text
    changed = tmp_path / "letters.txt"
    changed.write_text("Another letter was never written.\n" * 20)
    assert main([*asked(study, corpus), "--held-out", str(changed)]) == 0
    kept = json.loads((study / "vanilla-s42" / "measured" / "held-out.json").read_text())["result"]["texts"]
    assert [entry["name"] for entry in kept].count("letters") == 2


def test_the_time_limit_holds_for_texts_too(
    done: Path,
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = tmp_path / "s"
    shutil.copytree(done, study)
    shutil.rmtree(study / "vanilla-s43" / "measured")
    assert main([*asked(study, corpus), "--held-out", texts[0], "--max-time", "0"]) == 142
    said = "out of time; 2 of 4 runs are evaluated on the held-out texts. The same command continues."
    assert said in capsys.readouterr().err
    pieces: list[str] = []
    original = Journal.get

    def get(self: Journal, name: str, compute: Any) -> Any:
        pieces.append(name) if name not in self.pieces else None
        return original(self, name, compute)

    monkeypatch.setattr(Journal, "get", get)
    with monkeypatch.context() as patch:  # in the middle of the text
        patch.setattr(Watch, "asked", lambda self: int(signal.SIGALRM) if len(pieces) == 2 else 0)
        assert main([*asked(study, corpus), "--held-out", texts[0]]) == 142
    assert main([*asked(study, corpus), "--held-out", texts[0]]) == 0
    assert len(pieces) == len(set(pieces)) > 2  # those that were kept are not computed again
    assert (study / "comparison.md").read_text().count("Held-out text letters") == 1


def test_text_that_the_runs_have_seen_is_refused(
    done: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = "is a part of the corpus that the runs train on or are validated on"
    assert main([*asked(tmp_path / "no", corpus), "--held-out", str(corpus)]) == 2
    assert f"--held-out {corpus} {seen}" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["compare", "--runs", str(done), "--out", str(tmp_path / "o"), "--held-out", str(corpus)]) == 2
    assert seen in capsys.readouterr().err
    own = tmp_path / "own"
    own.mkdir()
    for number in range(3):
        (own / f"{number}.txt").write_text(f"Letter {number} was written in the evening of a long day.\n" * 30)
    prepared = prepare(open_source(str(own)), "bytes", tmp_path / "prepared", val_fraction=0.3, workers=1).folder
    for text in (own, own / "1.txt"):
        assert main([*asked(tmp_path / "no", prepared), "--held-out", str(text)]) == 2
        assert f"--held-out {text} {seen}" in capsys.readouterr().err
    # a run that began with the weights of one that was trained on it has seen it, too
    first, then, small = str(tmp_path / "first"), str(tmp_path / "then"), [*SMALL, "--quiet"]
    assert main(["train", "vanilla", f"corpus={prepared}", "--out", first, *small]) == 0
    assert main(["train", "vanilla", f"corpus={corpus}", f"init={first}", "--out", then, *small]) == 0
    capsys.readouterr()
    for runs in (then, str(done / "vanilla-s42")), (str(done / "vanilla-s42"), then):
        with pytest.raises(InputError, match=f"{own / '1.txt'} {seen}"):
            evaluate_held_out(list(map(Path, runs)), [str(own / "1.txt")])
    (tmp_path / "twin.toml").write_text('[model]\npreset = "vanilla"\n')
    begun = ["compare", "vanilla", str(tmp_path / "twin.toml"), f"corpus={corpus}", f"init={first}", *small]
    assert main([*begun, "--dry-run", "--out", str(tmp_path / "no"), "--held-out", str(own / "1.txt")]) == 2
    assert seen in capsys.readouterr().err
    assert main(["eval", then, "--on", str(own / "1.txt"), "--quiet"]) == 0
    assert f"note: the run was trained or validated on {own / '1.txt'}\n" in capsys.readouterr().err
    (tmp_path / "1.txt").write_text("Another text under the same name. " * 10)
    dry = [*asked(tmp_path / "no", prepared), "--dry-run"]
    assert main([*dry, "--held-out", str(tmp_path / "1.txt")]) == 0
    assert "When all are finished, they are evaluated once on" in capsys.readouterr().out


def test_rows_of_equal_size_are_compared_on_the_text_too(corpus: Path, texts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "s"
    assert main([*asked(out, corpus), "--match", "parameters", "--held-out", texts[0]]) == 0
    found = {row["architecture"]: row for row in csv.DictReader((out / "comparison.csv").read_text().splitlines())}
    larger = found["yurii"]["matched_with"]
    assert larger not in ("", "vanilla")
    shown = [found[label]["held_out_letters_loss_by_seed"].split() for label in (larger, "yurii")]
    difference = paired(*(dict(enumerate(map(float, words))) for words in shown))
    assert float(found["yurii"]["held_out_letters_matched_difference"]) == pytest.approx(difference.mean, abs=2e-6)
    assert float(found["yurii"]["held_out_letters_matched_high"]) == pytest.approx(difference.high, abs=1e-5)
    _, part = (out / "comparison.md").read_text().split("Held-out text letters:")
    assert f"at equal tokens; at equal parameters {difference.verdict}" in part
    assert f"yurii to {larger}, which has equal parameters: {difference.mean:+.4f}" in part
    assert ("* yurii: a difference under" in part) == (" * |" in part)


def test_texts_that_cannot_be_read_are_refused_before_training(
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    twin = tmp_path / "letters.txt"
    twin.write_text("words " * 50)
    short = tmp_path / "short.txt"
    short.write_text("words")
    for given, sentence in (
        (["nothing.txt"], "There is no file or folder"),
        ([texts[0], str(twin)], "Two held-out texts are called 'letters'"),
        ([str(short)], "too few for one block of 16"),
    ):
        held_out = [word for text in given for word in ("--held-out", text)]
        assert main([*asked(tmp_path / "no", corpus), *held_out]) == 2
        assert sentence in capsys.readouterr().err
        assert not (tmp_path / "no").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*asked(tmp_path / "no", corpus), "--held-out", texts[0]]) == 2
