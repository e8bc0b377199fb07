"""What a report gathers from runs: curves, states, the verdict and the text their models write."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draws import shifted
from reported import LIMIT, NAMES, changed, copied, report_of
from stepformer.base.errors import InputError
from stepformer.cli import main
from stepformer.pages.reports import samples as sampling
from stepformer.pages.reports.collect import Curve, gather, mean_curve, smoothed, thinned
from stepformer.pages.reports.contents import build, verdict
from stepformer.pages.reports.page import page_html
from stepformer.pages.reports.paper import write_paper
from stepformer.pages.reports.samples import Drawing, Samples, default_prompts
from stepformer.study import RunRecord, compare, load_records
from stepformer.study.held_out import HeldOut

# Curves


def curve_of(losses: list[float]) -> Curve:
    steps = list(range(1, len(losses) + 1))
    return Curve(steps, [32 * step for step in steps], [0.5 * step for step in steps], losses)


def test_smoothing_keeps_straight_lines_and_narrows_noise() -> None:
    line = curve_of([5.0 - 0.001 * i for i in range(1000)])
    assert smoothed(line, 1000).window == 21
    for got, wanted in zip(smoothed(line, 1000).loss[:-10], line.loss, strict=False):
        assert got == pytest.approx(wanted, abs=1e-9)  # sums of a thousand numbers of size 5 in double precision
    rng = random.Random(shifted(0))
    noise = smoothed(curve_of([rng.gauss(0, 1) for _ in range(10_000)]), 10_000)
    spread = math.sqrt(sum(v * v for v in noise.loss) / len(noise))
    assert spread == pytest.approx(1 / math.sqrt(noise.window), rel=0.45)  # margin: 5 errors of 50 values


def test_thinning_keeps_the_ends_and_the_lowest() -> None:
    losses = [3.0] * 5000
    losses[3333] = 1.0
    thin = thinned(curve_of(losses), 100)
    assert len(thin) <= 100
    assert (thin.step[0], thin.step[-1]) == (1, 5000)
    assert min(thin.loss) == 1.0
    assert thin.tokens[thin.loss.index(1.0)] == 32 * 3334
    assert thinned(curve_of([1.0, 2.0]), 100).loss == [1.0, 2.0]


def test_means_are_of_the_steps_that_all_runs_have() -> None:
    mean = mean_curve([curve_of([4.0, 3.0, 2.0]), curve_of([2.0, 1.0])])
    assert (mean.step, mean.loss) == ([1, 2], [3.0, 2.0])


def long_run(study: Path, target: Path, lines: int) -> Path:
    folder = copied(study, target)
    rng = random.Random(shifted(1))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            loss = 2 + 3 / step + rng.gauss(0, 0.05)
            line = {"kind": "train", "step": step, "tokens": 128 * step, "seconds": 0.013 * step, "loss": loss}
            file.write(json.dumps(line) + "\n")
            if step % 50 == 0:
                entry = {"kind": "eval", "step": step, "tokens": 128 * step, "seconds": 0.0, "val_loss": loss}
                file.write(json.dumps(entry) + "\n")
    ended = {"steps": lines, "tokens": 128 * lines, "val_loss": loss, "best_val_loss": 2.0, "best_step": lines}
    changed(folder / "result.json", **ended, metrics=None)
    return folder


@pytest.mark.slow
def test_a_hundred_thousand_lines_make_a_small_page(study: Path, tmp_path: Path) -> None:
    report = report_of(long_run(study, tmp_path, 100_000))
    run = report.runs[0]
    assert run.record
    assert (run.training.step[-1], len(run.training)) == (100_000, 400)
    assert len(page_html(report).encode()) < 300_000
    # as many points as a hundred such runs would keep together
    report.runs[:] = [dataclasses.replace(run, seed=seed) for seed in range(100)]
    assert len(page_html(report).encode()) < LIMIT


# Gathering


def test_every_run_of_a_study_is_gathered(study: Path) -> None:
    found = gather([study, study / "tmm-s43"])  # a run that is named twice counts once
    assert [run.name for run in found.runs] == [f"{name} s{seed}" for seed in (42, 43) for name in NAMES]
    run = found.runs[1]
    assert run.record
    assert run.record == load_records([study / "yurii-s42"])[0]
    assert run.evaluation.step == [0, 4, 8, 12]
    assert run.evaluation.loss[-1] == pytest.approx(run.record.val_loss)
    assert run.settings["model.template"] == "nesterov"


def test_the_baseline_is_the_one_of_the_studys_table(study: Path, tmp_path: Path) -> None:
    assert report_of(study).labels == ["vanilla", "yurii", "tmm"]
    moved = Path(shutil.copytree(study, tmp_path / "study"))
    (moved / "comparison.csv").write_text("architecture,baseline\ntmm,tmm\n")
    assert report_of(moved).labels[0] == "tmm"
    assert report_of(moved, baseline="yurii").labels[0] == "yurii"


def test_unfinished_failed_and_damaged_runs_are_taken_with_a_sentence(study: Path, tmp_path: Path) -> None:
    unfinished, failed = copied(study, tmp_path, "yurii-s42"), copied(study, tmp_path, "tmm-s42")
    damaged, whole = copied(study, tmp_path, "yurii-s43"), copied(study, tmp_path, "vanilla-s42")
    for folder in (unfinished, failed):
        (folder / "result.json").unlink()
    (failed / "failed.txt").write_text("Training stopped in step 13:\nthe loss is 99.\n")
    (damaged / "result.json").write_text("{")
    with (unfinished / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"kind": "train", "st')
    shutil.rmtree(unfinished / "checkpoints")
    (whole / "measured").mkdir()
    (whole / "measured" / "depth.json").write_text('{"format": 99}')
    gathered = gather([whole, unfinished, failed, damaged])
    sampling.ask_models(gathered.runs, None, tmp_path / "cache", device="cpu")
    report = build(gathered)
    notes = "\n".join(report.notes)
    assert "yurii s42: Unfinished: step 12 of 12." in notes
    assert "yurii s42: Its metrics.jsonl is damaged: line 21 is damaged." in notes
    assert "yurii s42: Its model could not be asked: the run has no checkpoint." in notes
    assert "tmm s42: Failed after step 12 of 12: Training stopped in step 13: the loss is 99." in notes
    assert "is damaged: it is not valid JSON" in notes
    assert "has format 99; a newer stepformer wrote it" in notes
    states = {row[0].text + row[1].text: row[2] for row in report.tables["runs"].rows}
    assert {name: cell.text for name, cell in states.items()} == {
        "vanilla42": "finished",
        "yurii42": "unfinished",
        "tmm42": "failed after step 12 of 12",
        "yurii43": "damaged",
    }
    assert report.verdict == "Only vanilla has finished runs: there is nothing to compare it with."
    assert "unfinished" in page_html(report)


def test_planned_runs_that_were_not_begun_are_named(study: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(study, tmp_path / "study"))
    shutil.rmtree(moved / "tmm-s43")
    report = report_of(moved)
    assert f"Planned in '{moved}' and not begun: tmm-s43." in report.notes
    assert report.comparison
    assert report.comparison.rows[2].seeds == (42,)


def test_runs_that_a_plan_does_not_have_are_named(study: Path, tmp_path: Path) -> None:
    """Another comparison into the same folder plans other rows, and those of the first lie there still."""
    moved = Path(shutil.copytree(study, tmp_path / "study"))
    plan = json.loads((moved / "study.json").read_text())
    every = plan["runs"]
    del plan["checksum"]
    plan["runs"] = [run for run in every if run["label"] != "tmm"]
    (moved / "study.json").write_text(json.dumps(plan))
    assert f"In '{moved}' and not planned there, so left out: tmm-s42, tmm-s43." in report_of(moved).notes
    plan["runs"] = [{**run, "label": "hb"} for run in every]
    (moved / "study.json").write_text(json.dumps(plan))
    with pytest.raises(InputError, match=r"study.json' plans has begun. Runs of another plan lie in .*tmm-s42'\.$"):
        report_of(moved)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "There is no run or study folder 'nowhere'."),
        (["{root}"], "is neither a run (no run.json) nor a study (no study.json)."),
        (["{study}/tmm-s42/checkpoints"], "is neither a run"),
        (["{study}", "--baseline", "yuri"], "No run is labelled 'yuri', the baseline. Did you mean 'yurii'?"),
        (["{study}", "--confidence", "2"], "--confidence 2.0 should lie between 0 and 1."),
        (["{study}", "--tokens", "0"], "--tokens 0 should be at least 1."),
        (["{study}", "--temperature", "-1"], "--temperature -1.0 should be 0 or more."),
        (["{study}", "--prompt", "a", "--no-samples"], "give one of them"),
        (["{study}", "--out", "{study}/tmm-s42"], "is a run's folder: name another"),
        (["{study}", "--out", "{study}/study.json"], "is a file: name a folder."),
    ],
)
def test_wrong_input_is_answered_with_one_sentence(
    study: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    given = [word.format(study=study, root=study.parent) for word in words]
    assert main(["report", "--quiet", *given]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_folder_of_a_table_alone_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "comparison.csv").touch()
    with pytest.raises(InputError, match="It holds a table of runs that lie elsewhere: name those"):
        gather([tmp_path])


def test_a_folder_of_runs_is_refused_with_a_hint(study: Path, tmp_path: Path) -> None:
    copied(study, tmp_path)
    with pytest.raises(InputError, match=r"It holds runs: name them, e\.g\. '.*yurii-s42'"):
        gather([tmp_path])


def test_a_run_without_corpus_and_history_is_shown(study: Path, tmp_path: Path) -> None:
    """As one that was imported is: weights, a config, and nothing else."""
    folder = copied(study, tmp_path)
    changed(folder / "run.json", corpus=None, label=None)
    for name in ("result.json", "metrics.jsonl", "environment.json"):
        (folder / name).unlink()
    gathered = gather([folder])
    samples = Samples(*default_prompts(gathered.runs)[:1], Drawing(tokens=3))
    sampling.ask_models(gathered.runs, samples, tmp_path / "cache", device="cpu")
    report = build(gathered, samples=samples)
    assert report.labels == ["yurii-s42"]
    assert samples.prompts == [""]
    assert report.charts["coefficients"]
    assert "A new document" in page_html(report)
    (folder / "run.json").write_text("[]")
    with pytest.raises(InputError, match=r"is damaged: it is not an? (JSON )?object"):
        gather([folder])


def test_an_empty_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"format": 1, "runs": [{"label": "a", "seed": 1}]}')
    with pytest.raises(InputError, match="No run has been started in"):
        gather([tmp_path])
    (tmp_path / "study.json").write_text('{"format": 1, "runs": [3]}')
    with pytest.raises(InputError, match=r"is damaged: runs\[0\] is 3, not an object"):
        gather([tmp_path])


@pytest.mark.usefixtures("few_charts")
def test_runs_that_cannot_be_paired_have_losses_and_no_differences(study: Path, tmp_path: Path) -> None:
    other = copied(study, tmp_path)
    changed(other / "result.json", pairing="other batches")
    report = report_of(study / "vanilla-s42", other)
    assert report.comparison is None
    assert "the same seed gives them different batches" in report.verdict
    written = {path.name for path in write_paper(report, tmp_path / "out")}
    assert "comparison.csv" not in written
    assert "runs.csv" in written
    page = page_html(report)
    assert "These runs cannot be paired" in page
    assert 'class="forest"' not in page


def test_runs_of_one_label_and_seed_are_told_apart(study: Path, tmp_path: Path) -> None:
    other = copied(study, tmp_path / "slower")
    report = report_of(study, other)
    assert report.labels == ["vanilla", "yurii (study)", "tmm", "yurii (slower)"]
    assert report.comparison
    assert [row.seeds for row in report.comparison.rows] == [(42, 43), (42, 43), (42, 43), (42,)]
    beside = Path(shutil.copytree(other, other.parent / "again"))
    assert report_of(other, beside).labels == ["yurii (yurii-s42)", "yurii (again)"]


# The verdict


def record(label: str, seed: int, loss: float) -> RunRecord:
    return RunRecord(
        folder=Path(f"{label}-{seed}"), label=label, title=label, preset="", seed=seed, config_hash="c", pairing="p",
        steps=10, tokens=100, val_loss=loss, best_val_loss=loss, best_step=10, val_tokens=64, val_hash="h",
        train_seconds=1.0, tokens_per_second=100.0, parameters=10, unigram_entropy=None, weights_sha256=label,
        curve=((0, 4.0), (100, loss)), settings={},
    )  # fmt: skip


def verdict_of(**losses: dict[int, float]) -> str:
    return verdict(compare([record(label, s, loss) for label, by in losses.items() for s, loss in by.items()], "base"))


def test_the_verdict_says_what_the_intervals_show() -> None:
    base = {1: 2.0, 2: 2.1, 3: 2.2}
    lower, much_lower = (
        {s: v - 0.1 - 0.001 * s for s, v in base.items()},
        {s: v - 0.2 - 0.001 * s for s, v in base.items()},
    )
    higher, noisy = {s: v + 0.1 + 0.001 * s for s, v in base.items()}, {1: 2.5, 2: 1.7, 3: 2.3}
    said = verdict_of(base=base, a=lower, b=much_lower, c=higher, d=noisy)
    # -0.202 +- 4.3027 * 0.001 / sqrt(3)
    assert said.startswith(
        "b ends at a lower loss than base: −0.2020 nats per token, 95% confidence interval [−0.2045, −0.1995], "  # noqa: RUF001
        "3 paired seeds. So does a. c ends at a higher loss than base: +0.1020"
    )
    # 0.0667 +- 4.3027 * 0.4509 / sqrt(3)
    assert said.endswith(
        "For d no difference to base is shown (3 seeds: the interval is wide and reaches from −1.0535 to +1.1868)."  # noqa: RUF001
    )


def test_intervals_without_a_difference_are_told_for_each_architecture() -> None:
    base = dict.fromkeys(range(4), 2.0)
    said = verdict_of(base=base, a={0: 2.5, 1: 1.7, 2: 2.3, 3: 1.9}, b={0: 2.5, 1: 1.7})
    # a: 0.1 +- 3.1824 * 0.3651 / 2; b: 0.1 +- 12.7062 * 0.5657 / sqrt(2)
    assert said == (
        "For a and b no difference to base is shown (a, 4 seeds: the interval reaches from −0.4810 to +0.6810; "  # noqa: RUF001
        "b, 2 seeds: the interval is wide and reaches from −4.9825 to +5.1825)."  # noqa: RUF001
    )


def test_the_verdict_claims_nothing_from_one_seed_or_small_differences() -> None:
    assert verdict_of(base={1: 2.0}, a={1: 1.5}) == (
        "One paired seed has no interval and shows nothing yet: a −0.5000 nats per token to base."  # noqa: RUF001
    )
    tiny = {1: 1.9990, 2: 2.0991}
    assert verdict_of(base={1: 2.0, 2: 2.1}, a=tiny) == "a differs by too little to be claimed yet."
    assert verdict_of(base={1: 2.0}, a={2: 1.5}) == "a has no seed in common with base."


def test_the_verdict_says_what_is_the_other_way_round_on_held_out_text() -> None:
    base = {1: 2.0, 2: 2.1, 3: 2.2}
    lower, far = ({s: v - d - 0.001 * s for s, v in base.items()} for d in (0.1, 0.2))
    runs = [record(label, s, v) for label, by in (("base", base), ("a", lower), ("b", far)) for s, v in by.items()]

    def told(**by_label: float) -> str:
        text = HeldOut("other.txt")
        for run in runs:
            nats = 3.0 + by_label.get(run.label, 0.0) + 0.001 * run.seed * (run.label == "a")
            text.found[run.folder] = {"nats": nats, "tokens": 20_000, "hash": "h", "precision": "fp32"}
        return verdict(compare(runs, "base", held_out=[text]))

    assert "held-out" not in told(a=-0.1, b=-0.2)
    assert told(a=-0.002, b=-0.2).endswith("On the held-out other.txt no difference is shown for a.")
    # 0.502 +- 4.3027 * 0.001 / sqrt(3)
    assert told(a=0.5, b=-0.2).endswith(
        "On the held-out other.txt it is the other way round: a +0.5020 [+0.4995, +0.5045]."
    )


def test_the_verdict_names_what_else_differs() -> None:
    rates = {"base": {"optim.name": "muon"}, "a": {"optim.name": "adamw"}}
    runs = [replace(record(label, 1, 2.0), settings=settings) for label, settings in rates.items()]
    assert verdict(compare(runs, "base")).endswith(" The rows also differ in optim.name.")


# Text


def test_prompts_are_beginnings_of_validation_texts_that_leave_room(study: Path) -> None:
    runs = gather([study]).runs
    prompts, notes = default_prompts(runs)
    assert len(prompts) == 3
    assert notes == []
    assert all(0 < len(prompt.encode()) <= 16 // 3 for prompt in prompts)
    runs[0].facts["corpus"]["folder"] = "gone"
    assert default_prompts(runs)[0] == [""]


def test_text_is_drawn_once_and_kept(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(tokens: int = 5) -> Samples:
        gathered = gather([study])
        found = Samples(["A", "much too long for the context"], Drawing(tokens, 0.8, 3))
        sampling.ask_models(gathered.runs, found, tmp_path, device="cpu")
        return found

    first = texts()
    assert set(first.texts["A"]) == set(NAMES)
    assert "the prompt has 30 tokens, the context is 16" in first.problems["yurii"]
    loaded: list[Path] = []
    original = sampling.load_run

    def counted(path: Path, **more: Any) -> Any:
        loaded.append(path)
        return original(path, **more)

    monkeypatch.setattr(sampling, "load_run", counted)
    again = texts()
    assert again.texts == first.texts
    assert {path.name for path in loaded} == {f"{name}-s42" for name in NAMES}  # for the prompt that is too long
    assert texts(6).texts["A"] != {}
