"""Preparation: the same bytes for any number of workers and however often it is stopped; nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from real_data import GPT2, TINYSTORIES, needs_gpt2, needs_tinystories
from runs import go, make_corpus
from stepformer import StepformerError
from stepformer.base import files
from stepformer.base.errors import StepformerWarning
from stepformer.data import Corpus, make_tokenizer, open_source
from stepformer.data.pieces import Progress
from stepformer.training import resume
from texts import tree

module = importlib.import_module("stepformer.data.prepare")
prepare = module.prepare

# Forks one process per fault point, each killed at its point, and restarts it; prints the number of points.
KILL = """
import importlib, os, signal, sys
from pathlib import Path
from stepformer.base import files
from stepformer.data import Corpus, open_source

module = importlib.import_module("stepformer.data.prepare")
module.PIECE_CHARACTERS = 3000
os.fsync = lambda file: None  # a killed process loses nothing that it has written
source, root = open_source(sys.argv[1]), Path(sys.argv[2])


def tree(out):
    paths = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(out)): files.sha256(p) for p in paths}


def run(out, stop=0):
    '''Prepare in a process of its own; returns the signal that ended it, the points passed and the pieces encoded.'''
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        passed, encoded, sync, rename, encode = [], [], files.sync, files.rename, module.pieces.encode

        def point():
            passed.append(1)
            if len(passed) == stop:
                os.kill(os.getpid(), signal.SIGKILL)

        files.sync = lambda file: (point(), sync(file))
        files.rename = lambda a, b: (point(), rename(a, b), point())
        module.pieces.encode = lambda *args: encoded.append(1) or encode(*args)
        module.prepare(source, "bpe:300", out, workers=1, shard_tokens=20_000)
        os.write(writing, f"{len(passed)} {len(encoded)}".encode())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    os.close(writing)
    words = os.read(reading, 100).split()
    os.close(reading)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, [int(word) for word in words]


ended, (points, pieces) = run(root / "whole")
assert ended == 0, ended
whole = tree(root / "whole")
for stop in range(1, points + 1):
    out = root / f"killed-{stop}"
    ended, _ = run(out, stop)
    assert ended == signal.SIGKILL, (stop, ended)
    if (out / "manifest.json").exists():  # the last thing to be written: then all is there
        Corpus(out).verify()
        kept = pieces
    else:
        kept = len(list(out.glob(".parts/[0-9]*.part")))
    ended, (_, encoded) = run(out)
    assert ended == 0, (stop, ended)
    assert tree(out) == whole, (stop, set(tree(out).items()) ^ set(whole.items()))
    assert encoded == pieces - kept, (stop, encoded, pieces, kept)
print(points, pieces)
"""


def write_stories(folder: Path, count: int = 240, parts: int = 2) -> Path:
    for part in range(parts):
        rows = [
            {"text": f"{part}.{i}: the {'big' if i % 2 else 'small'} bear ate {i} pies on day {i % 11}. " * (1 + i % 5)}
            for i in range(count // parts)
        ]
        path = folder / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 3000)
    return open_source(str(write_stories(tmp_path / "in")))


def test_killed_anywhere_and_restarted_it_is_the_same(tmp_path: Path) -> None:
    write_stories(tmp_path / "in", 120)
    done = subprocess.run(
        [sys.executable, "-c", KILL, str(tmp_path / "in"), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    points, pieces = map(int, done.stdout.split())
    assert pieces >= 6
    assert points >= 3 * (pieces + 6)  # parts, state, two tokenizers, shards, manifest


ORPHANS = """
import importlib, multiprocessing, os, signal, sys
from pathlib import Path
from stepformer.base import files
from stepformer.data import open_source

module = importlib.import_module("stepformer.data.prepare")
module.PIECE_CHARACTERS = 3000
rename = files.rename

def stop(a, b):
    rename(a, b)
    if b.name == "000001-000000.part":
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

files.rename = stop
module.prepare(open_source(sys.argv[1]), "bpe:300", Path(sys.argv[2]), workers=2)
"""


@pytest.mark.slow
def test_two_workers_killed_and_finished_by_one(source: Any, tmp_path: Path) -> None:
    """Also: the workers of a killed process go away by themselves, and do not run a script that has no guard."""
    whole = prepare(source, "bpe:300", tmp_path / "whole", workers=1).folder
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    words = [sys.executable, str(script), str(tmp_path / "in"), str(tmp_path / "out")]
    # not pipes: the workers would hold them open; what Python says about semaphores nobody took back is no number
    with (tmp_path / "printed").open("w") as printed, (tmp_path / "complaints").open("w") as complaints:
        done = subprocess.run(words, stdout=printed, stderr=complaints, timeout=120)
    assert done.returncode == -signal.SIGKILL, (tmp_path / "complaints").read_text()
    workers = [int(word) for word in (tmp_path / "printed").read_text().split()]
    assert len(workers) == 2
    limit = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() and running(pid) for pid in workers):
        assert time.monotonic() < limit, "a worker outlived its parent"
        time.sleep(0.1)
    assert list((tmp_path / "out" / ".parts").glob("[0-9]*.part"))
    with pytest.raises(StepformerError, match="was not finished"):
        Corpus(tmp_path / "out")
    assert tree(prepare(source, "bpe:300", tmp_path / "out", workers=1).folder) == tree(whole)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_workers_make_the_same_bytes(source: Any, tmp_path: Path) -> None:
    one = prepare(source, "bytes", tmp_path / "one", workers=1)
    seen: list[Progress] = []
    two = prepare(source, "bytes", tmp_path / "two", workers=2, progress=seen.append)
    assert tree(two.folder) == tree(one.folder)
    counts = [(now.documents, now.tokens) for now in seen if now.stage == "tokenising"]
    assert counts == sorted(counts)
    assert counts[-1] == (240, len(two.split("train")) + len(two.split("val")))


@pytest.mark.slow
def test_a_killed_worker_is_noticed(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = module.pieces.start_workers

    def start(*args: Any) -> Any:
        started.append(real(*args))
        return started[-1]

    def kill_one(progress: Progress) -> None:
        if started and progress.documents:
            for pid in list(started[0]._processes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(module.pieces, "start_workers", start)
    with pytest.raises(StepformerError, match=r"A worker process was killed .*the same command continues"):
        prepare(source, "bytes", tmp_path / "out", workers=2, progress=kill_one)
    assert list((tmp_path / "out" / ".parts").glob("[0-9]*.part"))
    monkeypatch.undo()
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 3000)
    whole = prepare(source, "bytes", tmp_path / "whole", workers=1)
    assert tree(prepare(source, "bytes", tmp_path / "out", workers=1).folder) == tree(whole.folder)


def test_disk_full_anywhere(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, only whole files under their names, and everything computed before is used afterwards."""
    calls: list[int] = []
    encoded: list[int] = []
    fail_at = 0
    real_encode = module.pieces.encode

    def sync(file: BinaryIO) -> None:
        calls.append(1)
        if len(calls) == fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def encode(*args: Any) -> Any:
        encoded.append(1)
        return real_encode(*args)

    monkeypatch.setattr(files, "sync", sync)
    monkeypatch.setattr(module.pieces, "encode", encode)
    whole = tree(prepare(source, "bytes", tmp_path / "whole", shard_tokens=20_000).folder)
    points, pieces = len(calls), len(encoded)
    assert pieces > 6
    for fail_at in range(1, points + 1):
        out = tmp_path / f"full-{fail_at}"
        calls.clear()
        with pytest.raises(StepformerError, match=r"The disk is full: '.*' could not be written"):
            prepare(source, "bytes", out, shard_tokens=20_000)
        assert not (out / "manifest.json").exists()
        assert not [path for path in out.rglob("*") if path.name.startswith(files.TEMPORARY)]
        for name, digest in tree(out).items():
            assert whole.get(name, digest) == digest
        kept = len(list(out.glob(".parts/[0-9]*.part")))
        encoded.clear()
        assert tree(prepare(source, "bytes", out, shard_tokens=20_000).folder) == whole
        assert len(encoded) == pieces - kept


def test_a_damaged_part_is_made_again(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    whole = tree(prepare(source, "bytes", tmp_path / "whole").folder)
    for number, damage in enumerate((b"", b"{}\n", b'{"tokens": {"train": 5, "val": 0}}\n123')):
        out = tmp_path / f"out-{number}"
        with monkeypatch.context() as patched:
            patched.setattr(module.Job, "assemble", stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(source, "bytes", out)
        (out / ".parts" / "000001-000001.part").write_bytes(damage)
        assert tree(prepare(source, "bytes", out).folder) == whole


def test_a_finished_corpus_is_returned_at_once(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(source, "bytes", tmp_path / "out")

    def never(*args: Any) -> None:
        raise AssertionError("worked again")

    monkeypatch.setattr(module.pieces, "encode", never)
    for name in ("make_tokenizer", "locked"):  # without a lock: the folder may be read-only
        monkeypatch.setattr(module, name, never)
    assert prepare(source, "bytes", tmp_path / "out").manifest == first.manifest


def test_another_corpus_is_not_overwritten(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise StepformerError("no room")

    out = prepare(source, "bytes", tmp_path / "out").folder
    before = tree(out)
    other = open_source(str(write_stories(tmp_path / "other", 300)))
    for arguments, options, sentence in (
        ((other, "bytes"), {}, "with another source"),
        ((source, "bpe:300"), {}, "with another tokenizer"),
        ((source, "bytes"), {"val_fraction": 0.1}, "with another val_fraction"),
        ((other, "bpe:300"), {"shard_tokens": 10}, "with another source and tokenizer and shard_tokens"),
    ):
        with pytest.raises(StepformerError, match=f"already holds the corpus 'in' with bytes tokens, made {sentence}"):
            prepare(*arguments, out, **options)
        assert tree(out) == before
    broken = tmp_path / "other" / "0.jsonl"
    broken.write_text(broken.read_text() + "no json\n")
    with pytest.raises(StepformerError, match="is not valid JSON"):
        prepare(open_source(str(tmp_path / "other")), "bytes", out, force=True)
    Corpus(out).verify()  # the old one is still there
    with monkeypatch.context() as patched:
        patched.setattr(module.Job, "_write_split", refuse)
        with pytest.raises(StepformerError, match="no room"):
            prepare(source, "bpe:300", out, shard_tokens=9000, force=True)
    with pytest.raises(StepformerError, match="was not finished"):  # and not a mixture of the two
        Corpus(out)
    fresh = prepare(source, "bpe:300", tmp_path / "fresh", shard_tokens=9000)
    forced = prepare(source, "bpe:300", out, shard_tokens=9000, force=True)
    assert tree(forced.folder) == tree(fresh.folder)
    back = prepare(source, "bytes", out, force=True)
    assert tree(back.folder) == before  # no shard of the other one is left over


def test_what_happened_to_a_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcde":
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.txt").write_text(f"The text of {name}. " * 50)
    prepare(open_source(str(tmp_path / "in")), "bytes", tmp_path / "out")
    monkeypatch.setattr("stepformer.data.sources.SMALL", 50)
    prepare(open_source(str(tmp_path / "in")), "bytes", tmp_path / "large")
    (tmp_path / "in" / "a.txt").unlink()
    (tmp_path / "in" / "b.txt").write_text("Another one.")
    os.utime(tmp_path / "in" / "c.txt", (1, 1))
    for name in "fghijk":
        (tmp_path / "in" / f"{name}.txt").write_text("A new text. " * 50)
    added = "(added: 'f.txt', 'g.txt', 'h.txt' and 3 more; removed: 'a.txt'; changed: 'b.txt'"
    said = f"made before its files changed {added}; of another date: 'c.txt'): "
    with pytest.raises(StepformerError, match=re.escape(said)):
        prepare(open_source(str(tmp_path / "in")), "bytes", tmp_path / "large")
    monkeypatch.undo()
    said = f"made with another tokenizer and document and before its files changed {added}): choose another folder"
    with pytest.raises(StepformerError, match=re.escape(said)):
        prepare(open_source(str(tmp_path / "in"), document="line"), "bpe:300", tmp_path / "out")
    with pytest.raises(StepformerError, match=r"\(--force\), after which runs trained on it cannot be resumed or"):
        prepare(open_source(str(tmp_path / "in")), "bytes", tmp_path / "out")


def test_runs_that_lose_their_tokens_are_named(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Before that happens and when it has; runs of other corpora and those that are damaged are not."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus", "other"):
        make_corpus(Path(name))
    for run, corpus in (("one", "corpus"), ("study/two", "corpus"), ("study/other", "other")):
        go(Path(corpus), Path("runs", run), steps=1)
    go(Path("other"), Path("runs/also"), steps=1, also="corpus")
    Path("runs/damaged").mkdir()
    Path("runs/damaged/run.json").write_text("{}")
    named = "'runs/also', 'runs/one', 'runs/study/two'"
    with pytest.raises(StepformerError, match=f"after which runs trained on it, such as {named}, cannot be resumed"):
        prepare(source, "bytes", "corpus")
    make_corpus(Path("corpus"), force=True)
    assert not [told for told in recwarn if told.category is StepformerWarning], "the same tokens again"
    with pytest.warns(StepformerWarning, match=f"when these runs began: {named} cannot be resumed or evaluated on it"):
        prepare(source, "bytes", "corpus", force=True)
    with pytest.raises(StepformerError, match="was trained on other data"):
        resume("runs/one", restart=True)
    with pytest.raises(StepformerError, match="after which runs trained on it cannot be resumed"):
        prepare(source, "bpe:300", "corpus")


def test_parts_of_another_job_are_not_used(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.Job, "assemble", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, "bytes", tmp_path / "out")
    fresh = prepare(source, "bpe:300", tmp_path / "fresh")
    assert tree(prepare(source, "bpe:300", tmp_path / "out").folder) == tree(fresh.folder)


def test_one_process_at_a_time(source: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: list[str] = []

    def second(progress: Progress) -> None:
        if not seen:
            with pytest.raises(StepformerError, match="Another process is preparing the corpus in"):
                prepare(source, "bytes", out)
            seen.append("refused")

    prepare(source, "bytes", out, progress=second).verify()
    assert seen == ["refused"]


def test_bad_settings(source: Any, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "val.jsonl").write_text('{"text": "a", "v": true}\n')
    blank, val = open_source(str(tmp_path / "blank.txt")), open_source(str(tmp_path / "val.jsonl"), val_field="v")
    for arguments, options, sentence in (
        ((source, "bytes"), {"val_fraction": 1.0}, "must be at least 0 and below 1"),
        ((source, "bytes"), {"workers": 0}, "workers must be at least 1"),
        ((source, "bytes"), {"shard_tokens": 0}, "at least 1 token"),
        ((source, "bpe"), {}, "bpe needs a size"),
        ((blank, "bytes"), {}, "The source 'blank' has no documents with text"),
        ((val, "bytes"), {}, "The source 'val' has no training documents"),
    ):
        with pytest.raises(StepformerError, match=sentence):
            prepare(*arguments, tmp_path / "out", **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(StepformerError, match="could not be written"):
        prepare(source, "bytes", tmp_path / "file" / "out")


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from stepformer.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPFORMER_HOME", raising=False)
    assert main(["prepare", "tales", "--count", "200", "--verify"]) == 0
    out = capsys.readouterr().out
    corpus = Corpus("data/tales-200-bpe-1024")
    for piece in (
        f"{len(corpus.split('train')):,}",
        corpus.split("val").hash,
        "all checksums agree",
        "stepformer train glide corpus=data/tales-200-bpe-1024",
    ):
        assert piece in out
    write_stories(tmp_path / "in")
    words = ["prepare", "in", "--tokenizer", "bytes", "--val-fraction", "0.2", "--out", "here", "--workers", "1"]
    assert main(words) == 0
    assert main([*words, "--field", "story"]) == 2
    assert "made with another field: " in capsys.readouterr().err
    assert main([*words, "--field", "story", "--force"]) == 2
    assert "has no field 'story'" in capsys.readouterr().err
    shard = tmp_path / "here" / "train-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert main([*words, "--verify"]) == 2
    assert "Shard 'train-00000.bin' of 'here' is damaged" in capsys.readouterr().err
    assert main([*words, "--verify", "--force"]) == 0

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Job, "encode", interrupt)
    assert main(["prepare", "in", "--tokenizer", "bytes"]) == 130
    assert "the same command continues" in capsys.readouterr().err


@pytest.mark.slow
def test_control_c_in_the_terminal(tmp_path: Path) -> None:
    """Ctrl-C reaches the workers too: they must not print tracebacks, and what is finished is kept."""
    line = [sys.executable, "-m", "stepformer", "prepare", "tales", "--count", "200000", "--tokenizer", "bytes"]
    with (tmp_path / "printed").open("w") as printed:
        running = subprocess.Popen(
            [*line, "--out", "out", "--workers", "2"],
            cwd=tmp_path,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        limit = time.monotonic() + 60
        while not list((tmp_path / "out" / ".parts").glob("[0-9]*.part")):
            assert time.monotonic() < limit
            assert running.poll() is None, (tmp_path / "printed").read_text()
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(30) == 130
    assert (tmp_path / "printed").read_text() == (
        "stepformer: interrupted; the same command continues where it stopped.\n"
    )
    assert list((tmp_path / "out" / ".parts").glob("[0-9]*.part"))


@pytest.mark.slow
@needs_gpt2
@needs_tinystories
def test_tinystories_with_gpt2(tmp_path: Path) -> None:
    """The count is tiktoken's own, plus one end of text for each document; the held-out stories are validation."""
    import lzma

    import tiktoken

    corpus = prepare(open_source(str(TINYSTORIES), val_field="in_val_head"), f"gpt2:{GPT2}", tmp_path / "out")
    with lzma.open(TINYSTORIES, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    ours = make_tokenizer(f"gpt2:{GPT2}")
    published = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    ranks = dict(zip(ours._pieces[:-1], range(50256), strict=True))
    theirs = tiktoken.Encoding("published", pat_str=published, mergeable_ranks=ranks, special_tokens={})
    for split, held_out in (("train", False), ("val", True)):
        stories = [row["text"] for row in rows if row["in_val_head"] is held_out]
        tokens = corpus.split(split)
        assert tokens.documents == len(stories)
        assert len(tokens) == sum(map(len, theirs.encode_ordinary_batch(stories, num_threads=2))) + len(stories)
        assert tokens.bytes == sum(len(text.encode()) for text in stories)
    val = corpus.split("val")
    first = next(row["text"] for row in rows if row["in_val_head"])
    count = len(ours.encode(first))
    assert corpus.tokenizer.decode(val.tokens(0, count + 1)) == first + "<|endoftext|>"
    assert corpus.vocab_size == 50257
    assert re.fullmatch(r"[0-9a-f]{16}", val.hash)
