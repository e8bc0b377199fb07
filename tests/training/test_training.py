"""The training loop: exact resume, accumulation, evaluation, signals."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forked
import stepformer as sf
from runs import SMALL, go, losses, small_run, stop_after, tensors
from stepformer.cli import main
from stepformer.data.corpus import Corpus
from stepformer.optim import Optimizers
from stepformer.study import RunRecord
from stepformer.training import Stopped, checkpoints, evaluate_run, load_run, resume
from stepformer.training.evaluation import evaluate
from stepformer.training.metrics import read_metrics
from stepformer.training.parallel import LocalBatches, World
from stepformer.training.stopping import seconds

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.name": "adamw", "schedule": "wsd", "decay_start": 8},
        {"sam": "always", "rho": 0.1},
        pytest.param({"sam": "decay", "schedule": "wsd", "decay_start": 6}, marks=pytest.mark.slow),
        pytest.param({"optim.name": "polargrad", "momentum_warmup": 9, "qkv": "split"}, marks=pytest.mark.slow),
        {"batch": 24, "micro_batch": 2, "seed": 3},
    ],
    ids=["muon", "adamw-wsd", "sam", "sawd", "polargrad", "accumulation"],
)
@pytest.mark.parametrize("steps", [[5], pytest.param([1, 7], marks=pytest.mark.slow)], ids=str)
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], steps: list[int]
) -> None:
    whole = go(corpus, tmp_path / "whole", **changes)
    for step in steps:
        halves = tmp_path / f"halves-{step}"
        with monkeypatch.context() as patch:
            stop_after(patch, step)
            with pytest.raises(Stopped) as stopped:
                go(corpus, halves, **changes)
        assert stopped.value.status == 128 + signal.SIGTERM
        assert stopped.value.command == f"stepformer resume {halves}"
        again = resume(halves, quiet=True)
        assert again["weights_sha256"] == whole["weights_sha256"]
        assert (again["val_loss"], again["best_val_loss"]) == (whole["val_loss"], whole["best_val_loss"])
        assert (whole["start_steps"], again["start_steps"]) == (3, min(3, step) + 3)  # of each start
        assert 0 < again["start_seconds"] < again["train_seconds"]
        lines = [
            [(m["kind"], m["step"]) for m in read_metrics(f / "metrics.jsonl") if m["kind"] != "saved"]
            for f in (tmp_path / "whole", halves)
        ]
        assert lines[0] == lines[1]


def test_the_runs_above_stop_in_the_middle_of_epochs_and_cross_their_ends(corpus: Path) -> None:
    blocks = (len(Corpus(corpus).split("train")) - 16) // 16
    assert 7 * 24 < blocks < 12 * 24  # the accumulating run: the second epoch begins after the last stop
    assert blocks % 24  # inside a batch


@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sam", ["off", "always"])
def test_accumulation_changes_nothing(
    corpus: Path, tmp_path: Path, sam: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 x 2 and 2 x 4, also changed in the middle of a run: fp64, 1e-9 (measured 1e-15)."""
    common = {"steps": steps, "batch": 8, "sam": sam, "clip": 0.3, "save_every": steps // 2}
    go(corpus, tmp_path / "a", micro_batch=4, **common)
    go(corpus, tmp_path / "b", micro_batch=2, **common)
    with monkeypatch.context() as patch:
        stop_after(patch, steps // 2 - 1)
        with pytest.raises(Stopped):
            go(corpus, tmp_path / "c", micro_batch=4, **common)
    resume(tmp_path / "c", quiet=True, micro_batch=2)
    for other in ("b", "c"):
        np.testing.assert_allclose(losses(tmp_path / "a"), losses(tmp_path / other), atol=1e-9, rtol=0)
        a, b = tensors(tmp_path / "a"), tensors(tmp_path / other)
        assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-9


def test_clipping_was_active_above(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "a", steps=2)
    norms = [line["grad_norm"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl") if line["kind"] == "train"]
    assert min(norms) > 0.3


@pytest.mark.parametrize("sam", ["off", "always"])
def test_one_step_is_what_the_parts_say(corpus: Path, tmp_path: Path, sam: str) -> None:
    """The loop against its pieces put together by hand: batch, loss, clip, optimizer; with SAM a second gradient."""
    settings = {"steps": 3, "sam": sam, "rho": 0.5, "clip": 0.2}
    config = small_run(corpus, **settings).for_vocabulary(257)
    opened = Corpus(corpus)
    from stepformer.data.batches import Batches

    batches = Batches(opened.split("train"), 16, 8, config.train.seed)
    model = sf.Model(config.model, seed=config.train.seed, dtype=torch.float64)
    optimizers = Optimizers(model, config.optim, 3)
    seen = []
    for t in range(3):
        optimizers.zero_grad()
        loss = model(*batches.batch(t)).loss
        assert loss is not None
        loss.backward()
        if sam == "always":
            before = optimizers.perturb()
            optimizers.zero_grad()
            model(*batches.batch(t)).loss.backward()
            optimizers.restore(before)
        optimizers.clip()
        optimizers.step(t)
        seen.append(loss.item())
    go(corpus, tmp_path / "run", **settings)
    np.testing.assert_allclose(losses(tmp_path / "run"), seen, atol=1e-12)
    trained = tensors(tmp_path / "run")
    assert max(float((trained[n] - p.detach()).abs().max()) for n, p in model.named_parameters()) < 1e-12


def test_a_name_with_settings_is_trained_as_its_config_is(corpus: Path, tmp_path: Path) -> None:
    results = [
        go(corpus, tmp_path / "config", steps=2),
        sf.train("yurii", tmp_path / "name", quiet=True, corpus=str(corpus), **{**SMALL, "steps": 2}),
    ]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


def test_two_architectures_see_the_same_batches(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[torch.Tensor]] = {"vanilla": [], "tmm": []}
    for name, rows in seen.items():
        original = LocalBatches.read

        def reading(self: LocalBatches, t: int, rows: list[torch.Tensor] = rows, original: Any = original) -> Any:
            found = original(self, t)
            rows.append(found[0])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(LocalBatches, "read", reading)
            go(corpus, tmp_path / name, name, steps=4)
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))


def test_evaluation_does_not_depend_on_the_micro_batch(corpus: Path, tmp_path: Path) -> None:
    go(corpus, tmp_path / "run", precision="fp32", steps=4)
    found = [evaluate_run(tmp_path / "run", micro_batch=n)[0] for n in (1, 3, 8)]
    assert len({(f.val_tokens, f.val_hash) for f in found}) == 1
    assert max(abs(f.val_loss - found[0].val_loss) for f in found) < 1e-6


def test_evaluation_is_full_blocks_from_the_first_token(corpus: Path) -> None:
    opened = Corpus(corpus)
    val, config = opened.split("val"), small_run(corpus).for_vocabulary(257)
    model = sf.Model(config.model, seed=1, dtype=torch.float64)
    found = evaluate(model, val, context=16, tokens=100, micro_batch=4, world=ALONE)
    assert found.val_tokens == 96  # six blocks; four tokens are dropped
    by_hand = []
    with torch.no_grad():
        for block in range(6):
            row = torch.from_numpy(val.tokens(16 * block, 16 * block + 17).astype(np.int64))[None]
            by_hand.append(model(row[:, :-1], row[:, 1:]).loss.item())
    assert abs(found.val_loss - np.mean(by_hand)) < 1e-12
    whole = evaluate(model, val, context=16, tokens=10**9, micro_batch=4, world=ALONE)
    assert whole.val_tokens == (len(val) - 1) // 16 * 16
    with pytest.raises(sf.InputError, match="too few for one block of 16"):
        evaluate(model, val, context=16, tokens=15, micro_batch=4, world=ALONE)


def test_the_best_evaluation_is_the_best(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations that go down and up: the lowest one counts, also when the run was stopped after it."""
    from stepformer.training import evaluation

    table = {0: 9.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 3.1, 12: 3.2}
    numbers = iter([*table.values(), 2.0] * 2)  # of each run the last one is of training tokens
    original = evaluation.evaluate

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(original(*args, **kwargs), val_loss=next(numbers))

    monkeypatch.setattr(evaluation, "evaluate", evaluated)
    whole = go(corpus, tmp_path / "whole", eval_every=2)
    assert (whole["best_step"], whole["best_val_loss"]) == (4, 3.0)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stopped):
            go(corpus, tmp_path / "halves", eval_every=2)
    again = resume(tmp_path / "halves", quiet=True)
    assert (again["best_step"], again["best_val_loss"]) == (4, 3.0)
    assert load_run(tmp_path / "halves").step == 4


def test_scion_with_its_own_start_is_no_divergence(corpus: Path, tmp_path: Path) -> None:
    assert go(corpus, tmp_path / "run", **{"optim.name": "scion"}, own_init=True)["steps"] == 12


def test_the_training_loss_is_of_as_many_tokens_as_the_validation_loss(corpus: Path, tmp_path: Path) -> None:
    """Also where the validation split is shorter than `eval_tokens`: more would take longer than a short training."""
    result = go(corpus, tmp_path / "run", eval_tokens=4_000_000)
    assert result["train_tokens"] == result["val_tokens"] < len(Corpus(corpus).split("train")) - 16


def test_one_pass_tells_the_loss_of_the_first_tokens_and_of_all(corpus: Path, tmp_path: Path) -> None:
    """Beginnings of the split that end inside a micro-batch, the whole split and training tokens, each by hand."""
    result = go(corpus, tmp_path / "run", eval_first="112, 20, 4_000_000", eval_whole=True, micro_batch=4)
    run, opened = load_run(tmp_path / "run", "last", "cpu"), Corpus(corpus)

    def by_hand(split: str, tokens: int) -> float:
        losses = []
        with torch.no_grad():
            for block in range(tokens // 16):
                row = torch.from_numpy(opened.split(split).tokens(16 * block, 16 * block + 17).astype(np.int64))[None]
                losses.append(torch.nn.functional.cross_entropy(run.model(row[:, :-1]).logits[0], row[0, 1:]).item())
        return float(np.mean(losses))

    whole = (len(opened.split("val")) - 1) // 16 * 16
    assert result["val_tokens"] == 512 < whole
    assert result["val_loss"] == pytest.approx(by_hand("val", 512), abs=1e-12)
    assert result["first"] == pytest.approx({str(n): by_hand("val", n) for n in (16, 112, whole)}, abs=1e-12)
    assert (result["train_tokens"], result["train_hash"]) == (512, opened.split("train").hash)
    assert result["train_loss"] == pytest.approx(by_hand("train", 512), abs=1e-12)
    lines = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if m["kind"] == "eval"]
    assert [list(m["first"]) for m in lines] == [["16", "112"]] * 4
    record = RunRecord.load(tmp_path / "run")
    assert record.train_loss == result["train_loss"]
    for tokens in (16, 112):
        best = min(m["first"][str(tokens)] for m in lines[1:])
        assert record.first[tokens] == (best, result["first"][str(tokens)])
    assert record.first[whole] == (None, result["first"][str(whole)])
    assert evaluate_run(tmp_path / "run", which="last")[0].first == pytest.approx(lines[-1]["first"], abs=1e-12)
    plain = go(corpus, tmp_path / "plain", micro_batch=4)
    assert plain["weights_sha256"] == result["weights_sha256"]
    assert "first" not in plain


def start(corpus: Path, out: Path, *words: str) -> forked.Running:
    settings = {**{"n_layer": 2, "n_head": 2, "d_model": 16, "context": 16, "batch": 8, "device": "cpu"}}
    command = [
        "train",
        "yurii",
        f"corpus={corpus}",
        *(f"{k}={v}" for k, v in settings.items()),
        "--out",
        str(out),
        *words,
    ]
    return forked.start(*command)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_save_and_say_how_to_go_on(corpus: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(corpus, tmp_path / "run", "steps=100000", "eval_every=100000", "save_every=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.running, process.wait().stderr
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    done = process.wait(60)
    said = done.stderr
    assert done.returncode == 128 + number, said
    assert f"stopped by {number.name}" in said
    assert f"stepformer resume {tmp_path / 'run'}" in said
    steps = [m["step"] for m in read_metrics(metrics)]
    assert checkpoints.verify(next((tmp_path / "run" / "checkpoints").glob("step-*")))["step"] == steps[-1]


def test_max_time(corpus: Path, tmp_path: Path) -> None:
    process = start(corpus, tmp_path / "run", "steps=100000", "eval_every=100000", "--max-time", "1s")
    done = process.wait(100)
    assert done.returncode == 128 + signal.SIGALRM, done.stderr
    assert "out of time after step" in done.stderr
    for text, number in (("90", 90), ("90s", 90), ("1h30m", 5400), ("1.5m", 90), ("2d", 172_800)):
        assert seconds(text) == number
    for text in ("soon", "", ".s", "1h30x", "²"):
        with pytest.raises(sf.StepformerError, match="is not a time"):
            seconds(text)


@pytest.mark.slow
def test_a_compiled_run_is_close_to_the_eager_one(corpus: Path, tmp_path: Path) -> None:
    """inductor on the CPU reorders sums: fp32, twelve steps."""
    eager = go(corpus, tmp_path / "eager", precision="fp32")
    compiled = go(corpus, tmp_path / "compiled", precision="fp32", compile=True)
    assert abs(eager["val_loss"] - compiled["val_loss"]) < 1e-4


def test_what_continues_a_run_with_a_moved_rule_names_its_place(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plugin = tmp_path / "run", tmp_path / "my rule.py"
    plugin.write_text("")
    stop_after(monkeypatch, 2)
    with pytest.raises(Stopped):
        go(corpus, run, steps=6)
    monkeypatch.undo()
    stop_after(monkeypatch, 1)
    assert main(["resume", str(run), "--quiet", "--plugin", str(plugin)]) == 128 + signal.SIGTERM
    assert f"Continue with:\n  stepformer resume {run} --plugin '{plugin}'\n" in capsys.readouterr().err


def test_a_rule_of_ones_own_is_resumed_from_anywhere(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in's path is stored whole, so that another working folder does not matter."""
    (tmp_path / "own.py").write_text(
        "import stepformer as sf\n"
        "from stepformer.rules.first_order import Nesterov\n"
        "@sf.register_template('own-nesterov', equation='as nesterov')\n"
        "class OwnNesterov(Nesterov):\n    pass\n"
    )
    small = ["n_layer=1", "n_head=2", "d_model=16", "context=16", "batch=4", "steps=2", "eval_tokens=256", "device=cpu"]
    for folder, words in (
        (tmp_path, ["train", "own-nesterov", f"corpus={corpus}", "--out", "run", "--plugin", "own.py", *small]),
        (corpus, ["eval", str(tmp_path / "run")]),
    ):
        done = forked.stepformer(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
