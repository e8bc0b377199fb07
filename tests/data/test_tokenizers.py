"""Tokenizers: what they make of text, that they come back from disk the same, and that wrong files are refused."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draws import shifted
from real_data import GPT2, needs_gpt2
from stepformer import StepformerError
from stepformer.data.tokenizers import (
    Tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    make_tokenizer,
    tokenizer_kind,
    tokenizer_name,
    train_bpe,
)

TEXTS = [
    "The cat sat on the mat. The cat's hat was on the mat, too.",
    "Numbers 123 and 4567; don't, we'll, I've!\n\n  indented\tlines \n",
    "naïve café — 日本語 🙂 <|endoftext|> after",
] * 20


def random_text(seed: int, length: int = 120) -> str:
    draw = random.Random(shifted(seed))
    ranges = ((32, 127), (9, 14), (0xA0, 0x2FF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0x1F300, 0x1F64F), (1, 0xD7FF))
    return "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(length))


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_bpe(300, TEXTS)


@pytest.fixture(params=["bytes", "bpe", pytest.param("gpt2", marks=needs_gpt2)])
def tokenizer(request: pytest.FixtureRequest, trained: Tokenizer) -> Tokenizer:
    if request.param == "bpe":
        return trained
    return make_tokenizer(f"gpt2:{GPT2}" if request.param == "gpt2" else "bytes")


def test_round_trip(tokenizer: Tokenizer) -> None:
    for text in ["", " ", *TEXTS[:3], *map(random_text, range(200))]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eot not in ids
    assert tokenizer.encode_batch(TEXTS[:3]) == [tokenizer.encode(text) for text in TEXTS[:3]]


def test_end_of_text_is_never_made_from_text(tokenizer: Tokenizer) -> None:
    text = "one<|endoftext|>two"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"
    assert tokenizer.eot == tokenizer.vocab_size - 1


def test_what_is_no_text_is_replaced(tokenizer: Tokenizer) -> None:
    half = tokenizer._pieces.index(b"\xc3")  # the first of the two bytes of é
    assert tokenizer.decode([*tokenizer.encode("a"), half]) == "a\ufffd"
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t")
    back = load_tokenizer(tmp_path / "t")
    assert back.describe() == tokenizer.describe()
    assert json.loads((tmp_path / "t" / "tokenizer.json").read_text())["fingerprint"] == tokenizer.fingerprint
    for text in TEXTS[:3]:
        assert back.encode(text) == tokenizer.encode(text)


def test_very_long_blanks_and_words(tokenizer: Tokenizer) -> None:
    """tiktoken alone panics on a million spaces before a word."""
    for text in (" " * 1_000_000 + "x", "ab " * 80_000, "\n " * 300_000 + "x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bpe_is_the_one_that_tokenizers_trained(trained: Tokenizer) -> None:
    """We train with one library and apply with another: the ids must be the same."""
    from tokenizers import Tokenizer as Theirs

    data = trained.data
    assert data is not None
    theirs = Theirs.from_str(data)
    for text in [*TEXTS[:3], *map(random_text, range(300))]:
        assert trained.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert trained.vocab_size == 300 == theirs.get_vocab_size() + 1
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0]) / 1.5


def test_bpe_training_is_the_same_in_every_process(trained: Tokenizer) -> None:
    code = f"from stepformer.data.tokenizers import train_bpe; print(train_bpe(300, {TEXTS[:3]!r} * 20).fingerprint)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == trained.fingerprint


def test_a_small_text_gives_a_small_vocabulary() -> None:
    small = train_bpe(5000, ["abab abab"])
    assert small.vocab_size < 270
    assert small.decode([*small.encode("abab"), small.eot]) == "abab<|endoftext|>"


def test_other_training_text_is_another_fingerprint(trained: Tokenizer) -> None:
    assert train_bpe(300, TEXTS[:1] * 40).fingerprint != trained.fingerprint
    assert make_tokenizer("bytes").fingerprint != trained.fingerprint


@needs_gpt2
def test_gpt2_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = make_tokenizer(f"gpt2:{GPT2}")
    assert gpt2.encode("Hello world, once upon a time") == [15496, 995, 11, 1752, 2402, 257, 640]
    assert (gpt2.vocab_size, gpt2.eot) == (50257, 50256)
    for name in ("vocab.bpe", "encoder.json"):  # OpenAI's own two files give the same
        (tmp_path / name).symlink_to(GPT2 / name)
    assert make_tokenizer(f"gpt2:{tmp_path}").fingerprint == gpt2.fingerprint
    assert make_tokenizer(f"gpt2:{GPT2 / 'gpt2.tiktoken'}").fingerprint == gpt2.fingerprint
    monkeypatch.setenv("STEPFORMER_GPT2_BPE", str(tmp_path))
    assert make_tokenizer("gpt2").fingerprint == gpt2.fingerprint
    monkeypatch.delenv("STEPFORMER_GPT2_BPE")
    monkeypatch.setenv("STEPFORMER_DATA", str(GPT2.parent))
    assert make_tokenizer("gpt2").fingerprint == gpt2.fingerprint


@needs_gpt2
def test_the_fast_pattern_cuts_as_the_published_one() -> None:
    import tiktoken

    published = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    gpt2 = gpt2_tokenizer(str(GPT2))
    ranks = dict(zip(gpt2._pieces[:-1], range(50256), strict=True))
    reference = tiktoken.Encoding("published", pat_str=published, mergeable_ranks=ranks, special_tokens={})
    for text in [*TEXTS[:3], *map(random_text, range(300))]:
        assert gpt2.encode(text) == reference.encode_ordinary(text)


@needs_gpt2
def test_a_wrong_gpt2_file_is_refused(tmp_path: Path) -> None:
    lines = (GPT2 / "gpt2.tiktoken").read_text().splitlines()
    first, second = lines[1000].split(), lines[1001].split()
    lines[1000], lines[1001] = f"{second[0]} {first[1]}", f"{first[0]} {second[1]}"
    wrong = tmp_path / "gpt2.tiktoken"
    wrong.write_text("\n".join(lines) + "\n")
    with pytest.raises(StepformerError, match=r"gpt2\.tiktoken' is not the GPT-2 vocabulary: its checksum"):
        make_tokenizer(f"gpt2:{tmp_path}")
    wrong.write_text("hello\n")
    with pytest.raises(StepformerError, match=r"is not the GPT-2 vocabulary"):
        make_tokenizer(f"gpt2:{tmp_path}")
    wrong.unlink()
    (tmp_path / "vocab.bpe").write_bytes((GPT2 / "vocab.bpe").read_bytes()[:-100])
    (tmp_path / "encoder.json").symlink_to(GPT2 / "encoder.json")
    with pytest.raises(StepformerError, match=r"are not the GPT-2 vocabulary"):
        make_tokenizer(f"gpt2:{tmp_path}")
    (tmp_path / "vocab.bpe").unlink()
    with pytest.raises(StepformerError, match=r"There is no GPT-2 vocabulary in .* is needed"):
        make_tokenizer(f"gpt2:{tmp_path}")


def test_without_network_the_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def fail(name: str) -> None:
        raise OSError("no network")

    for name in ("STEPFORMER_GPT2_BPE", "STEPFORMER_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(StepformerError, match=r"could not be downloaded .*gpt2:FOLDER.*STEPFORMER_GPT2_BPE"):
        make_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("bpe", "bpe needs a size, e.g. bpe:1024"),
        ("bpe:", "bpe needs a size"),
        ("bpe:12", "whole number from 257"),
        ("bpe:many", "whole number from 257"),
        ("bytes:3", "takes no argument"),
        ("gtp2", "Did you mean 'gpt2'?"),
    ],
)
def test_bad_specs(spec: str, sentence: str) -> None:
    with pytest.raises(StepformerError, match=re.escape(sentence)):
        tokenizer_kind(spec)


def test_names() -> None:
    assert [tokenizer_name(spec) for spec in ("bytes", "gpt2:/some/where", "bpe:1024")] == ["bytes", "gpt2", "bpe:1024"]
    with pytest.raises(StepformerError, match="trained on a corpus"):
        make_tokenizer("bpe:300")


def test_a_damaged_tokenizer_is_refused(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    data, description = tmp_path / "bpe.json", tmp_path / "tokenizer.json"
    whole, facts = data.read_text(), description.read_text()
    changed = json.loads(whole)
    vocab = changed["model"]["vocab"]
    first, second = list(vocab)[270:272]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    for broken, sentence in (
        (json.dumps(changed), "its fingerprint is"),
        (whole[: len(whole) // 2], "is not a byte-level BPE"),
        ("{}", "is not a byte-level BPE"),
    ):
        data.write_text(broken)
        with pytest.raises(StepformerError, match=sentence):
            load_tokenizer(tmp_path)
    data.unlink()
    with pytest.raises(StepformerError, match=r"There is no tokenizer '.*bpe\.json'"):
        load_tokenizer(tmp_path)
    data.write_text(whole)
    for broken, sentence in (
        (facts[:20], "not valid JSON"),
        ("[]", "it is not a JSON object"),
        (facts.replace('"format": 1', '"format": 2'), "a newer stepformer wrote it"),
    ):
        description.write_text(broken)
        with pytest.raises(StepformerError, match=sentence):
            load_tokenizer(tmp_path)
    description.write_text(facts)
    assert load_tokenizer(tmp_path).fingerprint == trained.fingerprint
