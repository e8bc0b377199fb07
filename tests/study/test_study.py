"""Comparisons and sweeps: paired, resumable, nothing repeated."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stepformer as sf
from real_data import GPT2, TINYSTORIES, needs_gpt2, needs_tinystories
from stepformer.cli import main
from stepformer.study import study
from stepformer.study.study import amount, grid, grid_axes, seeds_of
from stepformer.training.loop import Trainer
from stepformer.training.stopping import Watch


def words(corpus: Path, *more: str) -> list[str]:
    small = ["n_layer=1", "n_head=2", "d_model=16", "context=16", "batch=4", "eval_tokens=256", "device=cpu"]
    return [*small, f"corpus={corpus}", *more]


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that take a step, one entry a step."""
    taken: list[str] = []
    original = Trainer._train_step

    def step(self: Trainer, *args: Any) -> None:
        original(self, *args)
        taken.append(self.folder.path.name)

    monkeypatch.setattr(Trainer, "_train_step", step)
    return taken


def test_compare_trains_pairs_and_repeats_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study"
    command = ["compare", "vanilla", "yurii", "tmm", "--seeds", "2", "--budget", "512", "--out", str(out), "--quiet"]
    command += words(corpus)
    taken = count_steps(monkeypatch)
    with monkeypatch.context() as patch:  # interrupted in the middle of the third run
        patch.setattr(Watch, "asked", lambda self: int(signal.SIGINT) if len(taken) == 20 else 0)
        assert main(command) == 128 + signal.SIGINT
    assert "2 of 6 runs are finished, the rest is saved" in capsys.readouterr().err
    assert taken == ["vanilla-s42"] * 8 + ["yurii-s42"] * 8 + ["tmm-s42"] * 4
    taken.clear()
    assert main(command) == 0
    assert taken == ["tmm-s42"] * 4 + [f"{name}-s43" for name in ("vanilla", "yurii", "tmm") for _ in range(8)]
    printed = capsys.readouterr().out
    assert "yurii" in printed
    assert "95%" in printed.replace("95 %", "95%")
    taken.clear()
    assert main(command) == 0
    assert not taken
    rows = list(csv.DictReader((out / "comparison.csv").read_text().splitlines()))
    assert [row["architecture"] for row in rows] == ["vanilla", "yurii", "tmm"]
    assert (out / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    losses = {
        (label, seed): json.loads((out / f"{label}-s{seed}" / "result.json").read_text())["val_loss"]
        for label in ("vanilla", "yurii")
        for seed in (42, 43)
    }
    by_hand = sum(losses["yurii", seed] - losses["vanilla", seed] for seed in (42, 43)) / 2
    assert float(rows[1]["difference"]) == pytest.approx(by_hand, abs=2e-6)  # six decimals
    # other settings under the same names would not be comparable
    assert main([*command, "lr=0.5"]) == 2
    assert "was trained with other settings, optim.lr (then 0.02, now 0.5)" in capsys.readouterr().err


@pytest.mark.usefixtures("few_charts")
def test_a_failing_run_does_not_stop_the_others(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Trainer._gradients

    def gradients(self: Trainer, t: int) -> torch.Tensor:
        return original(self, t) * (1.0 if self.label == "vanilla" else float("nan"))

    monkeypatch.setattr(Trainer, "_gradients", gradients)
    command = ["compare", "vanilla", "yurii", "--budget", "256", "--out", str(tmp_path / "s"), "--quiet"]
    assert main([*command, *words(corpus)]) == 1
    captured = capsys.readouterr()
    assert "yurii-s42 failed: Training stopped in step 1" in captured.err
    assert "vanilla" in captured.out
    absent = "Not in the table, since they failed or are not finished"
    assert f"{absent}: yurii-s42." in (tmp_path / "s" / "comparison.md").read_text()
    assert main(["report", str(tmp_path / "s"), "--out", str(tmp_path / "r"), "--no-samples", "--quiet"]) == 0
    assert f"\n{absent}: yurii s42.\\par\n" in (tmp_path / "r" / "comparison.tex").read_text()


def test_a_run_that_another_process_finishes_is_in_the_table_and_no_failure(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def elsewhere(*given: Any, label: str, **how: Any) -> None:
        sf.train(*given, label=label, **how)
        if label == "yurii":
            raise sf.StepformerError("Another process is training in it.")

    monkeypatch.setattr(study, "train", elsewhere)
    command = ["compare", "vanilla", "yurii", "--budget", "256", "--out", str(tmp_path / "s"), "--quiet"]
    assert main([*command, *words(corpus)]) == 0
    assert "failed" not in capsys.readouterr().err
    assert "Not in the table" not in (tmp_path / "s" / "comparison.md").read_text()


def test_tables_of_different_runs_have_folders_of_their_own(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["compare", "vanilla", "yurii", "--seeds", "2", "--out", "s", "--quiet", *words(corpus), "steps=2"]) == 0
    )
    for seeds in (["42", "43"], ["42"], ["43", "42"]):
        chosen = [f"s/{name}-s{seed}" for name in ("vanilla", "yurii") for seed in seeds]
        assert main(["compare", "--runs", *chosen, "--quiet"]) == 0
    made = sorted(path.parent.name for path in Path("runs").glob("*/comparison.csv"))
    assert [name[:-7] for name in made] == ["compare-vanilla-yurii"] * 2


@pytest.mark.slow
def test_sweep_over_a_grid_in_processes(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    command = ["sweep", "yurii", "--grid", "lr=0.01,0.02", "--out", str(out), "--jobs", "2", "steps=4"]
    assert main([*command, *words(corpus)]) == 0, capsys.readouterr().err
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == ["lr=0.01-s42", "lr=0.02-s42"]
    for lr in (0.01, 0.02):
        assert json.loads((out / f"lr={lr}-s42" / "run.json").read_text())["config"]["optim"]["lr"] == lr


@pytest.mark.slow
def test_slurm_through_submitit(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """submitit's local executor runs the same jobs that Slurm would get."""
    submitit = pytest.importorskip("submitit")
    assert submitit
    out = tmp_path / "sweep"
    command = ["sweep", "yurii", "--grid", "lr=0.01", "--out", str(out), "steps=2", *words(corpus)]
    assert main([*command, "--slurm", "cluster=local", "timeout_min=5"]) == 0, capsys.readouterr().err
    assert "submitted 1 runs" in capsys.readouterr().out
    deadline = time.monotonic() + 120
    while not (out / "lr=0.01-s42" / "result.json").exists():
        assert time.monotonic() < deadline, [p.read_text()[-2000:] for p in (out / "slurm").glob("*.err")]
        time.sleep(0.2)


@pytest.mark.slow
def test_a_slurm_job_whose_time_is_over_saves_and_goes_on(
    corpus: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What submitit does then: its handler calls `checkpoint()` while the job waits for the run."""
    pytest.importorskip("submitit")
    run = str(tmp_path / "run")
    train = ["train", "yurii", "--out", run, "--quiet", "steps=100000", "eval_every=100000", *words(corpus)]
    script = (
        "import signal, sys\nfrom stepformer.study.study import SlurmRun\n"
        f"job = SlurmRun({run!r}, {train!r})\n"
        "def over(*args):\n    print(job.checkpoint().function.words); sys.stdout.flush(); sys.exit(0)\n"
        "signal.signal(signal.SIGUSR2, over)\njob()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    request.addfinalizer(process.kill)
    metrics = Path(run, "metrics.jsonl")
    deadline = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR2)
    said, _ = process.communicate(timeout=60)
    assert said.strip() == str(["resume", run, "--quiet"])
    assert list(Path(run, "checkpoints").glob("step-*/manifest.json"))


def test_a_signal_while_a_run_finishes_stops_the_study(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = count_steps(monkeypatch)
    monkeypatch.setattr(Watch, "asked", lambda self: int(signal.SIGINT) if len(taken) == 4 else 0)
    command = ["compare", "vanilla", "yurii", "--budget", "256", "--out", str(tmp_path / "s"), "--quiet"]
    assert main([*command, *words(corpus)]) == 130
    assert set(taken) == {"vanilla-s42"}


def test_after_the_time_limit_nothing_is_begun(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken, out = count_steps(monkeypatch), tmp_path / "s"
    command = ["compare", "vanilla", "yurii", "--seeds", "2", "--budget", "256", "--out", str(out), "--quiet"]
    assert main([*command, *words(corpus), "--max-time", "0"]) == 128 + signal.SIGALRM
    assert not taken
    said = "out of time; 0 of 4 runs are finished, the rest is saved. The same command continues."
    assert said in capsys.readouterr().err
    sweep = ["sweep", "yurii", "--grid", "lr=0.01,0.02", "--out", str(tmp_path / "g"), "--quiet", *words(corpus)]
    assert main([*sweep, "--max-time", "0"]) == 128 + signal.SIGALRM
    assert main([*command, *words(corpus), "--max-time", "1h"]) == 0
    assert main([*command, *words(corpus), "--max-time", "0"]) == 0  # all is finished
    assert main([*command, *words(corpus), "--max-time", "1h", "--slurm", "a=1"]) == 2


@pytest.mark.slow
def test_runs_in_processes_save_when_the_time_is_over(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    command = ["sweep", "yurii", "--grid", "lr=0.01,0.02,0.03", "--out", str(out), "--jobs", "2", "--max-time", "40s"]
    assert main([*command, *words(corpus), "steps=1000000", "eval_every=1000000"]) == 142
    assert "out of time; 0 of 3 runs are finished, the rest is saved" in capsys.readouterr().err
    assert len(list(out.glob("lr=*/checkpoints/step-*/manifest.json"))) == 2
    assert not (out / "lr=0.03-s42").exists()
    environment = json.loads((out / "lr=0.01-s42" / "environment.json").read_text())
    assert environment["sharing"] == (2 if torch.cuda.device_count() < 2 else 0)


def test_a_dry_run_says_what_would_be_trained(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s"
    match = ["--match", "parameters", "--tune", "lr=0.5x,1x,2x", "--budget-tune", "256", "--seeds", "2"]
    assert (
        main(["compare", "vanilla", "yurii", *match, "--dry-run", "--out", str(out), *words(corpus), "d_model=64"]) == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "6 runs, 0 of them finished: 3 rows, seeds 42, 43. The baseline is vanilla." in said
    assert re.search(r"Roughly [\d.]+ (s|min) for what is left, one run after the other, from one micro-batch", said)
    assert "All rows: muon, cosine: lr 0.02, " in said
    assert "vanilla-parameters-of-yurii: " in said
    assert "This includes the search: each row is first trained at 3 points of lr, on about 256 tokens each" in said
    turns = ["--tune", "lr=0.5x,1x,2x", "--tune", "lr_norm=1x,2x", "--budget-tune", "256", "--by-turns"]
    assert main(["compare", "vanilla", "yurii", "--dry-run", "--out", str(out), *words(corpus), *turns]) == 0
    said_by_turns = " ".join(capsys.readouterr().out.split())
    assert "each row is first trained by turns at up to 4 points of lr, lr_norm, on about 256 tokens" in said_by_turns
    assert main(["sweep", "yurii", "--grid", "lr=0.01,0.02", "--dry-run", "--out", str(out), *words(corpus)]) == 0
    assert "lr=0.01: muon, cosine: lr 0.01, " in " ".join(capsys.readouterr().out.split())
    assert not out.exists()


def test_a_grid_over_the_budget_lists_losses(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "yurii", "--grid", "steps=2,4", "--out", str(tmp_path / "s"), "--quiet", *words(corpus)]
    assert main(command) == 0
    assert "nothing can be paired" in " ".join(capsys.readouterr().out.split())


def test_a_prepared_file_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that the error names makes the corpus that the run then finds."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("Some words about nothing in particular.\n" * 200)
    small = words(Path("notes.txt"), "steps=2", "tokenizer=bytes")
    assert main(["train", "yurii", "--quiet", *small]) == 2
    assert main(["prepare", "notes.txt", "--tokenizer", "bytes"]) == 0
    assert main(["train", "yurii", "--quiet", *small]) == 0


def test_a_folder_made_of_other_data_is_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file called tinystories.txt gets the folder that recipes look in for the dataset, and is not taken for it."""
    monkeypatch.chdir(tmp_path)
    Path("tinystories.txt").write_text("Once upon a time there was a file.\n" * 200)
    assert main(["prepare", "tinystories.txt", "--tokenizer", "bytes"]) == 0
    assert main(["train", "yurii", "corpus=tinystories", "tokenizer=bytes", "--quiet"]) == 2
    assert "was not made from 'tinystories' but from" in capsys.readouterr().err


def test_amounts_and_seeds() -> None:
    assert [amount(text) for text in ("200k", "5M", "1.5B", "1,000", "77")] == [
        200_000,
        5_000_000,
        1_500_000_000,
        1000,
        77,
    ]
    assert seeds_of("3") == [42, 43, 44]
    assert seeds_of("7,8,11") == [7, 8, 11]
    for text in ("", "many", "0", "-1k"):
        with pytest.raises(sf.InputError, match="number of tokens"):
            amount(text)
    for text in ("", "x", "0"):
        with pytest.raises(sf.InputError, match="are no seeds"):
            seeds_of(text)
    with pytest.raises(sf.InputError, match="The seed 42 stands twice in '42,7,42'"):
        seeds_of("42,7,42")


def test_bad_grids_report_every_point() -> None:
    with pytest.raises(sf.ConfigError) as raised:
        grid("yurii", [], {"lr": ("a", "b")})
    assert [p.split(":")[0] for p in raised.value.problems] == ["lr=a", "lr=b"]
    with pytest.raises(sf.InputError, match="'lr' is no axis"):
        grid_axes(["lr"])


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["compare", "vanilla"], "Name at least two architectures"),
        (["compare", "vanilla", "yuri"], "Did you mean 'yurii'?"),
        (["compare", "vanilla", "yurii", "--baseline", "tmm"], "The baseline 'tmm' is not among vanilla, yurii"),
        (["compare", "vanilla", "yurii", "--budget", "1M", "steps=5"], "Give a budget or steps, not both"),
        (["compare", "vanilla", "vanilla"], "stands twice: a row with settings of its own is a TOML file"),
        (
            ["compare", "vanilla", "modern mlp=relu2"],
            "'modern mlp=relu2' is no setting: a row with settings of its own",
        ),
        (["compare", "vanilla", "my rows/none.toml"], "There is no"),
        (["compare", "vanilla", "yurii", "seed=7"], "Give the seeds with --seeds"),
        (["compare", "vanilla", "yurii", "--budget", "1"], "is less than half a step of 4,096 tokens"),
        (["sweep", "vanilla", "--grid", "seed=1,2"], "Give the seeds with --seeds"),
        (["sweep", "vanilla", "--grid", "lr=,"], "'lr=,' is no axis"),
        (["compare", "vanilla", "yurii", "--seeds", ","], "are no seeds"),
        (["train", "vanilla", "--max-time", ""], "is not a time"),
        (["compare", "--runs", "nowhere"], "There is no run folder 'nowhere'"),
        (["sweep", "vanilla", "yurii", "--grid", "lr=1"], "A sweep is over one NAME"),
        (["train", "yurri"], "Did you mean 'yurii'?"),
        (["train", "yurii", "stepz=3"], "Did you mean 'steps'?"),
        (["train", "yurii", "learning_rate=3"], "Here it is 'lr', the peak rate of the block"),
        (["train", "yurii", "batch_size=3"], "Here it is 'micro_batch', the sequences of one pass"),
        (["train", "yurii", "min_lr=3"], "Here it is 'floor', a fraction"),
        (["train", "yurii", "dtype=bf16"], "Here it is 'precision'"),
        (["train", "yurii", "gradient_accumulation_steps=3"], "Here it is 'batch', the sequences of a whole step"),
        (["train", "momentum-streams-tinystorie"], "Did you mean 'momentum-streams-tinystories'?"),
        (["resume", "nowhere"], "There is no run folder 'nowhere'"),
        (["eval", "nowhere"], "There is no run folder 'nowhere'"),
        (["generate", "nowhere"], "There is no run folder 'nowhere'"),
    ],
)
def test_bad_words_are_sentences(command: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert sentence in capsys.readouterr().err


def test_demo_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "steps=4", "count=300", "batch=4", "eval_every=2", "eval_tokens=1024"]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "runs/demo/comparison.png").stat().st_size > 10_000
    parts = [*(f"{name} continues 'One morning':" for name in ("vanilla", "yurii", "glide")), "difference"]
    assert sorted(parts, key=printed.index) == parts  # texts as soon as there are any
    assert "the unigram entropy of the corpus is" in printed


@pytest.mark.slow
def test_demo_learns_in_four_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo itself. Its training time is that of the machine: four minutes on two free cores."""
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    results = [json.loads(found.read_text()) for found in tmp_path.glob("runs/demo/*-s42/result.json")]
    assert len(results) == 3
    assert all(result["val_loss"] < result["unigram_entropy"] / 2 for result in results)
    with capsys.disabled():
        print(f"\ndemo: {sum(result['train_seconds'] for result in results):.0f} s of training")


def test_train_eval_generate(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["train", "tmm", "--out", run, "--quiet", "--set", "steps=4", *words(corpus, "eval_every=2")]) == 0
    assert "validation loss" in capsys.readouterr().out
    assert main(["eval", run, "--json", "--micro-batch", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = json.loads(Path(run, "result.json").read_text())["best_val_loss"]
    assert found["val_loss"] == pytest.approx(best, abs=1e-6)
    texts = []
    for _ in range(2):
        assert main(["generate", run, "Once upon", "--tokens", "30", "--seed", "3"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("Once upon")
    assert len(texts[0]) > len("Once upon\n")
    assert main(["generate", run, "x" * 17, "--beams", "2"]) == 2
    assert "The prompt has 18 tokens, but the model's context is 16" in capsys.readouterr().err


def test_dry_run(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "yurii", "--dry-run", "--out", str(tmp_path / "run"), *words(corpus, "steps=10")]) == 0
    printed = capsys.readouterr().out
    assert "10 x 64 tokens = 640 tokens" in printed
    for word in ("parameters", "memory", "time", "epochs"):
        assert word in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs_gpt2
@needs_tinystories
def test_real_stories_from_prepare_to_text_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TinyStories with GPT-2's BPE; that the token count is tiktoken's own is tested in test_prepare.py."""
    folder, run = str(tmp_path / "stories"), str(tmp_path / "run")
    command = ["prepare", str(TINYSTORIES), "--tokenizer", f"gpt2:{GPT2}", "--val-field", "in_val_head"]
    assert main([*command, "--out", folder, "--workers", "1"]) == 0
    small = ["n_layer=1", "n_head=2", "d_model=16", "context=64", "batch=4", "eval_tokens=256", "steps=3", "device=cpu"]
    assert main(["train", "yurii", f"corpus={folder}", "--out", run, "--quiet", *small]) == 0
    assert json.loads(Path(run, "run.json").read_text())["config"]["model"]["vocab_size"] == 50_304
    capsys.readouterr()
    assert main(["generate", run, "Once upon a time", "--tokens", "5", "--seed", "0"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time")
