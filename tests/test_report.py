"""Reports: what is gathered from runs, the paper's files, and the page as a browser shows it."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import math
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser import open_browser, watched
from runs import make_corpus, small_run
from stepformer import measured
from stepformer.cli import main
from stepformer.comparing import RunRecord, compare, load_records
from stepformer.comparing.study import carry_out, plan
from stepformer.errors import InputError
from stepformer.reports import samples as sampling
from stepformer.reports.collect import Curve, Gathered, RunData, gather, mean_curve, read_run, smoothed, thinned
from stepformer.reports.contents import Report, build, verdict
from stepformer.reports.folder import refuse_foreign
from stepformer.reports.page import _looks, page_html, script_json
from stepformer.reports.paper import files_of, look, markdown_report, write_paper
from stepformer.reports.samples import Drawing, Samples, default_prompts
from stepformer.reports.tables import Cell, Table, columns, latex, markdown
from stepformer.training import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("vanilla", "yurii", "tmm")
LIMIT = 5_000_000  # bytes of a page
HOSTILE = "</script><img src=x onerror='window.harmed=1'><b>\u2028&\"'`${1}{{data}}"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three architectures with two seeds each, really trained."""
    root = tmp_path_factory.mktemp("reports")
    data = make_corpus(root / "tales-bytes").folder
    variants = {name: small_run(data, name) for name in NAMES}
    runs = plan(root / "study", variants, [42, 43], quiet=True)
    assert not carry_out(runs, jobs=1, quiet=True).failed
    return root / "study"


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


def copied(study: Path, target: Path, name: str = "yurii-s42") -> Path:
    return Path(shutil.copytree(study / name, target / name))


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def report_of(*folders: Path, **settings: Any) -> Report:
    return build(gather(folders), **settings)


def measurements(layers: int = 2) -> dict[str, dict[str, Any]]:
    """One result of every kind, by the schemas of the commands that make them."""
    values = [3.0 * math.exp(-k / 4) for k in range(12)]
    part = {"singular_values": values, "sigma_max": 3.0, "spread": 15.6, "stable_rank": 2.5, "rms_gain": 1.1}
    part |= {"k": 12, "converged": False}
    reach = [-1.0, -0.5, 0.0, 0.5, 1.0]
    summary = {"persistence": 0.8, "mean_spread": 15.6, "max_spread": 16.0, "mean_stable_rank": 2.5}
    return {
        "hessian": {
            "loss": 2.5,
            "parameters": 1000,
            "tokens": 4096,
            "eigenvalues": [{"value": 20.0 - k, "residual": 1e-3, "converged": k < 3} for k in range(4)],
            "trace": {"mean": 310.5, "standard_error": 12.0, "std": 100.0, "probes": 64},
            "trace_per_parameter": 0.31,
            "curve": {"alpha": reach, "loss": [2.5 + a * a for a in reach], "range": 1.0, "normalise": "tensor"},
            "surface": {"alpha": reach, "loss": [[2.5 + a * a + b for b in reach] for a in reach], "range": 3.0},
        },
        "jacobian": {
            "layers": [{"layer": i, "block": part, "oracle": None, "joint": part} for i in range(layers)],
            "summary": {"block": summary, "joint": summary},
        },
        "depth": {
            "layers": [
                {
                    "layer": i,
                    "coefficients": {"mu_attn": 0.9 - 0.1 * i, "r[0]": 0.1, "r[1]": 0.3},
                    "norms": {"x": 1.0 + i, "v": 0.5},
                    "update_norm": 0.3,
                    "entropy": [1.0, 2.0],
                    "cosine": 0.9,
                    "readout_loss": 3.0 - i,
                    "energy": -1.0,
                    "capped_rows": 0.0,
                }
                for i in range(layers)
            ],
            "start": {"norms": {"x": 0.5}},
        },
        "perplexity": {
            "texts": [{"name": "tales", "mode": "blocks", "nats": 2.5, "perplexity": 12.182, "tokens": 512}],
            "mean_perplexity": 12.182,
        },
        "tasks": {"tasks": {"choice": {"shots": 0, "items": 40, "acc": 0.325, "acc_stderr": 0.074}}},
    }


def with_measurements(folder: Path) -> Path:
    for kind, result in measurements().items():
        measured.save(folder, kind, step=12, settings={}, result=result)
    return folder


# Curves


def curve_of(losses: list[float]) -> Curve:
    steps = list(range(1, len(losses) + 1))
    return Curve(steps, [32 * step for step in steps], [0.5 * step for step in steps], losses)


def test_smoothing_keeps_straight_lines_and_narrows_noise() -> None:
    line = curve_of([5.0 - 0.001 * i for i in range(1000)])
    assert smoothed(line, 1000).window == 21
    for got, wanted in zip(smoothed(line, 1000).loss[:-10], line.loss, strict=False):
        assert got == pytest.approx(wanted, abs=1e-9)  # sums of a thousand numbers of size 5 in double precision
    rng = random.Random(0)
    noise = smoothed(curve_of([rng.gauss(0, 1) for _ in range(10_000)]), 10_000)
    spread = math.sqrt(sum(v * v for v in noise.loss) / len(noise))
    assert spread == pytest.approx(1 / math.sqrt(noise.window), rel=0.15)  # a mean of independent values


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
    rng = random.Random(1)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            loss = 2 + 3 / step + rng.gauss(0, 0.05)
            line = {"kind": "train", "step": step, "tokens": 128 * step, "seconds": 0.013 * step, "loss": loss}
            file.write(json.dumps(line) + "\n")
            if step % 50 == 0:
                entry = {"kind": "eval", "step": step, "tokens": 128 * step, "seconds": 0.0, "val_loss": loss}
                file.write(json.dumps(entry) + "\n")
    changed(folder / "result.json", steps=lines, tokens=128 * lines, val_loss=loss, best_val_loss=2.0, best_step=lines)
    return folder


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
    assert "yurii s42: 1 damaged lines of its metrics.jsonl are left out." in notes
    assert "yurii s42: Its model could not be asked: the run has no checkpoint." in notes
    assert "tmm s42: Failed after step 12 of 12: Training stopped in step 13: the loss is 99." in notes
    assert "is damaged: it is not valid JSON" in notes
    assert "has format 99; this stepformer reads format 1" in notes
    states = {row[0].text + row[1].text: row[2] for row in report.tables["runs"].rows}
    assert {name: cell.text for name, cell in states.items()} == {
        "vanilla42": "finished",
        "yurii42": "unfinished",
        "tmm42": "failed after step 12 of 12",
        "yurii43": "damaged",
    }
    assert report.verdict == "Only vanilla was trained: there is nothing to compare it with."
    assert "unfinished" in page_html(report)


def test_planned_runs_that_were_not_begun_are_named(study: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(study, tmp_path / "study"))
    shutil.rmtree(moved / "tmm-s43")
    report = report_of(moved)
    assert f"Planned in '{moved}' and not begun: tmm-s43." in report.notes
    assert report.comparison
    assert report.comparison.rows[2].seeds == (42,)


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


def test_a_folder_of_runs_is_refused_with_a_hint(study: Path, tmp_path: Path) -> None:
    copied(study, tmp_path)
    with pytest.raises(InputError, match=r"It holds runs: name them, e\.g\. '.*yurii-s42'"):
        gather([tmp_path])


def test_a_run_without_corpus_and_history_is_shown(study: Path, tmp_path: Path) -> None:
    """As one that was imported is: weights, a config, and nothing else."""
    folder = copied(study, tmp_path)
    changed(folder / "run.json", corpus=None, label="", id=None)
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
    with pytest.raises(InputError, match="is damaged: it does not list its runs"):
        gather([tmp_path])


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
        train_seconds=1.0, tokens_per_second=100.0, parameters=10, unigram_entropy=None, weights_sha256="w",
        curve=((0, 4.0), (100, loss)),
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


# Parts


def test_published_figures_come_with_their_caveats(study: Path, tmp_path: Path) -> None:
    folder = copied(study, tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    facts["config"]["recipe"] = "yuriiformer-tinystories"
    (folder / "run.json").write_text(json.dumps(facts))
    report = report_of(folder)
    (table,) = report.published
    assert report.runs[0].record
    assert [cell.text for cell in table.rows[0][:5]] == [
        "yurii", "1.0780", f"{report.runs[0].record.best_val_loss:.4f}", "1.0900",
        f"{report.runs[0].record.val_loss:.4f}",
    ]  # fmt: skip
    notes = " ".join(table.notes)
    assert "best validation loss" in notes
    assert "Not the published setting, so not a reproduction: " in notes
    assert "model.n_layer 2 instead of 12" in notes
    assert "163,812,168 parameters" in notes
    assert "Published figures" in page_html(report)


def with_recipe(folder: Path, name: str, tokenizer: str = "gpt2") -> Path:
    facts = json.loads((folder / "run.json").read_text())
    facts["config"]["recipe"] = name
    facts["corpus"]["tokenizer"]["name"] = tokenizer
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def like_the_paper(folder: Path, shift: float = 0.0) -> str:
    """Measurements of the quantities that a recipe has published values of; returns the run's id."""
    found = measurements()
    found["hessian"]["curve"] |= {"alpha": [-0.5, 0.0, 0.5], "range": 8.0 + shift}
    for layer in found["jacobian"]["layers"]:
        layer["block"] = {**layer["block"], "k": 64}
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
    found["tasks"] = {"tasks": {"hellaswag@10": entry, "hellaswag@0": entry, "arc_easy@0": entry}}
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
    assert losses.rows[0][1].text == "2.9413"
    assert {cells[0].text for cells in found.rows} == {"yurii"}
    assert [[cell.text for cell in (*cells[1:5], cells[6])] for cells in found.rows] == [
        ["HellaSwag, acc_norm as a fraction", "0.3158", "0.255", "2", "200 of 10,042 items"],
        ["trace of the Hessian per parameter", "0.0001394", "0.31", "2", "4,096 tokens"],
        ["eigenvalue of largest magnitude", "167.7", "20", "2", "4,096 tokens"],
        ["range of the loss curve", "8.54", "8.005", "2", "4,096 tokens"],
        ["persistence, sum of log sigma_64 of the blocks", "10.35", "0.8", "2", "2 layers"],
        ["forgetting", "0.6735", "0.5", "1", "9 steps, a -> b"],
        ["perplexity of WikiText", "51.78", "90", "2", "512 tokens, blocks"],
        ["perplexity of WikiText", "51.78", "80", "2", "600 tokens, sliding 8"],
        ["mean perplexity of the three", "44.08", "100", "2", "blocks"],
    ]  # fmt: skip
    notes = " ".join(found.notes)
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


def measured_as(folder: Path, **results: dict[str, Any]) -> Path:
    """A run with one result of every kind, changed in the fields that are given for a kind."""
    for kind, result in measurements().items():
        measured.save(folder, kind, step=12, settings={}, result=result | results.get(kind, {}))
    return folder


def windows(digest: str, tokens: int = 4096, **settings: Any) -> dict[str, Any]:
    return {"windows_hash": digest, "tokens": tokens, "settings": settings}


def test_runs_that_were_not_measured_alike_are_named(study: Path, tmp_path: Path) -> None:
    ours, legacy = windows("aaaabbbbcccc", protocol="ours"), windows("aaaabbbbcccc", protocol="legacy")
    few = measurements()["jacobian"]
    for layer in few["layers"]:
        layer["block"] = {**layer["block"], "k": 4}
    text = {"name": "tales", "mode": "blocks", "perplexity": 9.0, "tokens": 512, "hash": "1234"}
    one, two, three = (copied(study, tmp_path, name) for name in ("vanilla-s42", "yurii-s42", "tmm-s42"))
    measured_as(one, hessian=ours, jacobian=windows("aaaabbbbcccc"), depth=windows("a"), perplexity={"texts": [text]})
    measured_as(two, hessian=ours, jacobian=few | windows("aaaabbbbcccc"), depth=windows("a"))
    other = {"tasks": {"choice@0": {"task": "choice", "shots": 0, "items": 20, "acc": 0.5}}}
    changed_text = {"texts": [text | {"hash": "5678"}]}
    measured_as(
        three, hessian=legacy, jacobian=windows("d", 99), depth=windows("b"), perplexity=changed_text, tasks=other
    )
    report = report_of(one, two, three)
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
    report = build(Gathered([run], None, [], []))
    page_html(report)
    markdown_report(report, {})
    return report


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
    (tmp_path / "forgetting.json").write_text('["something else"]')
    assert report_of(tmp_path).forgetting == []


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


# Files for a paper


def test_the_command_writes_page_and_paper(made: Path, study: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert {"index.html", "report.md", "comparison.csv", "comparison.tex", "runs.csv"} <= names
    assert {"curves.png", "differences.png", "coefficients.png"} <= names
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


def test_pictures_of_everything(study: Path, tmp_path: Path) -> None:
    report = report_of(with_measurements(copied(study, tmp_path)))
    written = {path.name for path in write_paper(report, tmp_path / "out")}
    assert {"curves.png", "coefficients.png", "depth.png", "jacobian.png", "hessian.png"} <= written


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
    foreign.rename(tmp_path / "kept")
    for _ in range(2):  # a report is written over by the next one
        assert main(["report", str(study), "--out", str(tmp_path), "--no-samples", "--quiet"]) == 0
    assert (tmp_path / "kept").read_text().startswith("# mine")
    assert (tmp_path / "notes.txt").read_text() == "mine too"
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
    assert "| x\\|y \\<i>\\* | 50% & $1 |" in markdown(table)
    assert r"x|y \textless{}i\textgreater{}* & 50\% \& \$1 \\" in latex(table)
    assert r"a\_b & n \\" in latex(table)


# Hostile words


def hostile_report(study: Path, root: Path) -> Report:
    folder = copied(study, root)
    changed(folder / "result.json", label=HOSTILE)
    (folder / "environment.json").write_text(json.dumps({"platform": HOSTILE, "command": ["stepformer", HOSTILE]}))
    depth = measurements()["depth"]
    depth["layers"][0]["coefficients"] = {HOSTILE: 1.0}
    measured.save(folder, "depth", step=1, settings={}, result=depth)
    (root / "forgetting.json").write_text(json.dumps({"rows": [{HOSTILE: HOSTILE}]}))
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


def test_words_that_are_no_unicode_do_not_stop_a_report(study: Path, tmp_path: Path) -> None:
    folder = copied(study, tmp_path)
    changed(folder / "result.json", label="x\ud800y")
    (folder / "environment.json").write_text(json.dumps({"platform": "a\udcffb"}))
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
    assert page.locator(".verdict").inner_text() == "No run is finished yet: there are curves, and nothing to compare."
    notes = page.locator("section[aria-labelledby=notes]").inner_text()
    assert "yurii s42: Unfinished: step 0 of 12." in notes
    assert "It has no metrics.jsonl, so there are no curves." in notes
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
