"""Perplexity: against token-by-token loops, windows against their definition, bytes, batches, journals, bad input."""

from __future__ import annotations

import json
import lzma
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draws import seeded
from helpers import shake, tiny
from real_data import REAL
from runs import make_corpus, small_run
from stepformer.base.errors import InputError
from stepformer.cli import evaluate, main
from stepformer.data.corpus import is_left
from stepformer.data.tokenizers import ByteTokenizer, train_bpe
from stepformer.measure import measured
from stepformer.measure.evaluation.perplexity import Reading, measure_texts, sliding_windows, total_nats
from stepformer.measure.evaluation.scoring import Part, Scorer, final_states
from stepformer.measure.evaluation.texts import (
    OUT_OF_DOMAIN,
    Text,
    as_text,
    count_bytes,
    held_out,
    open_text,
    token_hash,
)
from stepformer.model import Model
from stepformer.training import evaluate_run, load_run, train
from stepformer.training.loading import LoadedRun

EXACT = 1e-11  # two fp64 evaluations of one function in different shapes
CONTEXT = 16
STORY = "One day, a fox named Ü went home. " * 9


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tales"
    make_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "yurii"
    train(small_run(corpus), folder, quiet=True)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> LoadedRun:
    """The trained run in a folder of this test's own."""
    return load_run(shutil.copytree(trained, tmp_path / "run"))


def naive(model: Model, tokens: list[int], begin: int, target: int) -> float:
    """-ln p of one token after those from `begin` on, in a forward pass of its own."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[begin:target]])).logits[0, -1]
    return float(-torch.log_softmax(logits, dim=-1)[tokens[target]])


def story(run: LoadedRun, characters: int = 120) -> Text:
    return as_text("story", [STORY[:characters]], run.tokenizer, "story.txt")


def test_blocks_are_a_loop_over_tokens(run: LoadedRun) -> None:
    text = story(run)
    tokens = text.tokens.tolist()
    found = measure_texts(run, [text], Reading(), quiet=True)["texts"][0]
    blocks = (len(tokens) - 1) // CONTEXT
    each = [naive(run.model, tokens, t // CONTEXT * CONTEXT, t + 1) for t in range(blocks * CONTEXT)]
    assert found["tokens"] == len(each) == blocks * CONTEXT
    assert found["nats"] == pytest.approx(sum(each) / len(each), abs=EXACT)
    assert found["perplexity"] == pytest.approx(math.exp(sum(each) / len(each)), rel=EXACT)
    assert found["bytes"] == len(STORY[:120].encode()[1 : blocks * CONTEXT + 1])
    assert found["bits_per_byte"] == pytest.approx(sum(each) / math.log(2) / found["bytes"], rel=EXACT)


def test_blocks_of_a_corpus_are_what_training_measures(run: LoadedRun, corpus: Path) -> None:
    text = open_text(str(corpus), run.tokenizer)
    found = measure_texts(run, [text], Reading(tokens=500), quiet=True)["texts"][0]
    known, _ = evaluate_run(run.folder.path, tokens=500)
    assert (found["tokens"], found["mode"]) == (known.val_tokens, "blocks")
    assert found["nats"] == pytest.approx(known.val_loss, abs=EXACT)


@pytest.mark.parametrize("stride", [1, 5, 8, 16])
def test_sliding_is_a_loop_over_tokens(run: LoadedRun, stride: int) -> None:
    text = story(run, 60)
    tokens = text.tokens.tolist()
    found = measure_texts(run, [text], Reading(stride=stride), quiet=True)["texts"][0]
    total = 0.0
    for target in range(1, len(tokens)):
        window = 0 if target <= CONTEXT else math.ceil((target - CONTEXT) / stride)  # the first that reaches it
        total += naive(run.model, tokens, window * stride, target)
    assert found["tokens"] == len(tokens) - 1
    assert found["nats"] == pytest.approx(total / (len(tokens) - 1), abs=EXACT)


@pytest.mark.parametrize("limit", [1, 3, 16, 17, 40, 100])
@pytest.mark.parametrize("stride", [1, 3, 7, 16])
def test_every_token_is_scored_once_with_enough_before_it(limit: int, stride: int) -> None:
    scored = []
    for begin, end, count in sliding_windows(limit, CONTEXT, stride):
        assert end - begin <= CONTEXT + 1
        scored += range(end - count, end)
        assert begin == 0 or end - count - begin >= CONTEXT - stride
    assert scored == list(range(1, limit + 1))


def test_tokens_fix_the_count(run: LoadedRun) -> None:
    text = story(run, 300)
    sliding = measure_texts(run, [text], Reading(8, 77), quiet=True)["texts"][0]
    blocks = measure_texts(run, [text], Reading(tokens=77), quiet=True)["texts"][0]
    assert (sliding["tokens"], blocks["tokens"]) == (77, 64)
    assert sliding["hash"] == token_hash(text.tokens[1:78])
    assert sliding["hash"] != blocks["hash"]


def test_random_windows_are_drawn_once(run: LoadedRun) -> None:
    text = story(run, 300)
    first, second = (measure_texts(run, [text], Reading(None, 160, True), quiet=True)["texts"][0] for _ in range(2))
    assert first == second
    assert first["tokens"] == 160
    assert len(Reading(random=True).windows(text, CONTEXT)) == 1600
    with pytest.raises(InputError, match="no stride"):
        Reading(4, random=True)


def test_the_micro_batch_changes_nothing(run: LoadedRun) -> None:
    text = story(run, 300)
    windows = Reading(5).windows(text, CONTEXT)
    found = [total_nats(Scorer(run.model, None, n), text, windows) for n in (1, 3, 8, 100)]
    assert max(found) - min(found) <= EXACT * max(found)


@pytest.mark.parametrize(
    "name",
    ["yurii", "soap", "entropy", "kl-carried", "linear-adam", "presymp-euler", "documents", "softcap", "hybrid"],
)
def test_padding_and_skipped_logits_change_nothing(name: str) -> None:
    """Rows of several lengths, padded, against each alone through the model's own forward pass."""
    special: dict[str, dict[str, Any]] = {
        "linear-adam": {"name": "adam", "attention": "linear"},
        "documents": {"name": "yurii", "document_separator": 0},
        "softcap": {"name": "vanilla", "logit_softcap": 3.0, "embedding_skip": True},
        "hybrid": {"name": "yurii"},
    }
    model = shake(tiny(**special.get(name, {"name": name})))
    if name == "hybrid":
        model = model.hybrid(cutoff=1)
    draw = seeded(0)
    rows = [torch.randint(11, (n,), generator=draw).tolist() for n in (9, 2, 5, 7)]
    parts = [Part(row, count) for row, count in zip(rows, (8, 1, 2, 6), strict=True)]
    for part, score in zip(parts, Scorer(model).score(parts), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([part.row[:-1]])).logits[0, -part.count :]
        expected = torch.log_softmax(logits, dim=-1)
        targets = torch.tensor(part.row[-part.count :])
        assert (score.log_probabilities - expected.gather(1, targets[:, None])[:, 0]).abs().max() <= 1e-10
        assert torch.equal(score.greedy, expected.argmax(dim=-1) == targets)


def test_final_states_lead_to_the_logits() -> None:
    model = shake(tiny("muon"))
    ids = torch.arange(8)[None]
    assert torch.equal(model.head(final_states(model, ids)), model(ids).logits)
    with pytest.raises(InputError, match="context is 8"):
        final_states(model, torch.zeros(1, 9, dtype=torch.long))


def test_parts_that_make_no_sense() -> None:
    scorer = Scorer(tiny())
    for part in (Part([1], 1), Part([1, 2], 2), Part([1, 2], 0)):
        with pytest.raises(InputError, match="cannot have"):
            scorer.score([part])
    with pytest.raises(InputError, match="another tokenizer"):
        scorer.score([Part([1, 99], 1)])
    with pytest.raises(InputError, match="at least 1"):
        Scorer(tiny(), micro_batch=0)


def test_bytes_are_those_of_the_text() -> None:
    texts = ["naïve café → 12 Ω", "plain words and plain words", "\n\ttabs"]
    for tokenizer in (ByteTokenizer(), train_bpe(300, texts * 5)):
        text = as_text("t", texts, tokenizer, "t")
        assert count_bytes(tokenizer, text.tokens) == sum(len(t.encode()) for t in texts)
        assert (text.tokens == tokenizer.eot).sum() == 3


def test_an_interrupted_measurement_continues(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    text, reading = story(run, 300), Reading(stride=2)
    whole = measure_texts(run, [text], reading, quiet=True)
    (run.folder.path / "measured" / "perplexity.json").unlink()
    calls = []
    score = Scorer.score

    def stopping(self: Scorer, parts: Any) -> Any:
        calls.append(len(parts))
        if len(calls) == 9:
            raise KeyboardInterrupt
        return score(self, parts)

    monkeypatch.setattr(Scorer, "score", stopping)
    with pytest.raises(KeyboardInterrupt):
        measure_texts(run, [text], reading, quiet=True)
    assert measured.load(run.folder.path, "perplexity") is None
    journal = run.folder.path / "measured" / "perplexity.jsonl"
    assert len(journal.read_text().splitlines()) == 1 + 2  # four batches of eight are a line
    again = measure_texts(run, [text], reading, quiet=True)
    batches = math.ceil(len(reading.windows(text, CONTEXT)) / 8)
    assert len(calls) == 9 + batches - 8
    assert again == whole
    assert not journal.exists()


def test_results_of_one_checkpoint_stay_together(run: LoadedRun) -> None:
    one, other = story(run), as_text("other", ["word " * 40], run.tokenizer, "other.txt")
    first = measure_texts(run, [one], Reading(), quiet=True)["texts"]
    mean = measure_texts(run, [one, other], Reading(8), mean=True, quiet=True)
    last = measure_texts(run, [one], Reading(), quiet=True)["texts"]
    kept = measured.load(run.folder.path, "perplexity")
    assert kept is not None
    assert first == last
    assert kept["result"]["texts"] == [*mean["texts"], *last]
    assert kept["step"] == run.step
    values = [entry["perplexity"] for entry in mean["texts"]]
    assert kept["result"]["mean_perplexity"] == pytest.approx(sum(values) / 2)
    with torch.no_grad():
        run.model.final_norm.weight.mul_(1.01)  # other weights: nothing of the old ones stays
    measure_texts(run, [one], Reading(8), quiet=True)
    kept = measured.load(run.folder.path, "perplexity", own=False)
    assert kept is not None
    assert [entry["mode"] for entry in kept["result"]["texts"]] == ["sliding"]


def test_texts_from_files(run: LoadedRun, corpus: Path, tmp_path: Path) -> None:
    bytes_of: Callable[[str], list[int]] = run.tokenizer.encode
    eot = run.tokenizer.eot
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo\n")
    with lzma.open(tmp_path / "b.jsonl.xz", "wt") as file:
        file.write('{"body": "eins"}\n{"body": "zwei"}\n')
    text = open_text(str(tmp_path / "a.txt"), run.tokenizer)
    assert text.tokens.tolist() == [*bytes_of("one"), eot, *bytes_of("two"), eot]
    assert (text.name, text.source) == ("a", "a.txt")
    text = open_text(str(tmp_path / "a.txt"), run.tokenizer, document="line", enough=4)
    assert text.tokens.tolist() == [*bytes_of("one"), eot, *bytes_of("<|endoftext|>"), eot]
    text = open_text(str(tmp_path / "b.jsonl.xz"), run.tokenizer, field="body")
    assert text.tokens.tolist() == [*bytes_of("eins"), eot, *bytes_of("zwei"), eot]
    (tmp_path / "ready").mkdir()
    for name, ids in (("train", [7, 8, 9]), ("val", [1, 2, 3, 4])):
        (tmp_path / "ready" / f"{name}.bin").write_bytes(np.array(ids, "<u2").tobytes())
    assert open_text(str(tmp_path / "ready"), run.tokenizer).tokens.tolist() == [1, 2, 3, 4, eot]
    assert open_text(str(tmp_path / "ready" / "train.bin"), run.tokenizer, enough=1).tokens.tolist() == [7, 8]
    (tmp_path / "ready" / "val.bin").unlink()
    with pytest.raises(InputError, match="no tokens of the val split"):
        open_text(str(tmp_path / "ready"), run.tokenizer)
    part = open_text(str(corpus), run.tokenizer, split="train", enough=99)
    assert len(part) == 100
    with pytest.raises(InputError, match="is a run, not a text"):
        open_text(str(run.folder.path), run.tokenizer)
    with pytest.raises(InputError, match="fingerprint"):
        open_text(str(corpus), train_bpe(260, ["a b c"]))
    with pytest.raises(InputError, match=r"no file or folder and no prepared corpus 'nothing\.txt'"):
        open_text("nothing.txt", run.tokenizer)


def test_out_of_domain_texts(run: LoadedRun, tmp_path: Path) -> None:
    for name in ("wikitext", "lambada", "c4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "PROVENANCE.txt").write_text("not this one")
    (tmp_path / "wikitext" / "wiki.txt").write_text(" = Title = \n \n A line .\n\n")
    rows = [{"context": "He said", "continuation": "no"}, {"text": "She said yes"}]
    (tmp_path / "lambada" / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "c4" / "c4.utf8").write_text("first document\nsecond\n")
    texts = [held_out(name, run.tokenizer, tmp_path) for name in OUT_OF_DOMAIN]
    expected = {
        "wikitext": [" = Title = ", " A line ."],
        "lambada": ["He said no", "She said yes"],
        "c4": ["first document", "second"],
    }
    for text, (name, documents) in zip(texts, expected.items(), strict=True):
        assert text.name == name
        assert text.tokens.tolist() == [t for d in documents for t in [*run.tokenizer.encode(d), run.tokenizer.eot]]
    (tmp_path / "lambada" / "l.jsonl").write_text('{"passage": 1}')
    with pytest.raises(InputError, match="neither a text nor a context"):
        held_out("lambada", run.tokenizer, tmp_path)
    (tmp_path / "lambada" / "l.jsonl").unlink()
    with pytest.raises(InputError, match="no text in"):
        held_out("lambada", run.tokenizer, tmp_path)
    with pytest.raises(InputError, match="'wikitext' is not in"):
        held_out("wikitext", run.tokenizer, tmp_path / "c4")


@pytest.mark.skipif(not (REAL / "eval" / "wikitext").is_dir(), reason="needs real texts: set STEPFORMER_DATA")
def test_out_of_domain_texts_that_are_real(run: LoadedRun, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(run.folder.path), "--ood", "--data", str(REAL / "eval"), "--tokens", "512", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["perplexity"]
    assert [entry["name"] for entry in found["texts"]] == ["wikitext", "lambada", "c4"]
    assert all(entry["tokens"] == 512 and entry["bytes"] > 480 for entry in found["texts"])
    values = [entry["perplexity"] for entry in found["texts"]]
    assert found["mean_perplexity"] == pytest.approx(sum(values) / 3)
    whole = [held_out(name, run.tokenizer, REAL / "eval") for name in OUT_OF_DOMAIN]
    raw = (REAL / "eval" / "wikitext" / "wiki.test.raw.noblank.txt").read_bytes()
    assert count_bytes(run.tokenizer, whole[0].tokens) == len(raw.replace(b"\n", b""))
    assert (whole[0].tokens == run.tokenizer.eot).sum() == 2891
    assert (whole[1].tokens == run.tokenizer.eot).sum() == 5153


def test_the_command_prints_and_keeps(run: LoadedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text(STORY)
    assert main(["eval", str(run.folder.path), "--on", str(tmp_path / "book.txt"), "--stride", "8"]) == 0
    printed = capsys.readouterr().out
    assert "book" in printed
    assert "sliding 8" in printed
    assert str(run.folder.path / "measured" / "perplexity.json") in printed
    assert main(["eval", str(run.folder.path)]) == 0
    assert capsys.readouterr().out.startswith("yurii after step 12: loss ")
    assert main(["eval", str(run.folder.path), "--json", "--tokens", "64"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {
        *("val_loss", "val_tokens", "val_hash", "perplexity", "step", "run"),
    }


def test_what_was_measured_before_an_interrupted_part_is_not_measured_again(
    run: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "book.txt").write_text(STORY)
    words = ["eval", str(run.folder.path), "--on", str(tmp_path / "book.txt"), "--tasks", "hellaswag", "--quiet"]
    batches = []
    score = Scorer.score

    def counting(self: Scorer, parts: Any) -> Any:
        batches.append(len(parts))
        return score(self, parts)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scorer, "score", counting)
    monkeypatch.setattr(evaluate, "need", lambda module: None)
    monkeypatch.setattr(evaluate, "downstream", interrupted)
    assert main(words) == 130
    first = list(batches)
    assert first
    monkeypatch.setattr(evaluate, "downstream", lambda *args: {"tasks": {}})
    assert main(words) == 0
    assert batches == first
    assert not (run.folder.path / "measured" / "perplexity.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--stride", "4"], "--stride belongs to a text"),
        (["--document", "line"], "--document belongs to a text"),
        (["--shots", "4"], "--shots belongs to downstream tasks"),
        (["--data", "."], "--data is where"),
        (["--on", "BOOK", "--corpus", "x"], "--corpus is for the validation loss"),
        (["--tasks", "hellaswag", "--tokens", "9"], "a task is shortened with --limit"),
        (["--on", "BOOK", "--stride", "17"], "at most 16, the model's context"),
        (["--on", "BOOK", "--stride", "0"], "should be at least 1"),
        (["--on", "BOOK", "--tokens", "15"], "too few for one block of 16"),
        (["--on", "BOOK", "--micro-batch", "0"], "should be at least 1"),
        (["--ood", "--data", "nowhere"], "no data folder 'nowhere'"),
        (["--on", "nowhere.txt"], "no file or folder and no prepared corpus 'nowhere.txt'"),
    ],
)
def test_bad_words_are_sentences(
    words: list[str],
    sentence: str,
    run: LoadedRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("STEPFORMER_DATA", raising=False)
    (tmp_path / "book.txt").write_text(STORY)
    words = [str(tmp_path / "book.txt") if word == "BOOK" else word for word in words]
    assert main(["eval", str(run.folder.path), *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_folders_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path / "nothing"), "--ood"]) == 2
    assert "There is no run folder" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--on", "x.txt"]) == 2
    assert "is not a run" in capsys.readouterr().err
    (tmp_path / "study.json").write_text("{}")
    assert main(["eval", str(tmp_path)]) == 2
    assert "is a study, not a run: it has no runs yet." in capsys.readouterr().err
    for name in ("a-s1", "b-s1", "c-s1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    assert main(["eval", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    named = " or ".join(f"'{tmp_path / name}'" for name in ("a-s1", "b-s1", "c-s1"))
    assert f"is a study, not a run: name one of its runs, {named}." in said


def test_folders_that_are_no_corpora(run: LoadedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("Not tokens.")
    assert main(["eval", str(run.folder.path), "--corpus", str(tmp_path)]) == 2
    assert "is not a prepared corpus" in capsys.readouterr().err
    (tmp_path / "train-00000.bin").write_bytes(b"\0\0")
    assert main(["eval", str(run.folder.path), "--corpus", str(tmp_path)]) == 2
    assert "was not finished" in capsys.readouterr().err
    assert not is_left(tmp_path)  # for a training these are tokens that somebody brought
    (tmp_path / "tokenizer").mkdir()
    assert main(["train", "glide", f"corpus={tmp_path}", "--out", str(tmp_path / "run")]) == 2
    assert "was not finished (no manifest.json); run stepformer prepare again." in capsys.readouterr().err
    (tmp_path / "tokenizer").rmdir()
    (tmp_path / ".parts").mkdir()
    assert is_left(tmp_path)


def test_an_unfinished_run_is_called_one(run: LoadedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text(STORY)
    words = ["eval", str(run.folder.path)]
    assert main([*words, "--on", str(tmp_path / "book.txt")]) == 0
    assert "after step" not in capsys.readouterr().out
    run.folder.result.rename(tmp_path / "result.json")
    try:
        assert main(words) == 0
        assert capsys.readouterr().out.startswith(f"yurii after step 12 of {run.config.train.steps}, unfinished: loss ")
        early = evaluate.standing(replace(run, step=6))
        assert early.endswith("unfinished, its best weights (--checkpoint last: after step 12)")
        assert main([*words, "--on", str(tmp_path / "book.txt")]) == 0
        assert f"yurii after step 12 of {run.config.train.steps}, unfinished\n" in capsys.readouterr().out
    finally:
        (tmp_path / "result.json").rename(run.folder.result)


def test_weights_of_before_the_end_are_said_to_be(run: LoadedRun) -> None:
    early = evaluate.standing(replace(run, step=6))
    state = "its best weights (--checkpoint last: those of the end)"
    assert early == f"yurii after step 6 of {run.config.train.steps}, {state}"


def test_logits_that_are_not_finite(run: LoadedRun) -> None:
    with torch.no_grad():
        run.model.embed.tok_emb.weight[5] = float("nan")
    with pytest.raises(Exception, match="not finite"):
        measure_texts(run, [story(run)], Reading(), quiet=True)


def test_hashes_do_not_depend_on_the_storage() -> None:
    ids = np.arange(100)
    assert token_hash(ids.astype(np.uint16)) == token_hash(ids) != token_hash(ids[1:])
