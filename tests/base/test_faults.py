"""Nothing believed that was not checked: damaged, edited and hostile files over every command (`faults.py`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faults import BAD, COMMANDS, Harness, StopAfter
from runs import make_corpus
from stepformer.base import files
from stepformer.base.errors import InputError
from stepformer.cli import main
from stepformer.training import Stopped, resume
from stepformer.training.metrics import Metrics, read_lines, read_metrics

SAMPLE = 52  # cases in the fast set: four of every command
MANY = 2000


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def house(harness: Harness) -> Path:
    """A house to damage."""
    return harness.fresh()


def judged(harness: Harness, numbers: range) -> None:
    classes: Counter[str] = Counter()
    bad = []
    for number in numbers:
        verdict, done, answer = harness.case(number)
        classes[verdict] += 1
        if verdict in BAD:
            bad.append(f"case {number}: {verdict}: {done}: {answer.said[-300:]}")
    print("  ".join(f"{name}: {count:,}" for name, count in sorted(classes.items())))
    assert bad == []
    assert classes["refused"] > len(numbers) / 10  # it does damage what is read


def test_a_sample_of_damage(harness: Harness) -> None:
    judged(harness, range(SAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_damages(harness: Harness, part: int) -> None:
    size = (MANY - SAMPLE) // 8 + 1
    judged(harness, range(SAMPLE + part * size, SAMPLE + (part + 1) * size))


def test_every_command_is_among_them() -> None:
    assert {command.words[0] for command in COMMANDS} >= {
        *("eval", "generate", "export", "import", "resume", "compare", "train", "diagnose", "report")
    }


# What was believed before.


def edited(path: Path, change: Callable[[dict[str, Any]], None], *, sealed: bool = False) -> None:
    """Change a JSON file, and take its checksum away unless it is to be made to match."""
    value = json.loads(path.read_text())
    change(value)
    value.pop(files.CHECKSUM, None)
    files.write_json(path, value, sealed=sealed)


def setting(section: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["config"][section].update({key: value})


def said(capsys: pytest.CaptureFixture[str], words: list[str], status: int = 2) -> str:
    capsys.readouterr()
    assert main(words) == status
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("optim", "lr", 0.5), ("train", "seed", 9), ("model", "n_head", 4), ("train", "steps", 9), ("optim", "clip", 2.0)],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_resume_compares_its_settings_with_the_checkpoint(
    house: Path, capsys: pytest.CaptureFixture[str], section: str, key: str, value: Any, sealed: bool
) -> None:
    edited(house / "stopped/run.json", setting(section, key, value), sealed=sealed)
    errors = said(capsys, ["resume", str(house / "stopped"), "--quiet"])
    assert f"is not of this run: its {section}.{key} is" in errors


def test_an_edited_file_says_so(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = house / "study/plain-s1/result.json"
    path.write_text(path.read_text().replace('"train_seconds": ', '"train_seconds": 1'))
    runs = [str(house / "study" / name) for name in ("plain-s1", "moving-s1")]
    errors = said(capsys, ["compare", "--runs", *runs, "--out", str(house / "out")])
    assert "result.json' is not what was written: its checksum does not match" in errors


def test_a_checkpoint_of_another_run_is_refused(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = house / "stopped/checkpoints"
    for path in kept.iterdir():
        edited(path / "manifest.json", lambda manifest: manifest["state"].update(run="0123456789ab"), sealed=True)
    assert "it is of the run 0123456789ab" in said(capsys, ["resume", str(house / "stopped"), "--quiet"])


def test_files_that_a_manifest_does_not_list(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (house / "study/moving-s1/checkpoints").glob("best-*"):
        edited(path / "manifest.json", lambda manifest: manifest["files"].clear(), sealed=True)
    assert "'model.safetensors' is not in its manifest" in said(capsys, ["eval", str(house / "study/moving-s1")])


@pytest.mark.parametrize(("key", "value"), [("n_layer", 10_000_000), ("mlp_hidden", 16_000_000), ("d_model", 1 << 24)])
def test_sizes_are_compared_with_the_tensors_before_anything_is_built(
    house: Path, capsys: pytest.CaptureFixture[str], key: str, value: int
) -> None:
    run = house / "study/moving-s1"
    edited(run / "run.json", setting("model", key, value), sealed=True)
    (run / "result.json").unlink()  # it names the settings, too
    for path in run.glob("checkpoints/*/manifest.json"):
        edited(path, lambda manifest: setting("model", key, value)(manifest["state"]), sealed=True)
    assert "belongs to another model" in said(capsys, ["eval", str(run)])


def test_the_tokenizer_is_the_one_that_the_weights_were_trained_with(
    house: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from stepformer.data.tokenizers import train_bpe

    run = house / "study/moving-s1"
    shutil.rmtree(run / "tokenizer")
    train_bpe(257, ["a text"]).save(run / "tokenizer")
    for words in (
        ["generate", str(run), "One"],
        ["eval", str(run)],
        ["export", str(run), "--out", str(tmp_path / "e")],
    ):
        assert "was made with the tokenizer bytes" in said(capsys, words)


def vouched(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Other weights in a checkpoint whose manifest knows them."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    facts = {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
    edited(checkpoint / "manifest.json", lambda manifest: manifest["files"].update({path.name: facts}), sealed=True)


def test_weights_that_are_not_numbers(house: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = house / "study/moving-s1"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["final_norm.weight"][3] = torch.nan

    for path in (run / "checkpoints").iterdir():
        vouched(path, spoil)
    out = str(tmp_path / "out")
    sentence = "has weights that are not finite numbers, the first in 'final_norm.weight'"
    for words in (["eval", str(run)], ["diagnose", str(run), "--depth"], ["export", str(run), "--out", out]):
        assert sentence in said(capsys, words)
    other = make_corpus(tmp_path / "other", count=5).folder
    finetune = ["finetune", str(run), "--on", str(other), "steps=1"]  # other runs might be fine: status 1
    for words, status in ((["train", str(run / "config.toml"), f"init={run}"], 2), (finetune, 1)):
        assert sentence in said(capsys, [*words, "--out", str(tmp_path / "warm")], status)
        assert not list(tmp_path.glob("warm/**/run.json"))
    (run / "result.json").unlink()  # which knows the weights
    assert main(["export", str(run), "--out", out, "--allow-nan"]) == 0
    assert "not finite numbers" in said(capsys, ["import", out, "--out", str(tmp_path / "again")])


def test_an_export_vouches_for_its_weights(house: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("export", "gpt2"):
        path = house / name / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        errors = said(capsys, ["import", str(house / name), "--out", str(tmp_path / name)])
        assert "model.safetensors' is not what was exported (SHA-256 " in errors


def test_a_run_that_ended_with_other_weights_is_not_exported(
    house: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = house / "study/moving-s1"
    for path in (run / "checkpoints").iterdir():
        vouched(path, lambda tensors: tensors["final_norm.weight"].mul_(2))
    errors = said(capsys, ["export", str(run), "--out", str(tmp_path / "out")])
    assert "ended with other weights" in errors


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.update(dtype="uint32"), "cannot hold"),
        (lambda m: m["splits"]["val"].update(tokens=17), "do not have 17 tokens together"),
        (lambda m: m["splits"]["val"].update(shards=m["splits"]["train"]["shards"]), "is listed twice"),
        (lambda m: m["splits"].update(val=m["splits"].pop("train")), "has no train split"),
        (lambda m: m["splits"]["val"].update(hash="0" * 16), "not 0000000000000000 as its manifest says"),
        (lambda m: m["splits"]["val"]["shards"][0].update(file="../../secret"), "not a file inside the folder"),
        (lambda m: m["tokenizer"].update(fingerprint="0" * 16), "with fingerprint 0000000000000000"),
    ],
)
def test_a_corpus_adds_up(
    house: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    edited(house / "corpus/manifest.json", change, sealed=True)
    assert sentence in said(capsys, ["eval", str(house / "study/moving-s1")])


def test_an_archive_that_was_packed_again(house: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import zipfile

    path, packed = house / "ckpt.pt", tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    errors = said(capsys, ["import", str(packed), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"])
    assert "is compressed): torch.save does not do that" in errors


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"format": 1, "id": "\\u0000"}', "it is not valid JSON"),
        ('{"format": NaN}', "it is not valid JSON"),
        ('{"format": 1' + "0" * 5000 + "}", "it is not valid JSON"),
        ('{"format": 1e400}', "has format inf"),
        ('{"format": true}', "has format True"),
        ("3", "it is not a JSON object"),
        ('{"format": 1}', "stepformer is missing"),
    ],
    ids=range(8),
)
def test_hostile_json(house: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str) -> None:
    (house / "stopped/run.json").write_text(text)
    assert sentence in said(capsys, ["eval", str(house / "stopped")])


def test_a_large_file_is_not_read(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (house / "stopped/run.json").open("ab") as file:
        file.truncate(70 << 20)
    assert "it has more than 64 MiB" in said(capsys, ["eval", str(house / "stopped")])


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["show", "{}"], "x.toml"),
        (["prepare", "{}", "--tokenizer", "bytes", "--out", "out"], "x.txt"),
        (["prepare", "{}", "--tokenizer", "bytes", "--out", "out"], "x.jsonl.gz"),
        (["import", "{}", "--tokenizer", "bytes", "--out", "out"], "x.pt"),
    ],
    ids=["config", "text", "packed", "checkpoint"],
)
def test_nobody_waits_for_a_pipe_or_reads_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, words: list[str], name: str
) -> None:
    path = tmp_path / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    found = said(capsys, [word.format(path) if word == "{}" else word for word in words])
    assert f"{name}' cannot be read: it is a pipe or a device, not an ordinary file." in found


def test_a_setting_that_run_json_has_lost_is_missed(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model's defaults are not written, so what is gone looks like one."""
    run = house / "study/moving-s1"
    for path in run.glob("checkpoints/*/manifest.json"):
        edited(path, lambda manifest: setting("model", "norm_eps", 1e-3)(manifest["state"]), sealed=True)
    assert "its model.norm_eps is 0.001, and that of the run is None" in said(capsys, ["eval", str(run)])


def test_extending_asks_whose_checkpoint_it_is(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(house / "stopped/run.json", setting("optim", "clip", 2.0), sealed=True)
    words = ["extend", str(house / "stopped"), "keep=3", "--out", str(house / "out"), "--quiet"]
    assert "is not of this run: its optim.clip is 1.0" in said(capsys, words)


def test_a_result_of_other_settings_is_not_compared(harness: Harness, house: Path) -> None:
    edited(house / "study/moving-s1/run.json", setting("optim", "lr", 0.5), sealed=True)
    answer = harness.given("compare")
    assert answer.status == 2
    assert "is of other settings than its run.json has" in answer.said


def test_the_weights_of_an_older_export_are_compared(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which lists no files, but knows its weights."""
    edited(house / "export/stepformer.json", lambda facts: facts.pop("files"))
    weights = house / "export/model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values())).mul_(1.5)
    save_file(tensors, weights, metadata={"format": "pt"})
    errors = said(capsys, ["import", str(house / "export"), "--out", str(tmp_path / "run")])
    assert "are not those that were exported" in errors


def test_weights_beside_those_that_were_exported(
    house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def forget(facts: dict[str, Any]) -> None:
        facts["files"].pop("model.safetensors")

    edited(house / "export/stepformer.json", forget, sealed=True)
    assert "was not exported with the rest" in said(
        capsys, ["import", str(house / "export"), "--out", str(tmp_path / "run")]
    )


def test_an_optimizer_that_cannot_be_read(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in (house / "stopped/checkpoints").glob("step-*"):
        path = checkpoint / "optimizer.safetensors"
        path.write_bytes(b"no tensors")
        facts = {path.name: {"bytes": path.stat().st_size, "sha256": files.sha256(path)}}
        edited(checkpoint / "manifest.json", lambda manifest, new=facts: manifest["files"].update(new), sealed=True)
    assert "optimizer.safetensors' is damaged: it cannot be read" in said(
        capsys, ["resume", str(house / "stopped"), "--quiet"]
    )


def test_an_archive_of_another_version(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray((house / "ckpt.pt").read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = 200  # "version needed"
    (tmp_path / "odd.pt").write_bytes(content)
    errors = said(capsys, ["import", str(tmp_path / "odd.pt"), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"])
    assert "is damaged" in errors


# Metrics


def test_lines_of_saves_in_the_background_are_chained_again(tmp_path: Path) -> None:
    """On CUDA the line of a checkpoint comes after later steps; a resume drops these and keeps that."""
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, -1)
    for step in (1, 2, 3):
        metrics.write(kind="train", step=step, loss=1.0)
    metrics.saved("step-00000002")
    metrics.close()
    for step in (2, 2):
        resumed = Metrics(path, step)
        assert [(line["kind"], line["step"]) for line in read_metrics(path)][-1] == ("saved", 2)
        resumed.write(kind="train", step=3, loss=1.0)
        resumed.close()
    assert read_lines(path).faults == []


def test_damage_after_the_last_checkpoint_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, -1)
    metrics.write(kind="train", step=1, loss=1.0)
    metrics.saved("step-00000001")
    metrics.close()
    with path.open("ab") as file:
        file.write(bytes(100) + b"\n")  # as a power cut leaves it
    Metrics(path, 1).close()
    assert read_lines(path).faults == []
    path.write_bytes(bytes(10) + b"\n" + path.read_bytes())
    with pytest.raises(InputError, match="line 1 is damaged"):
        Metrics(path, 1)


def test_a_restarted_run_forgets_its_result(house: Path) -> None:
    run = house / "study/moving-s1"
    shutil.rmtree(run / "checkpoints/step-00000006")
    with pytest.raises(Stopped):
        resume(run, quiet=True, restart=True, watch=StopAfter(1))
    assert not (run / "result.json").exists()
    assert main(["resume", str(run), "--quiet"]) == 0


def test_a_saved_checkpoint_that_is_gone_is_missed(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = house / "stopped"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "saved"] == [2, 4]
    shutil.rmtree(run / "checkpoints/step-00000004")
    assert "of step 4 of" in said(capsys, ["resume", str(run), "--quiet"])
    assert main(["resume", str(run), "--quiet", "--restart"]) == 0
    finished = house / "study/moving-s1"
    shutil.rmtree(finished / "checkpoints/step-00000006")
    assert "start again after step 4" in said(capsys, ["resume", str(finished), "--quiet"])


@pytest.mark.usefixtures("few_charts")
@pytest.mark.parametrize("kind", ["lost", "changed", "doubled", "cut"])
def test_gaps_are_noticed(harness: Harness, house: Path, kind: str) -> None:
    path = house / "study/moving-s1/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    changes = {
        "lost": [*lines[:2], *lines[3:]],
        "changed": [*lines[:2], lines[2].replace('"step": ', '"step": 1'), *lines[3:]],
        "doubled": [*lines[:3], *lines[2:]],
        "cut": lines[:-1],
    }
    path.write_text("".join(changes[kind]))
    sentence = "does not end as it did" if kind == "cut" else "was changed, or does not follow the line before it"
    for name, status in (("compare", 2), ("report", 0)):
        answer = harness.given(name)
        assert (answer.status, answer.fault) == (status, "")
        assert sentence in answer.said
        shutil.rmtree(house / "out", ignore_errors=True)


# Folders of version 0.5.0


def aged(house: Path) -> Iterator[Path]:
    """Take away what files of 0.5.0 did not have."""
    for path in house.rglob("*.json"):
        if path.stem in ("run", "result", "environment", "manifest", "tokenizer", "study"):
            value = json.loads(path.read_text())
            for key in (files.CHECKSUM, "tokenizer" if path.name == "run.json" else "", "metrics"):
                value.pop(key, None)
            value.get("state", {}).pop("run", None)
            path.write_text(json.dumps(value))
            yield path
    for path in house.rglob("metrics.jsonl"):
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{k: v for k, v in entry.items() if k != "check"} for entry in entries if entry["kind"] != "saved"]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        yield path


def test_folders_of_an_older_version_are_taken_with_a_note(harness: Harness, house: Path) -> None:
    assert list(aged(house))
    for name in ("eval", "generate", "resume", "resume finished", "compare", "warm start"):
        answer = harness.given(name)
        assert answer.status == 0, answer.said
        assert "without a checksum, as in version 0.5.0" in answer.said
        assert answer.result == harness.usual[name].result
        shutil.rmtree(house / "out", ignore_errors=True)


# What an attack from the documentation alone found.


def test_an_older_checkpoint_is_not_the_best(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = house / "study/moving-s1/checkpoints"
    (best,) = kept.glob("best-*")
    first, *_ = sorted(kept.glob("step-*"))
    last = sorted(kept.glob("step-*"))[-1]
    shutil.rmtree(last)
    run = str(house / "study/moving-s1")
    assert "The last checkpoint of" in said(capsys, ["eval", run, "--checkpoint", "last"])
    shutil.rmtree(best)
    assert "and it is gone: put it back" in said(capsys, ["eval", run])
    if first != last:
        shutil.copytree(first, kept / first.name.replace("step", "best"))
        assert "The best checkpoint of" in said(capsys, ["eval", run])


def test_a_finished_run_tells_its_own_result(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = house / "study/moving-s1", house / "study/plain-s1"
    for name in ("result.json", "metrics.jsonl"):
        shutil.copy(other / name, mine / name)
    assert "is of another run, " in said(capsys, ["resume", str(mine), "--quiet"])


@pytest.mark.usefixtures("few_charts")
def test_measurements_are_of_their_run(house: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine, other, text = house / "study/moving-s1", house / "study/plain-s1", tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox. " * 40)
    assert main(["eval", str(other), "--on", str(text), "--quiet"]) == 0
    (mine / "measured").mkdir(exist_ok=True)
    shutil.copy(other / "measured/perplexity.json", mine / "measured/perplexity.json")
    assert "is of other weights than those of its run" in said(
        capsys, ["export", str(mine), "--out", str(tmp_path / "export")]
    )
    assert main(["report", str(mine), "--out", str(tmp_path / "page"), "--no-samples", "--quiet"]) == 0
    assert "is of other weights than those of its run" in (tmp_path / "page/report.md").read_text()
    shutil.rmtree(mine / "measured")
    (mine / "measured").symlink_to(other / "measured")
    assert "is a link to another place" in said(capsys, ["eval", str(mine), "--on", str(text), "--quiet"])


def test_lines_cut_from_the_end_of_the_metrics(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = house / "stopped/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    words = ["resume", str(house / "stopped"), "--quiet"]
    assert "lines with losses, and 2 are left. Put it back" in said(capsys, words)
    path.unlink()
    assert "There is no metrics file" in said(capsys, words)


def test_a_lock_that_is_a_pipe(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (house / "stopped/run.lock").unlink(missing_ok=True)
    os.mkfifo(house / "stopped/run.lock")
    assert "it is a pipe or a device" in said(capsys, ["resume", str(house / "stopped"), "--quiet"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"a={'[' * 1000}{']' * 1000}", "nested too deeply"),
        (f"n_layer={'9' * 5000}", "is not valid TOML"),
        (b"\xff", "it is not text"),
    ],
    ids=["deep", "long number", "bytes"],
)
def test_hostile_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, sentence: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert sentence in said(capsys, ["show", str(path)])
    with path.open("ab") as file:
        file.truncate(70 << 20)
    assert "it has more than 64 MiB" in said(capsys, ["show", str(path)])


def test_names_that_no_disk_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["eval", "x" * 300], ["report", "x" * 300], ["prepare", f"{'x' * 300}.txt", "--out", "out"]):
        assert "File name too long" in said(capsys, words)


@pytest.mark.parametrize("output", ["/dev/full", pytest.param("closed", marks=pytest.mark.slow)])
def test_output_that_cannot_be_written(output: str) -> None:
    target = ">&-" if output == "closed" else f"> {output}"
    command = f"{sys.executable} -m stepformer list {target}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    assert (done.returncode, "The output could not be written" in done.stderr) == (
        (0, False) if output == "closed" else (2, True)
    )


@pytest.mark.slow
def test_workers_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("pickle", "multiprocessing", "signal", "copyreg"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    words = ["prepare", "tales", "--count", "400", "--tokenizer", "bytes", "--workers", "2", "--out", "made"]
    program = "import sys; from stepformer.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, (tmp_path / "ran").exists()) == (0, False), done.stderr
