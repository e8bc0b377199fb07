"""A corpus, a run and an exported model that version 0.5.0 wrote: read, resumed, with the same numbers.

Made there, in fp64 on a CPU, and only its paths taken out:

    stepformer prepare tales --count 60 --tokenizer bytes --out corpus
    stepformer train yurii corpus=corpus n_layer=2 n_head=2 d_model=8 context=32 batch=4 steps=12 save_every=6 keep=3
        eval_every=6 eval_tokens=1024 precision=fp64 value_residual=free embedding_skip=true --out run --quiet
    stepformer export run --out export
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import stepformer as sf
from stepformer.data.corpus import Corpus
from stepformer.exchange.importing import import_checkpoint

WRITTEN = Path(__file__).parents[1] / "recorded" / "version-0.5.0"
LOSS = 5.4526720589093625  # of its result.json
GREEDY = "taaaaaaaaaaaaaaa"  # after 'Once upon'
# fp64, and sums in another order where torch or the CPU is another one
EXACT = {"rel": 1e-11}


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(WRITTEN, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    record = json.loads(Path("run/run.json").read_text())
    record["corpus"]["folder"] = str(tmp_path / "old" / "corpus")
    Path("run/run.json").write_text(json.dumps(record))
    return tmp_path / "old"


def test_the_corpus(old: Path) -> None:
    found = Corpus(old / "corpus")
    found.verify()
    assert (len(found.split("train")), len(found.split("val"))) == (62199, 1446)


def test_the_run(old: Path) -> None:
    found, run = sf.evaluate_run(old / "run")
    assert found.val_loss == pytest.approx(LOSS, **EXACT)
    prompt = [run.tokenizer.eot, *run.tokenizer.encode("Once upon")]
    written = run.model.generate([prompt], max_new_tokens=16, temperature=0.0).tokens[0]
    assert run.tokenizer.decode(written) == GREEDY


def test_resumed_from_the_middle(old: Path) -> None:
    for later in ("checkpoints/step-00000012", "checkpoints/best-00000012"):
        shutil.rmtree(old / "run" / later)
    (old / "run" / "result.json").unlink()
    assert sf.resume(old / "run")["val_loss"] == pytest.approx(LOSS, **EXACT)


def test_the_export(old: Path) -> None:
    import_checkpoint(old / "export", old / "imported")
    mine, its = sf.load_run(old / "imported").model, sf.load_run(old / "run").model
    x = torch.arange(32)[None]
    assert torch.equal(mine(x).logits, its(x).logits)


@pytest.mark.slow
def test_the_export_in_transformers(old: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import stepformer.exchange.huggingface  # noqa: F401

    model = transformers.AutoModelForCausalLM.from_pretrained(str(old / "export"))
    x = torch.arange(32)[None]
    with torch.no_grad():
        found = model(x).logits
    its = sf.load_run(old / "run").model.float()
    assert torch.allclose(found.float(), its(x).logits, atol=1e-6)  # fp32
