"""What the page of `stepformer serve` shows: predictions, pieces of text, a run in training."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from draws import seeded
from helpers import shake, tiny, tokens
from served import metric
from stepformer.base.errors import InputError, StepformerError
from stepformer.data.tokenizers import ByteTokenizer
from stepformer.pages.serving import ServedRun
from stepformer.pages.serving import inspect as inspected
from stepformer.pages.serving.runs import document
from stepformer.pages.serving.watching import Point, Tail, pace, thinned
from stepformer.training.metrics import Metrics

# what the page shows


def test_predictions_are_the_softmax_of_the_logits() -> None:
    model = shake(tiny("yurii", vocab_size=16, real_vocab=11))
    ids = tokens(1, 8, seed=3)[0]
    found = inspected.read(model, ids.tolist())
    with torch.no_grad():
        logp = model(ids[None, :-1]).logits[0].log_softmax(-1)
    assert len(found.predictions) == 7
    for t, prediction in enumerate(found.predictions):
        # the same fp64 operations: equal but for the order of sums, 1e-12 is far above that
        assert prediction.logprob == pytest.approx(logp[t, ids[t + 1]].item(), abs=1e-12)
        naive = -sum(math.exp(v) * v for v in logp[t].tolist())
        assert prediction.entropy == pytest.approx(naive, abs=1e-12)
        order = sorted(range(11), key=lambda i: -logp[t, i].item())
        assert [token for token, _ in prediction.alternatives] == order[:5]
        assert [p for _, p in prediction.alternatives] == pytest.approx([math.exp(logp[t, i]) for i in order[:5]])
        assert prediction.rank == order.index(int(ids[t + 1])) + 1


def test_long_texts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = shake(tiny()), tokens(1, 8)[0].tolist()
    whole = inspected.read(model, ids)
    monkeypatch.setattr(inspected, "ROWS", 3)
    assert inspected.read(model, ids) == whole


def test_a_prediction_of_a_model_that_has_diverged_is_refused() -> None:
    model = tiny()
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    with pytest.raises(StepformerError, match="not finite"):
        inspected.read(model, [1, 2, 3])


def test_differences_and_summary_add_up() -> None:
    first, second = shake(tiny("yurii"), seed=1), shake(tiny("adam", n_layer=1), seed=2)
    ids = tokens(1, 8, seed=1)
    readings = [inspected.read(model, ids[0].tolist()) for model in (first, second)]
    losses = [model(ids[:, :-1], ids[:, 1:]).loss.item() for model in (first, second)]
    found = inspected.summary(readings, size=20)
    for side, loss in zip(found["sides"], losses, strict=True):
        assert side["nats_per_token"] == pytest.approx(loss, abs=1e-12)
        assert side["bits_per_byte"] == pytest.approx(7 * loss / 20 / math.log(2), abs=1e-12)
    apart = inspected.differences(*readings)
    assert math.fsum(apart) == pytest.approx(7 * (losses[1] - losses[0]), abs=1e-11)
    assert found["surer"] == [sum(d > 0 for d in apart), sum(d < 0 for d in apart)]
    assert sum(found["surer"]) + found["even"] == 7
    assert min(found["surer"]) > 0, "a case in which one is always better shows nothing"
    assert inspected.differences(*reversed(readings)) == [-d for d in apart]
    assert inspected.summary([readings[0], readings[0]], 20)["even"] == 7
    assert "surer" not in inspected.summary(readings[:1], 20)


def test_attention_entropy_is_the_mean_over_calls_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    calls = [torch.rand(1, 3, 4, generator=seeded(i)) for i in range(2)]
    monkeypatch.setattr(type(model), "observe", lambda self, tokens: [{"entropy": calls}, {"beta": calls}])
    by_layer = inspected.attention_entropy(model, torch.zeros(1, 4, dtype=torch.long))
    assert by_layer[1] is None
    naive = [sum(float(call[0, head, t]) for call in calls for head in range(3)) / 6 for t in range(4)]
    assert by_layer[0] == pytest.approx(naive)


def test_tokens_for_the_eye() -> None:
    tokenizer = ByteTokenizer()
    assert inspected.token_view(tokenizer, ord("a")) == {"id": 97, "text": "a"}
    assert inspected.token_view(tokenizer, 10) == {"id": 10, "text": "\n"}
    assert inspected.token_view(tokenizer, 0xE2) == {"id": 0xE2, "text": "\\xe2", "escaped": True}
    assert inspected.token_view(tokenizer, 0) == {"id": 0, "text": "\\x00", "escaped": True}
    assert inspected.token_view(tokenizer, tokenizer.eot)["special"] == "end of text"
    assert inspected.token_view(tokenizer, 300)["special"] == "token 300"


def test_pieces_of_a_trained_tokenizer(folder: Path) -> None:
    tokenizer = ServedRun(folder / "bpe").tokenizer
    text = "One morning \N{LEFT DOUBLE QUOTATION MARK}he\N{ZERO WIDTH SPACE} said"
    views = [inspected.token_view(tokenizer, token) for token in tokenizer.encode(text)]
    shown = "".join(view["text"] for view in views)
    assert shown == "One morning \\xe2\\x80\\x9che\\xe2\\x80\\x8b said"
    with pytest.raises(InputError, match="no token -1"):
        tokenizer.piece(-1)


def test_samples_are_documents_of_the_validation_split(folder: Path) -> None:
    run = ServedRun(folder / "yurii")
    run.load()
    found = {run.sample(number, 64) for number in range(12)}
    assert len(found) > 3
    split = run._validation
    assert split is not None
    everything = run.tokenizer.decode(split.tokens(0, len(split)).tolist())
    documents = everything.split("<|endoftext|>")
    for text in found:
        assert len(run.tokenizer.encode(text)) <= 64
        assert any(whole.startswith(text) for whole in documents)
    assert document(split, run.tokenizer, 0, 10**6) == documents[1]


# a run in training


def test_a_growing_file_is_read_once_and_half_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.update() == ([], [])
    path.write_text(metric(0, "eval") + metric(1) + metric(2)[:20])
    train_points, evals = tail.update()
    assert [p.step for p in train_points] == [1]
    assert evals == [Point(0, 4.0, 0.0, 256.0)]
    before = tail._read
    with path.open("a") as file:
        file.write(metric(2)[20:] + metric(3))
    assert [p.step for p in tail.update()[0]] == [1, 2, 3]
    assert tail._read == path.stat().st_size > before
    assert tail.damaged == 0


def test_a_resumed_run_drops_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(metric(step) for step in range(1, 9)))
    tail = Tail(path)
    assert len(tail.update()[0]) == 8
    metrics = Metrics(path, 5)  # what a resumed run does
    assert [p.step for p in tail.update()[0]] == [1, 2, 3, 4, 5]
    metrics.write(**json.loads(metric(6, loss=9.0)))
    metrics.close()
    assert tail.update()[0][-1] == Point(6, 9.0, 3.0, 256.0)
    path.write_text(metric(1))  # cut in place
    assert [p.step for p in tail.update()[0]] == [1]
    path.write_text("".join(metric(step, loss=1.0) for step in range(1, 30)))  # overwritten, and longer than before
    assert {p.loss for p in tail.update()[0]} == {1.0}
    path.unlink()
    assert tail.update() == ([], [])


def test_lines_that_are_no_metrics_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metric(1) + "{nonsense\n" + "[]\n" + metric(2, loss=math.nan) + "\xff\n" + metric(3) + metric(3))
    tail = Tail(path)
    assert [p.step for p in tail.update()[0]] == [1, 3]
    assert tail.damaged == 4


def test_pace_and_thinning() -> None:
    points = [Point(step, float(step), 2.0 * step, 100.0 + step) for step in range(1, 1001)]
    assert pace([]) is None
    assert pace(points[:1]) == (101.0, 2.0)
    slower = [*points, *(Point(1000 + k, 0.0, 2000.0 + 6.0 * k, 50.0) for k in range(1, 31))]
    assert pace(slower) == (50.0, 6.0)
    thin = thinned(points, 100)
    assert len(thin) == 100
    assert thin[0] == (5.5, 5.5)
    assert thinned(points[:3], 100) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_watch_of_finished_begun_and_failed_runs(folder: Path, tmp_path: Path) -> None:
    done = ServedRun(folder / "yurii").progress()
    assert (done["status"], done["step"], done["steps"], done["seconds_left"]) == ("finished", 12, 12, None)
    assert done["last_eval"]["step"] == 12
    lines = [json.loads(line) for line in (folder / "yurii" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["val_loss"] for line in lines if line["kind"] == "eval"}
    assert done["best_eval"]["loss"] == min(loss for step, loss in losses.items() if step)
    assert {c["name"] for c in done["checkpoints"]} == {p.name for p in (folder / "yurii" / "checkpoints").iterdir()}
    assert next(c["loss"] for c in done["checkpoints"] if c["step"] == 12) == losses[12]
    assert ServedRun(folder / "begun").progress()["status"] == "waiting"

    shutil.copytree(folder / "begun", tmp_path / "run")
    run = ServedRun(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(metric(step) for step in range(1, 5)))
    training = run.progress()
    assert (training["status"], training["seconds_left"]) == ("training", pytest.approx(8 * 0.5))
    (tmp_path / "run" / "failed.txt").write_text("Training stopped: the loss is not finite.\n")
    failed = run.progress()
    assert (failed["status"], failed["sentence"]) == ("failed", "Training stopped: the loss is not finite.")
