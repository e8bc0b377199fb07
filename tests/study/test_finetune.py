"""Fine-tuning on a second corpus: warm starts, forgetting and plasticity, one optimizer for all, resumable studies."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import make_corpus, small_run, stop_after
from stepformer.base.errors import ConfigError, InputError, StepformerError
from stepformer.base.files import write_json
from stepformer.cli import main
from stepformer.data.batches import Batches
from stepformer.data.corpus import Corpus, corpus_folder
from stepformer.data.opening import open_source
from stepformer.data.prepare import prepare, shared_tokenizer
from stepformer.data.tokenizers import load_tokenizer
from stepformer.optim import OptimConfig, Schedule
from stepformer.training import RunConfig, Stopped, evaluate_run, load_run, resume, run_config, train
from stepformer.training.corpora import open_corpus
from stepformer.training.finetuning import FinetuneConfig, finetune_config
from stepformer.training.loop import Trainer
from stepformer.training.metrics import read_metrics
from stepformer.training.parallel import World
from stepformer.training.stopping import Watch

ALONE = World(0, 1, torch.device("cpu"))


def other_corpus(folder: Path, tokenizer: str = "bytes") -> Corpus:
    source = open_source("tales", dialect="space", count=40)
    return prepare(source, tokenizer, folder, val_fraction=0.2, workers=1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora of bytes, and two architectures with two seeds each, pretrained on the first."""
    folder = tmp_path_factory.mktemp("home")
    village = make_corpus(folder / "village").folder
    other_corpus(folder / "space")
    for name in ("vanilla", "yurii"):
        for seed in (42, 43):
            train(small_run(village, name, seed=seed), folder / f"{name}-s{seed}", quiet=True, label=name)
    return folder


def warm(home: Path, name: str = "yurii", **changes: Any) -> RunConfig:
    """A run on the second corpus that begins with a pretrained one's weights."""
    settings = {"init": str(home / f"{name}-s42"), "also": str(home / "village"), "optim.name": "adamw", **changes}
    return small_run(home / "space", name, **settings)


def evaluations(run: Path) -> list[dict[str, Any]]:
    kept = ("step", "val_loss", "val_tokens", "val_hash", "also")
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
    return [{key: line[key] for key in kept} for line in lines]


def told(run: Path, name: str = "result.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / name).read_text())
    return found


def trained_again(run: Path) -> None:
    """Give a run another id, as if it were another one with the same settings."""
    write_json(run / "run.json", told(run, "run.json") | {"id": "0f"})
    write_json(run / "result.json", told(run, "result.json") | {"run": "0f"})
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = told(path.parent, "manifest.json")
        manifest["state"]["run"] = "0f"
        write_json(path, manifest)


def never_finished(run: Path) -> None:
    """As if it had been stopped before its first checkpoint."""
    shutil.rmtree(run / "checkpoints")
    for name in ("result.json", "metrics.jsonl"):
        (run / name).unlink()


def test_hashes_of_configs_without_the_new_keys_are_the_old_ones() -> None:
    """Taken before `init` and `also` existed, with the rates of then: such runs must still be recognised."""
    rates = {"lr_embedding": 6e-3, "lr_norm": 6e-3}
    small = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 16}
    assert run_config("vanilla", **rates).hash == "f038394b27cc"
    assert run_config("yurii", steps=12, batch=8, corpus="data/x", **small).hash == "e6bc14e6cb3a"
    assert run_config("yurii", steps=12).for_vocabulary(1024).hash == "d8b88a453ed1"
    then = {"streams": "auto", "eval_first": None, "eval_whole": False}  # as in the recipe of then
    assert run_config("momentum-streams-tinystories", **then).hash == "63e7fd48489f"
    assert len({run_config("vanilla", **more).hash for more in ({}, {"init": "a"}, {"init": "b"}, {"also": "a"})}) == 4
    old = run_config("vanilla", **rates).to_dict()  # a record from then lacks the keys
    del old["data"]["also"], old["train"]["init"]
    assert RunConfig.from_dict(old).hash == "f038394b27cc"


def test_a_run_begins_with_the_best_weights_of_another(home: Path, tmp_path: Path) -> None:
    train(warm(home), tmp_path / "run", quiet=True)
    first, *_, last = evaluations(tmp_path / "run")
    before, source = evaluate_run(home / "yurii-s42", tokens=512)
    # fp64, the same weights and tokens; 1e-12 for sums of eight rows in another order
    assert first["also"]["village"]["val_loss"] == pytest.approx(before.val_loss, abs=1e-12)
    assert first["also"]["village"]["val_hash"] == Corpus(home / "village").split("val").hash
    assert first["also"]["village"]["val_tokens"] == 512
    assert first["val_hash"] == Corpus(home / "space").split("val").hash
    result = told(tmp_path / "run")
    assert result["also"] == last["also"]
    record = told(tmp_path / "run", "run.json")
    theirs = told(home / "yurii-s42", "run.json")
    assert record["init"]["id"] == theirs["id"]
    assert record["init"]["step"] == source.step == told(home / "yurii-s42")["best_step"]
    assert record["init"]["config_hash"] == source.config.hash
    assert record["also"]["village"]["splits"]["val"]["hash"] == Corpus(home / "village").split("val").hash


def test_an_interrupted_warm_run_ends_like_an_uninterrupted_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with the source run gone after the first checkpoint."""
    source = shutil.copytree(home / "yurii-s42", tmp_path / "source")
    config = warm(home, init=str(source))
    whole = train(config, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stopped):
            train(config, tmp_path / "cut", quiet=True)
    shutil.rmtree(source)
    assert resume(tmp_path / "cut", quiet=True)["weights_sha256"] == whole["weights_sha256"]
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")
    assert [line["step"] for line in evaluations(tmp_path / "cut")] == [0, 4, 8, 12]
    # stopped again while the other corpus is somewhere else
    moved = shutil.copytree(home / "village", tmp_path / "moved")
    record = told(tmp_path / "cut", "run.json")
    record["also"]["village"]["folder"] = str(tmp_path / "nowhere")
    write_json(tmp_path / "cut/run.json", record)
    (tmp_path / "cut/result.json").unlink()
    with pytest.raises(InputError, match=r"second corpus, which is not in '.*nowhere': say where it is with also=DIR"):
        resume(tmp_path / "cut", quiet=True)
    assert resume(tmp_path / "cut", quiet=True, also=str(moved))["also"] == whole["also"]
    (tmp_path / "cut/result.json").unlink()
    with pytest.raises(InputError, match="was evaluated on other data: the train split"):
        resume(tmp_path / "cut", quiet=True, also=str(home / "space"))


def test_a_run_without_a_checkpoint_begins_again_with_the_same_weights_only(home: Path, tmp_path: Path) -> None:
    source = shutil.copytree(home / "yurii-s42", tmp_path / "source")
    whole = train(warm(home, init=str(source)), tmp_path / "run", quiet=True)
    never_finished(tmp_path / "run")
    assert resume(tmp_path / "run", quiet=True)["weights_sha256"] == whole["weights_sha256"]
    never_finished(tmp_path / "run")
    trained_again(source)
    with pytest.raises(InputError, match=r"began with other weights than '.*source' has now \(id .* then, 0f now"):
        resume(tmp_path / "run", quiet=True)
    shutil.rmtree(source)
    with pytest.raises(InputError, match="There is no run folder"):
        resume(tmp_path / "run", quiet=True)


def test_weights_that_do_not_fit_are_refused_in_a_sentence(home: Path, tmp_path: Path) -> None:
    trained = other_corpus(tmp_path / "bpe", "bpe:300").folder
    empty = tmp_path / "empty"
    shutil.copytree(home / "yurii-s42", empty)
    shutil.rmtree(empty / "checkpoints")
    (empty / "result.json").unlink()
    for config, sentence in (
        (warm(home, n_layer=3), r"weights of another architecture: its n_layer is 2, this run's 3\."),
        (warm(home, "vanilla", init=str(home / "yurii-s42")), "another architecture: its .*template is"),
        (warm(home, corpus=str(trained)), "The tokens of '.*village' were made by another tokenizer"),
        (warm(home, corpus=str(trained), also=None), "reads tokens of bytes .* but the corpus has those of bpe:300"),
        (warm(home, also=f"{home / 'village'}, {trained}"), "another tokenizer .*stepformer prepare SOURCE"),
        (warm(home, init=str(empty)), "has no checkpoint yet"),
        (warm(home, init=str(tmp_path / "nothing")), "There is no run folder"),
        (warm(home, also=str(tmp_path / "nothing")), "There is no corpus"),
        (warm(home, also=f"{home / 'village'},{home / 'village'}"), "two corpora whose folders are called 'village'"),
    ):
        with pytest.raises(InputError, match=sentence):
            train(config, tmp_path / "refused", quiet=True)
        assert not (tmp_path / "refused/run.json").exists()


def test_a_second_corpus_gets_the_tokenizer_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPFORMER_HOME", str(tmp_path))
    first = prepare(open_source("tales", count=120), "bpe:300", tmp_path / "first")
    for where in (first.folder, first.folder / "tokenizer"):
        command = ["prepare", "tales", "--dialect", "space", "--count", "120", "--tokenizer", str(where)]
        assert main(command) == 0
    name = f"tales-space-120-bpe-300-{first.tokenizer.fingerprint[:8]}"
    second = Corpus(tmp_path / "data" / name)
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    text = next(iter(open_source("tales", dialect="space", count=1))).text
    assert second.tokenizer.encode(text) == first.tokenizer.encode(text)
    # its own tokenizer would be another one, and lies elsewhere
    assert main(["prepare", "tales", "--dialect", "space", "--count", "120", "--tokenizer", "bpe:300"]) == 0
    own = Corpus(tmp_path / "data/tales-space-120-bpe-300")
    assert own.tokenizer.fingerprint != first.tokenizer.fingerprint
    # on the spot, in a run
    settings = {"dialect": "space", "count": 120, "tokenizer": str(first.folder)}
    assert open_corpus(run_config("vanilla", **settings).data, ALONE, quiet=True).folder == second.folder
    with pytest.raises(InputError, match="not by bpe:300 with fingerprint"):
        open_corpus(run_config("vanilla", corpus=str(own.folder), tokenizer=str(first.folder)).data, ALONE)
    # bytes are bytes, whoever has them
    plain = prepare(open_source("tales", count=5), "bytes", tmp_path / "plain")
    assert corpus_folder("x", str(plain.folder)).name == "x-bytes"
    capsys.readouterr()
    for spec, sentence in (
        (str(tmp_path / "data"), "There is no tokenizer in the folder"),
        ("nowhere/x", "There is no"),
    ):
        assert main(["prepare", "tales", "--tokenizer", spec]) == 2
        assert sentence in capsys.readouterr().err


def test_a_shared_tokenizer_is_trained_on_both_corpora(tmp_path: Path) -> None:
    sources = [open_source("tales", dialect=dialect, count=150) for dialect in ("village", "space")]
    shared = shared_tokenizer(sources, "bpe:600", tmp_path / "shared")
    assert load_tokenizer(tmp_path / "shared").fingerprint == shared.fingerprint
    lengths = {}
    for i, source in enumerate(sources):
        own = shared_tokenizer([source], "bpe:600", tmp_path / f"own-{i}")
        assert own.fingerprint == prepare(source, "bpe:600", tmp_path / f"corpus-{i}").tokenizer.fingerprint
        text = "".join(document.text for document in sources[1 - i])
        lengths[i] = (len(shared.encode(text)), len(own.encode(text)))
    for both, foreign in lengths.values():  # each dialect in fewer tokens than with the other's tokenizer
        assert both < foreign


def settled(home: Path, **changes: Any) -> tuple[FinetuneConfig, RunConfig]:
    source = load_run(home / "yurii-s42").config
    settings = FinetuneConfig(**changes).settled([source])
    return settings, finetune_config(source, home / "yurii-s42", home / "village", home / "space", settings)


def test_the_protocol_is_the_published_one_at_the_published_size(home: Path) -> None:
    source = run_config("momentum-streams-openwebtext", preset="tmm")
    config = finetune_config(source, Path("run"), Path("a"), Path("b"), FinetuneConfig().settled([source]))
    optim, train_ = config.optim, config.train
    assert optim.name == "adamw"
    assert {optim.rate(role) for role in ("matrix", "embedding", "norm", "coefficient")} == {1e-4}
    assert {optim.decay(role) for role in ("matrix", "embedding", "norm", "coefficient")} == {0.01}
    assert (optim.beta1, optim.beta2, optim.clip, optim.sam) == (0.9, 0.95, 1.0, "off")
    assert (train_.steps, train_.batch, train_.eval_every, train_.eval_tokens) == (1000, 480, 100, 50 * 8 * 1024)
    assert config.model == source.model
    assert config.model.context == 1024
    schedule = Schedule(optim, train_.steps)
    assert (schedule.warmup, schedule.factor(0), schedule.factor(49), schedule.factor(50)) == (50, 1 / 50, 1.0, 1.0)
    assert schedule.factor(525) == pytest.approx(0.1 + 0.9 * 0.5)  # halfway down the cosine
    assert schedule.factor(999) == pytest.approx(0.1, abs=1e-5)
    # smaller models: ten times the rate, a tenth of the steps, the batch they had
    settings, config = settled(home)
    assert (settings.steps, settings.lr, settings.warmup, settings.eval_every) == (100, 1e-3, 5, 10)
    assert (config.train.batch, config.train.seed) == (8, 42)
    mixed = [source, load_run(home / "yurii-s42").config]
    with pytest.raises(ConfigError, match=r"batches of 8 and 480 sequences: say finetune.batch=N"):
        FinetuneConfig().settled(mixed)


def test_the_native_option_divides_the_runs_own_rates(home: Path) -> None:
    source = run_config("momentum-streams-openwebtext", preset="vanilla")
    settings = FinetuneConfig(native=True).settled([source])
    optim = finetune_config(source, Path("run"), Path("a"), Path("b"), settings).optim
    assert optim.name == "muon"
    assert optim.lr == pytest.approx(4e-3 / 6)
    assert (optim.lr_embedding, optim.lr_norm) == pytest.approx((1e-4, 1e-4))
    assert (optim.wd_matrix, optim.wd_embedding, optim.wd_norm) == (0.0, 0.1, 0.0)
    assert (optim.momentum, optim.nesterov, optim.warmup, optim.floor) == (0.95, True, 50, 0.1)
    assert optim.lr_coefficient == pytest.approx(3e-3 / 6)
    public = run_config("speed-public")
    settings = FinetuneConfig(native=True).settled([public])
    assert finetune_config(public, Path("run"), Path("a"), Path("b"), settings).optim.lr_head == pytest.approx(2e-3 / 6)
    for values, sentence in (
        ({"native": True, "lr": 0.1}, "lr belongs to the one AdamW"),
        ({"divisor": 2.0}, "--native"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            FinetuneConfig.from_dict(values)
    wsd = run_config("momentum-streams-openwebtext-wsd", preset="tmm", sam="decay")
    changed = finetune_config(wsd, Path("run"), Path("a"), Path("b"), FinetuneConfig(native=True).settled([wsd])).optim
    assert (changed.schedule, changed.decay_start, changed.sam) == ("cosine", None, "off")


def test_one_step_of_the_protocol_by_hand(home: Path, tmp_path: Path) -> None:
    """AdamW's first step moves each parameter by -lr (g / (|g| + eps) + wd p); norms and coefficients decay too."""
    _, config = settled(home, steps=1, lr=0.01, weight_decay=0.3, clip=0.05)
    train(config, tmp_path / "run", quiet=True)
    after = dict(load_run(tmp_path / "run", "last").model.named_parameters())
    model = load_run(home / "yurii-s42").model
    inputs, targets = Batches(Corpus(home / "space").split("train"), 16, 8, seed=42).batch(0)
    loss = model(inputs, targets).loss
    assert loss is not None
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.sqrt(sum((g.square().sum() for g in gradients.values() if g is not None), torch.zeros(())))
    assert norm > 0.05
    for name, p in model.named_parameters():
        g = gradients[name]
        assert g is not None
        g = g * (0.05 / (norm + 1e-6))
        expected = p * (1 - 0.01 * 0.3) - 0.01 * g / (g.abs() + 1e-8)
        # fp64; 1e-9 because g / (|g| + 1e-8) magnifies rounding where g itself is of the order of 1e-8
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-9)
    assert any("norm" in name for name in after)
    assert any("rho" in name or "mu" in name or "coefficient" in name for name in after), list(after)


def study(home: Path, out: Path, *words: str) -> list[str]:
    runs = [str(home / f"{name}-s{seed}") for name in ("vanilla", "yurii") for seed in (42, 43)]
    small = ["steps=6", "eval_every=3", "eval_tokens=512", "lr=0.01"]
    return ["finetune", *runs, "--on", str(home / "space"), "--out", str(out), "--quiet", *small, *words]


def test_forgetting_and_plasticity_are_differences_of_independent_evaluations(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the architectures read the same batches, a stopped study goes on, and nothing is done twice."""
    seen: dict[tuple[str, int, int], list[Any]] = {}
    original = Trainer._gradients

    def gradients(self: Trainer, t: int) -> Any:
        seen.setdefault((self.label, self.config.train.seed, t), []).append(self.batches.at(t)[0].tolist())
        return original(self, t)

    monkeypatch.setattr(Trainer, "_gradients", gradients)
    out = tmp_path / "study"
    taken = [0]
    with monkeypatch.context() as patch:
        step = Trainer._train_step
        patch.setattr(Trainer, "_train_step", lambda self, *rest: (step(self, *rest), taken.append(0))[0])
        patch.setattr(Watch, "asked", lambda self: int(signal.SIGINT) if len(taken) == 9 else 0)
        assert main(study(home, out)) == 128 + signal.SIGINT
        assert "The same command continues" in capsys.readouterr().err
    assert main(study(home, out)) == 0
    printed = capsys.readouterr().out
    assert "forgetting" in printed
    assert "yurii" in printed
    seen_once = {key: rows[-1] for key, rows in seen.items()}
    for seed in (42, 43):
        for t in range(6):
            assert seen_once["vanilla", seed, t] == seen_once["yurii", seed, t]
    assert seen_once["vanilla", 42, 0] != seen_once["vanilla", 43, 0]
    assert "the pretrained runs differ" not in printed
    taken_before = {path: path.read_text() for path in out.glob("*/metrics.jsonl")}
    assert main(study(home, out)) == 0
    assert {path: path.read_text() for path in out.glob("*/metrics.jsonl")} == taken_before

    found = told(out, "forgetting.json")
    assert found["direction"] == "village -> space"
    assert (found["settings"]["steps"], found["settings"]["weight_decay"]) == (6, 0.01)
    amounts: dict[tuple[str, int], tuple[float, float]] = {}
    for run in found["runs"]:
        key = (run["architecture"], run["seed"])
        name = "{}-s{}".format(*key)
        losses = [
            evaluate_run(folder, which=which, corpus=home / corpus, tokens=512)[0].val_loss
            for corpus in ("village", "space")
            for folder, which in ((home / name, "best"), (out / name, "last"))
        ]
        amounts[key] = (losses[1] - losses[0], losses[2] - losses[3])
        # fp64, the same weights and tokens in other micro-batches
        assert (run["forgetting"], run["plasticity"]) == pytest.approx(amounts[key], abs=1e-11)
        assert run["steps"] == [0, 3, 6]
    rows = {row["architecture"]: row for row in found["rows"]}
    assert list(rows) == ["vanilla", "yurii"]
    for i, what in enumerate(("forgetting", "plasticity")):
        by_hand = [amounts["yurii", seed][i] - amounts["vanilla", seed][i] for seed in (42, 43)]
        assert rows["yurii"][f"{what}_difference"] == pytest.approx(sum(by_hand) / 2, abs=1e-11)
        # two pairs: 12.706 is Student's t for one degree of freedom at 97.5 %
        half = 12.7062047 * abs(by_hand[0] - by_hand[1]) / 2
        assert rows["yurii"][f"{what}_difference_high"] == pytest.approx(sum(by_hand) / 2 + half, abs=1e-6)
        assert rows["vanilla"][what] == pytest.approx(sum(amounts["vanilla", s][i] for s in (42, 43)) / 2, abs=1e-11)
        assert rows["vanilla"][f"{what}_difference"] is None
    table = list(csv.DictReader((out / "forgetting.csv").read_text().splitlines()))
    assert [float(row["plasticity"]) for row in table] == pytest.approx([r["plasticity"] for r in rows.values()])
    assert f"{rows['yurii']['forgetting']:.4f} ±" in (out / "forgetting.md").read_text()
    assert (out / "forgetting.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_fine_tuned_is_said_in_a_sentence(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    train(small_run(home / "space", "vanilla", steps=2), elsewhere, quiet=True)
    half = tmp_path / "half"
    shutil.copytree(home / "vanilla-s42", half)
    (half / "result.json").unlink()
    shutil.rmtree(half / "checkpoints")
    for path in (home / "vanilla-s42/checkpoints").iterdir():
        if path.name.endswith("09"):
            shutil.copytree(path, half / "checkpoints" / path.name)
    run, target = str(home / "vanilla-s42"), ["--on", str(home / "space")]
    for words, sentence in (
        ([run], "Name pretrained runs and a target"),
        ([*target], "Name pretrained runs and a target"),
        ([run, "--on", str(home / "village")], "is the corpus that the runs were trained on"),
        ([run, str(elsewhere), *target], "were trained on different corpora"),
        ([run, run, *target], "are both seed 42 of 'vanilla'"),
        ([str(half), *target], "is not finished: `stepformer resume"),
        ([run, *target, "--native", "lr=0.1"], "lr belongs to the one AdamW"),
        ([run, *target, "stepz=3"], "Did you mean 'steps'?"),
        ([run, *target, "seed=3"], "Give the seeds with --seeds"),
        ([run, *target, "--baseline", "tmm"], "'tmm' is not among vanilla"),
        ([run, *target, "--seeds", "3"], "belong to --pretrain"),
        ([run, "--pretrain", "vanilla"], "--pretrain makes its own runs"),
        (["--pretrain", "vanilla", "--corpora", "tales:moon", "tales:space", "--seeds", "x"], "'x' are no seeds"),
        (["--pretrain", "vanilla", "--corpora", "tales:village"], "Name two different corpora"),
        (["--pretrain", "vanilla", "--corpora", "tales:moon", "tales:space"], "have no dialect 'moon'"),
        (["--pretrain", "vanilla", "--corpora", "tales", "tales:space", "dialect=space"], "--corpora names the two"),
    ):
        assert main(["finetune", *words, "--out", str(tmp_path / "study"), "--quiet"]) == 2, words
        assert sentence in capsys.readouterr().err


def test_a_study_whose_sources_were_trained_again_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(home / "vanilla-s42", tmp_path / "vanilla-s42")
    command = ["finetune", str(source), "--on", str(home / "space"), "--out", str(tmp_path / "study"), "--quiet"]
    command += ["steps=2", "eval_tokens=128"]
    assert main(command) == 0
    assert main([*command, "lr=0.5"]) == 2
    assert "was trained with other settings" in capsys.readouterr().err
    trained_again(source)
    assert main(command) == 2
    assert "began with other weights than the best of" in capsys.readouterr().err


def test_runs_that_were_pretrained_differently_are_told(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "yurii-s42"
    train(small_run(home / "village", "yurii", lr=0.05), other, quiet=True)
    runs = [str(home / "vanilla-s42"), str(other)]
    command = ["finetune", *runs, "--on", str(home / "space"), "--out", str(tmp_path / "study"), "--quiet"]
    assert main([*command, "steps=2", "eval_tokens=256", "device=cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the pretrained runs differ in optim.lr (vanilla 0.02, yurii 0.05)" in said


BOTH = ["--corpora", "tales:village", "tales:space", "--quiet", "n_layer=1", "n_head=2", "context=16", "device=cpu"]


@pytest.mark.slow
def test_both_directions_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPFORMER_HOME", str(tmp_path))
    out = tmp_path / "study"
    command = ["finetune", "--pretrain", "vanilla", "yurii", *BOTH, "--out", str(out), "d_model=16", "batch=4"]
    command += ["steps=3", "eval_tokens=128", "count=40", "tokenizer=bpe:300", "finetune.steps=2"]
    assert main(command) == 0, capsys.readouterr().err
    found = told(out, "forgetting.json")
    assert found["direction"] == "village -> space; space -> village"
    assert [(row["direction"], row["architecture"]) for row in found["rows"]] == [
        (direction, name) for direction in ("village -> space", "space -> village") for name in ("vanilla", "yurii")
    ]
    for run in found["runs"]:
        source, _, target = run["direction"].partition(" -> ")
        assert Path(run["init"]["run"]).parent.name == f"pretrain-{source}"
        assert Path(run["folder"]).parent.name == f"{source}-to-{target}"
        record = told(Path(run["folder"]), "run.json")
        assert load_tokenizer(out / "tokenizer").fingerprint == record["corpus"]["tokenizer"]["fingerprint"]
        assert record["config"]["train"]["steps"] == 2
        assert told(Path(run["init"]["run"]))["steps"] == 3
    assert [row["direction"] for row in told(out / "space-to-village", "forgetting.json")["rows"]] == [
        "space -> village"
    ] * 2
    # with the runs' own optimizers: the pretrained runs are kept, their fine-tuning lies beside
    before = {path: path.stat().st_mtime_ns for path in out.glob("pretrain-*/*/result.json")}
    assert main([*command, "--native"]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("pretrain-*/*/result.json")} == before
    native = told(out, "forgetting-native.json")
    assert native["settings"]["divisor"] == 6
    optim = told(out / "village-to-space-native/yurii-s42", "run.json")["config"]["optim"]
    assert OptimConfig.from_dict(optim).lr == pytest.approx(0.02 / 6)
    capsys.readouterr()
    assert main([*command, "count=41"]) == 2
    assert "was begun with other corpora or another tokenizer" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_forgetting_and_plasticity_are_positive_on_two_dialects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seeds: int
) -> None:
    """Both directions; the models are small and begin with high rates so that they know a dialect soon."""
    monkeypatch.setenv("STEPFORMER_HOME", str(tmp_path))
    out = tmp_path / "study"
    command = ["finetune", "--pretrain", "vanilla", *BOTH, "--seeds", str(seeds), "--out", str(out)]
    command += ["d_model=32", "batch=16"]
    command += ["steps=60", "lr=0.05", "lr_embedding=0.02", "lr_norm=0.02", "eval_tokens=2048", "count=600"]
    command += ["finetune.steps=24", "finetune.lr=0.01", "finetune.eval_tokens=2048", "finetune.eval_every=12"]
    assert main(command) == 0, capsys.readouterr().err
    found = told(out, "forgetting.json")
    directions = ("village -> space", "space -> village")
    assert [(row["direction"], row["n"]) for row in found["rows"]] == [(direction, seeds) for direction in directions]
    assert len(found["runs"]) == 2 * seeds
    for run in found["runs"]:  # about 0.2 each, with a spread of 0.04 over seeds
        assert run["forgetting"] > 0, run
        assert run["plasticity"] > 0, run
    printed = capsys.readouterr().out
    assert "village" in printed
    assert "Forgetting F: rise of the source loss" in printed


def test_a_plot_without_matplotlib_is_a_note(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*args: Any) -> None:
        raise StepformerError("The plot needs matplotlib: pip install 'stepformer[plot]'.")

    monkeypatch.setattr("stepformer.cli.finetune.plot_forgetting", missing)
    words = ["--on", str(home / "space"), "--out", str(tmp_path / "s"), "--quiet", "steps=1", "eval_tokens=128"]
    assert main(["finetune", str(home / "vanilla-s42"), *words]) == 0
    captured = capsys.readouterr()
    assert "note: no plot: The plot needs matplotlib" in captured.err
    assert "forgetting.json" in captured.out


def test_an_imported_run_is_told_what_it_was_trained_on(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = shutil.copytree(home / "vanilla-s42", tmp_path / "imported")
    record = told(imported, "run.json")
    del record["corpus"]
    write_json(imported / "run.json", record)
    (imported / "result.json").unlink()
    command = ["finetune", str(imported), "--on", str(home / "space"), "--out", str(tmp_path / "s"), "--quiet"]
    command += ["steps=1", "eval_tokens=128"]
    assert main(command) == 2
    assert "came without a corpus: say with --source" in capsys.readouterr().err
    assert main([*command, "--source", str(home / "village")]) == 0
    evaluated = told(tmp_path / "s", "forgetting.json")["evaluated"][0]
    assert evaluated["source_hash"] == Corpus(home / "village").split("val").hash
