"""`stepformer export`: a folder that `transformers` loads, with the run's tokenizer and a card with its numbers."""

from __future__ import annotations

import json
import os
import random
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, pipeline

import stepformer as sf
from draws import shifted
from helpers import shake, tiny, tokens
from real_data import GPT2, needs_gpt2
from runs import make_corpus, small_run
from stepformer.base import files
from stepformer.cli import main
from stepformer.data.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    byte_of_letter,
    gpt2_tokenizer,
    merges_of,
    train_bpe,
    valid,
)
from stepformer.exchange.huggingface import export, export_run
from stepformer.exchange.huggingface.export import as_gpt2, save_tokenizer
from stepformer.exchange.importing import import_checkpoint
from stepformer.measure import measured
from stepformer.training import load_run, train

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run on bytes, whose vocabulary is padded from 257 to 320."""
    folder = tmp_path_factory.mktemp("runs")
    make_corpus(folder / "secret-place" / "corpus")
    train(small_run(folder / "secret-place" / "corpus", "yurii"), folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(run, tmp_path_factory.mktemp("exported") / "model")


def test_the_exported_model_is_the_run(run: Path, exported: Path) -> None:
    loaded = load_run(run, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(exported)
    ids = tokens(2, 16, vocab=257)
    assert model.dtype == torch.float64
    assert torch.equal(model(ids).logits, loaded.model(ids).logits)
    assert {p.name for p in exported.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_stepformer.py",
        "stepformer.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    settings = json.loads((exported / "generation_config.json").read_text())
    assert settings["eos_token_id"] == settings["bos_token_id"] == settings["pad_token_id"] == 256


def test_text_goes_in_and_comes_out_as_in_ours(run: Path, exported: Path) -> None:
    loaded = load_run(run, device="cpu")
    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForCausalLM.from_pretrained(exported)
    texts = ["The cat", "A", "Once upon"]
    made = model.generate(**tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=6, do_sample=False)
    own = loaded.model.generate([loaded.tokenizer.encode(text) for text in texts], temperature=0, max_new_tokens=6)
    found = tokenizer.batch_decode(made, skip_special_tokens=True)
    assert found == [text + loaded.tokenizer.decode(ids) for text, ids in zip(texts, own.tokens, strict=True)]
    assert tokenizer.model_max_length == loaded.config.model.context


def test_pipeline(exported: Path) -> None:
    write = pipeline("text-generation", model=str(exported), device="cpu")
    torch.manual_seed(shifted(0))
    made = write(["The", "A cat"], max_new_tokens=5, do_sample=True, batch_size=2)
    assert [row[0]["generated_text"][: len(p)] for row, p in zip(made, ["The", "A cat"], strict=True)] == [
        "The",
        "A cat",
    ]
    torch.manual_seed(shifted(0))
    long = write("The cat", max_new_tokens=500)[0]["generated_text"]  # ends with the context
    assert 7 < len(long.encode()) <= 7 + 16 * 3  # a byte that is no UTF-8 becomes three


def test_last_weights_and_other_precisions(run: Path, tmp_path: Path) -> None:
    ids = tokens(2, 16, vocab=257)
    last = load_run(run, "last", device="cpu").model(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / "l", "last"))(ids).logits, last)
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / dtype, dtype=dtype), dtype="auto")
        assert model.dtype == kind


def test_the_card_has_the_runs_numbers_and_no_path(run: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "stepformer"
    assert header["pipeline_tag"] == "text-generation"
    assert "license" not in header
    assert "nesterov-lie-trotter" in header["tags"]
    loaded = load_run(run, device="cpu")
    result = json.loads((run / "result.json").read_text())
    assert f"Validation loss {result['best_val_loss']:.4f}" in card
    assert f"on {result['val_tokens']:,} tokens of the split `{result['val_hash']}`" in card
    for text in (
        sf.preset("yurii").equation,
        f"{loaded.model.num_parameters():,} parameters",
        loaded.record["corpus"]["splits"]["train"]["hash"],
        loaded.tokenizer.fingerprint,
        f"| config hash | {result['config_hash']} |",
        f"| tokens seen | {loaded.step * 8 * 16:,} |",
        "@misc{zimin2026yuriiformer",
        torch.__version__,
        "stepformer import FOLDER --out",
        "import stepformer.exchange.huggingface",
        "With transformers and stepformer (`pip install -e '.[hub]'` in a clone of its repository), FOLDER",
    ):
        assert text in card, text
    everything = card + (exported / "stepformer.json").read_text() + (exported / "config.json").read_text()
    assert "secret-place" not in everything
    assert str(run.parent) not in everything


def card_with(run: Path, out: Path, results: dict[str, Any], settings: dict[str, dict[str, Any]]) -> str:
    """The card of a run while it has these measurements."""
    paths = [
        measured.save(run, kind, step=8, settings=settings.get(kind, {}), result=results[kind]) for kind in results
    ]
    try:
        return (export_run(run, out) / "README.md").read_text()
    finally:
        for path in paths:
            path.unlink()


def test_the_card_shows_what_was_measured(run: Path, tmp_path: Path) -> None:
    values = [{"value": 39.53465, "converged": True}, {"value": -1.25, "converged": False}]
    found = {"persistence": 12.05628, "sum_log_rms_gain": 2.697149, "mean_spread": 2.8969}
    layers = [{"layer": 0, "block": {"k": 64}, "oracle": {"k": 64}}]
    results = {
        "hessian": {
            "loss": 2.18524,
            "eigenvalues": values,
            "trace": {"mean": 388.2533, "standard_error": 31.063},
            "trace_per_parameter": 0.0026179,
            "curve": {"range": 1.05714, "loss": [1.0, 2.0]},
            "tokens": 2048,
            "method": "lanczos",
            "settings": {"seed": 0},
        },
        "jacobian": {"summary": {"oracle": found, "block": found}, "layers": layers, "tokens": 1024},
        "depth": {
            "layers": [{"entropy": [1.0, 2.0], "capped_rows": 0.1}, {"entropy": [2.0, 3.0], "capped_rows": 0.0}],
            "tokens": 512,
        },
        "songs": {"number": 1.0},
    }
    settings = {"hessian": {"probes": 3, "seed": 0, "corpus": "/secret-place/other corpus"}}
    card = card_with(run, tmp_path / "m", results, settings)
    part = card.split("### Hessian of the loss\n")[1].split("\n###")[0]
    assert part.count("\n|") == 8  # six numbers
    assert "`stepformer diagnose RUN --hessian 'corpus=other corpus' probes=3`, weights of step 8." in part
    assert "An eigenvalue with ? had not converged." in part
    for row in (
        "| loss, nats per token | 2.185 |",
        "| largest eigenvalues | 39.53, -1.25? |",
        "| trace | 388.3 ± 31 |",
        "| trace per parameter | 0.002618 |",
        "| range of the loss curve | 1.057 |",
        "| tokens | 2,048 |",
    ):
        assert row in part
    assert "| block | 12.06 | 2.697 | 2.897 |\n| oracle | 12.06 | 2.697 | 2.897 |" in card
    assert "of singular value 64," in card
    assert "| mean attention entropy, nats | 2 |\n| capped rows, mean over layers | 5.00 % |" in card
    assert "Also measured, in the run's own files: songs." in card
    assert "lanczos" not in card
    assert "secret-place" not in card


def test_the_card_shows_tasks_and_perplexities(run: Path, tmp_path: Path) -> None:
    source = {"kind": "files", "scored": {"file": "x", "sha256": "d2d12e59"}}
    entry = {"task": "arc_easy", "shots": 0, "items": 200, "of": 2376, "cut": 4, "source": source}
    entry |= {"acc": 0.25, "acc_stderr": 0.0306, "acc_norm": 0.26, "acc_norm_stderr": 0.031}
    plain = {"mode": "blocks", "stride": None, "nats": 2.0, "bits_per_byte": 1.5, "tokens": 4096, "bytes": 9000}
    texts = [{**plain, "name": f"t{i}", "perplexity": 7.5 + i, "hash": f"{i:016d}"} for i in range(10)]
    results = {"tasks": {"tasks": {"arc_easy@0": entry}}, "perplexity": {"texts": texts}}
    card = card_with(run, tmp_path / "m", results, {"tasks": {"lm_eval": "0.4.13", "weights": "abcd"}})
    assert "`stepformer eval RUN --tasks arc_easy --shots 0`, weights of step 8. ± is one standard error." in card
    assert "| arc\\_easy | 0 | 200 of 2,376 | 25.00 ± 3.06 | 26.00 ± 3.10 |" in card
    assert "| t1 | blocks | 2.0000 | 8.5 | 1.5 | 4,096 | `0000000000000001` |" in card
    assert "2 more are in the run's own file." in card
    assert "trained or validated on" not in card
    texts[1]["seen"] = True
    card = card_with(run, tmp_path / "seen", results, {})
    assert "| t1 \\* | blocks |" in card
    assert "| t2 | blocks |" in card
    assert "\\* The run was trained or validated on this text." in card
    assert "| t8 |" not in card
    assert "d2d12e59" not in card


def test_the_card_says_what_rounding_changed(run: Path, exported: Path, tmp_path: Path) -> None:
    assert "rounded to bf16" not in (exported / "README.md").read_text()
    rounded = (export_run(run, tmp_path / "r", dtype="bf16") / "README.md").read_text()
    assert "before they were rounded to bf16" in rounded


def test_files_may_be_read_like_any_new_file(run: Path, tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            out = export_run(run, tmp_path / f"{mask}")
            again = import_checkpoint(out, tmp_path / f"run{mask}").folder
        finally:
            os.umask(before)
        assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {mode}
        weights = list(again.rglob("*.safetensors"))
        assert [stat.S_IMODE(path.stat().st_mode) for path in weights] == [mode]
        assert not list(tmp_path.rglob(".tmp-*"))


def test_python_in_the_card_runs(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = (exported / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace('"FOLDER"', repr(str(exported)))
    exec(code.replace("Once upon a time", "Once"), {})
    assert capsys.readouterr().out.startswith("<|endoftext|>Once")


def test_python_in_the_docs_runs(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "share.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "yurii-tales").symlink_to(exported)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        for text in ("The queen", "One day a little robot", "Once upon a time"):
            block = block.replace(text, "Once")  # the model of the tests has a context of 16 bytes
        exec(block, {})
    assert capsys.readouterr().out.count("Once") == 3


def test_folders_are_whole_or_not_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "place" / "model"
    export_run(run, out)
    (out / "README.md").write_text("stays if the next fails")

    def fails(*args: Any, **kwargs: Any) -> str:
        raise sf.StepformerError("no card today")

    with monkeypatch.context() as patch:
        patch.setattr(export, "model_card", fails)
        with pytest.raises(sf.StepformerError, match="no card today"):
            export_run(run, out)
        with pytest.raises(sf.StepformerError, match="no card today"):
            export_run(run, tmp_path / "other")
    assert (out / "README.md").read_text() == "stays if the next fails"
    assert [p.name for p in out.parent.iterdir()] == ["model"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["place"]
    rename = files.rename

    def fails_to_rename(source: Path, target: Path) -> None:
        if target == out and "old" not in source.name:
            raise OSError("not today")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files, "rename", fails_to_rename)
        with pytest.raises(sf.StepformerError, match="not today"):
            export_run(run, out)
    assert (out / "README.md").read_text() == "stays if the next fails"
    assert [p.name for p in out.parent.iterdir()] == ["model"]
    export_run(run, out)  # an earlier export is replaced
    assert (out / "README.md").read_text().startswith("---")
    assert [p.name for p in out.parent.iterdir()] == ["model"]
    (tmp_path / "link").symlink_to(out)
    export_run(run, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "place"]
    (out / ".git").mkdir()
    with pytest.raises(sf.InputError, match=r"holds other files \('.git'\)"):
        export_run(run, out)


def test_what_export_refuses(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    (tmp_path / "free").mkdir()
    for arguments, sentence in (
        ([str(run), "--out", str(tmp_path / "mine")], "holds other files ('thesis.tex')"),
        ([str(run), "--out", str(tmp_path / "file")], "is a file: name a folder"),
        ([str(tmp_path / "nowhere"), "--out", str(tmp_path / "free")], "There is no run folder"),
        (
            [str(run), "--out", str(tmp_path / "free"), "--format", "gpt2"],
            "template = 'nesterov' has no place in GPT-2",
        ),
    ):
        assert main(["export", *arguments]) == 2
        assert sentence in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert main(["export", str(run), "--out", str(tmp_path / "free"), "--dtype", "fp32"]) == 0
    assert "model.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": True, "mlp": "gelu-tanh", "mlp_hidden": 20, "norm_eps": 1e-4},
        {"mlp": "relu2", "head": "untied", "output_init": "zero"},
    ],
)
def test_gpt2_form_gives_the_same_logits(settings: dict[str, Any]) -> None:
    ours = shake(tiny("vanilla", real_vocab=9, **settings))
    theirs = as_gpt2(ours)
    ids = tokens()
    # fp64 on both sides; their softmax and norms sum in another order
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"splitting": "parallel"},
        {"norm": "rmsnorm"},
        {"positions": "rotary", "n_head": 2},
        {"qk_norm": True},
        {"mlp": "swiglu"},
        {"alpha": 0.5},
        {"logit_softcap": 5.0},
        {"value_residual": "fixed"},
        {"value_tables": True},
        {"embedding_skip": True},
        {"document_separator": 1},
        {"weight_sharing": "attention"},
    ],
)
def test_what_is_no_gpt2_is_refused_in_that_form(settings: dict[str, Any]) -> None:
    key = next(iter(settings))
    with pytest.raises(sf.InputError, match=f"{key} = .* has no place in GPT-2"):
        as_gpt2(tiny("vanilla", **settings))


def test_a_run_in_gpt2_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_corpus(tmp_path / "corpus")
    train(small_run(tmp_path / "corpus", "vanilla", steps=4, precision="fp32"), tmp_path / "run", quiet=True)
    out = export_run(tmp_path / "run", tmp_path / "out", form="gpt2")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert type(model) is GPT2LMHeadModel
    ids = tokens(2, 16, vocab=257)
    ours = load_run(tmp_path / "run", device="cpu").model(ids).logits
    torch.testing.assert_close(model(ids).logits, ours, atol=1e-5, rtol=0)  # fp32, logits of about 1
    with torch.no_grad():
        model.transformer.wte.weight[257:] = 50 * model.transformer.wte.weight[:63]
    made = model.generate(ids[:, :8], max_new_tokens=6, do_sample=True)
    assert int(made.max()) < 257
    assert "library_name: transformers" in (out / "README.md").read_text()
    assert main(["import", str(out), "--out", str(tmp_path / "again")]) == 0
    said = capsys.readouterr().out
    added = sum(p.numel() for name, p in model.named_parameters() if name.endswith(".bias"))
    assert f"biases: kept; all {added:,} are zero, as GPT-2's form adds them to a model that has none" in said
    assert re.search(r"validation loss \d\.\d{4} as recorded, on [\d,]+ tokens\n", said)
    model.transformer.ln_f.bias.data[0] = 1.0
    model.save_pretrained(out)
    with pytest.raises(sf.InputError, match=r"model\.safetensors' is not what was exported"):
        import_checkpoint(out, tmp_path / "other")
    (out / "stepformer.json").unlink()
    with pytest.warns(UserWarning, match=r"has no stepformer\.json"):
        assert import_checkpoint(out, tmp_path / "other").record["biases"] == "kept"


def awkward(count: int = 150) -> list[str]:
    """Text that tokenizers stumble over, and random text from all planes of Unicode."""
    fixed = [
        "",
        " ",
        "   \n\n\t  x ",
        "a  b   c    ",
        "it's we'll they'VE I'm'd o'clock",
        "1234567 3.14 1,000",
        "naïve café e\u0301",
        "日本語テキスト русский العربية",
        "🤖🧑‍🚀👩🏽‍💻",
        "\u00a0\u2003x\u200b",
        "\x00\x01\x7f",
        "\r\n\r\n",
        "a\ufffdb",
        "\u017f \u01c5 Ⅷ ½ ² ᾳ",
        "<|endoftext|> is text",
        valid("lone \ud800 surrogate \udfff"),
        " " * 300 + "x",
    ]
    draw = random.Random(shifted(0))
    planes = [(0x20, 0x7F), (0x80, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000), (0x20, 0x21), (0x0A, 0x0B)]
    mixed = [
        "".join(chr(draw.randrange(*draw.choice(planes))) for _ in range(draw.randrange(1, 30))) for _ in range(count)
    ]
    return fixed + mixed


def trained() -> Tokenizer:
    return train_bpe(600, ["the cat sat on the mat, it's naïve; 日本語 🤖 and 123 dogs  ran\n"] * 3 + awkward(60))


@pytest.mark.parametrize("kind", ["bytes", "bpe", pytest.param("gpt2", marks=needs_gpt2)])
def test_tokenizers_agree_with_ours(kind: str, tmp_path: Path) -> None:
    ours = {"bytes": ByteTokenizer, "bpe": trained, "gpt2": lambda: gpt2_tokenizer(str(GPT2))}[kind]()
    save_tokenizer(ours, tmp_path, 32)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in awkward():
        ids = theirs(text, split_special_tokens=True)["input_ids"]
        assert ids == ours.encode(text), text
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == ours.eot
    assert len(theirs) == ours.vocab_size
    assert theirs("a<|endoftext|>b")["input_ids"] == [*ours.encode("a"), ours.eot, *ours.encode("b")]
    assert set(theirs("a")) == {"input_ids", "attention_mask"}
    draw = random.Random(shifted(1))
    for _ in range(100):  # half characters too
        ids = [draw.randrange(ours.eot) for _ in range(draw.randrange(1, 12))]
        assert theirs.decode(ids) == ours.decode(ids)


@needs_gpt2
def test_merges_are_those_of_the_vocabulary_file() -> None:
    ours = gpt2_tokenizer(str(GPT2))
    lines = (GPT2 / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    letters = byte_of_letter()
    listed = [tuple(bytes(letters[c] for c in part) for part in line.split(" ")) for line in lines if line]
    assert merges_of([ours.piece(i) for i in range(ours.eot)]) == listed


def test_a_piece_that_nothing_makes_is_refused() -> None:
    with pytest.raises(sf.InputError, match="cannot be made by joining"):
        merges_of([*(bytes([i]) for i in range(256)), b"abc"])
