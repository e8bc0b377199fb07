"""`stepformer import`: checkpoints of other programs give their own logits here, and nothing in them is run."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import stepformer as sf
from draws import seeded, shifted
from helpers import TINY, shake, tiny, tokens
from runs import make_corpus, small_run
from stepformer.cli import main
from stepformer.data.tokenizers import ByteTokenizer, load_tokenizer
from stepformer.exchange.importing import import_checkpoint
from stepformer.training import evaluate_run, load_run, resume, train
from transcriptions import rules
from transcriptions.plain_gpt import PlainGPT

SIZE: dict[str, Any] = {**TINY, "vocab_size": 300, "context": 10}
IDS = tokens(2, 10, vocab=257)
# Both sides compute in fp64 and sum in different order; fp32 files carry 24 bits into 300 logits of size 1 to 10.
EXACT, SINGLE = 1e-10, 1e-4


def random_like(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = seeded(3)
    return {n: (0.3 * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype) for n, s in shapes.items()}


def hub() -> Any:
    """Our Hugging Face classes, where transformers is installed."""
    pytest.importorskip("transformers")
    return importlib.import_module("stepformer.exchange.huggingface")


def logits_of(run: Path) -> Tensor:
    with torch.no_grad():
        return load_run(run, device="cpu").model(IDS).logits


# nanoGPT


def nanogpt(path: Path, *, bias: bool, prefix: str = "", dtype: torch.dtype = torch.float64, **more: Any) -> PlainGPT:
    """A file in nanoGPT's layout with the weights of a plain GPT; a bias is added where its layers have one."""
    plain = PlainGPT(**SIZE).double()
    if bias:
        for module in plain.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.bias = nn.Parameter(torch.zeros(module.weight.shape[0], dtype=torch.float64))
    generator = seeded(1)
    with torch.no_grad():
        for parameter in plain.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_((parameter + 0.3 * noise).to(dtype))
    names = {
        "tok_emb": "transformer.wte",
        "pos_emb": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "attn_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "blocks": "transformer.h",
    }
    state = {}
    for name, value in plain.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[prefix + name] = value.to(dtype)
    state[f"{prefix}lm_head.weight"] = state[f"{prefix}transformer.wte.weight"]
    state[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 10, 10)  # the causal mask of older versions
    args = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 10, "vocab_size": 300, "bias": bias, "dropout": 0.0}
    content = {
        "model": state,
        "model_args": args,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(3.25),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 6e-4, "betas": (0.9, 0.95)}]},
        "config": {"dataset": "openwebtext"},
    }
    torch.save({**content, **more}, path)
    return plain


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(bias: bool, prefix: str, tmp_path: Path) -> None:
    plain = nanogpt(tmp_path / "ckpt.pt", bias=bias, prefix=prefix)
    made = import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "run", tokenizer="bytes")
    torch.testing.assert_close(logits_of(tmp_path / "run"), plain(IDS), atol=EXACT, rtol=0)
    run = load_run(tmp_path / "run", device="cpu")
    assert (run.step, run.config.model.bias, run.config.model.template) == (2000, bias, "gd")
    assert run.config.model.real_vocab == 257
    assert made.record["val_loss"] == 3.25
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(record["imported"]["files"]) == ["ckpt.pt"]
    assert str(tmp_path) not in json.dumps(record["imported"])


def test_an_imported_gpt_is_gd_lie_trotter_with_its_weights_bit_by_bit(tmp_path: Path) -> None:
    plain = nanogpt(tmp_path / "ckpt.pt", bias=False, dtype=torch.float32).float()
    import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "run", tokenizer="bytes")
    model = load_run(tmp_path / "run", device="cpu").model
    assert sf.catalogue.preset_of(model.config) == sf.preset("gd-lie-trotter")
    assert torch.equal(model(IDS).logits, plain(IDS))


def test_half_precision_becomes_fp32(tmp_path: Path) -> None:
    plain = nanogpt(tmp_path / "ckpt.pt", bias=True, dtype=torch.bfloat16)
    import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "run", tokenizer="bytes")
    assert load_run(tmp_path / "run", device="cpu").model.embed.tok_emb.weight.dtype == torch.float32
    torch.testing.assert_close(logits_of(tmp_path / "run").double(), plain(IDS), atol=SINGLE, rtol=0)


# Momentum-Streams

STREAMS: dict[str, tuple[str, list[str], str, str, str]] = {
    # variant: our preset, raw scalars, auxiliary norm, prefix of the auxiliary tables, our template
    "vanilla": ("vanilla", [], "", "", "gd"),
    "yurii": ("yurii", ["mu", "beta", "gamma"], "ln_v", "vel_", "nesterov"),
    "tmm": ("tmm", ["mu", "beta", "gamma", "nu"], "ln_v", "vel_", "triple-momentum"),
    "hb": ("hb", ["beta", "gamma"], "ln_v", "vel_", "heavy-ball"),
    "adam": ("adam", ["beta1", "beta2", "gamma"], "ln_update", "m_", "adam"),
    "adamw": ("adamw", ["beta1", "beta2", "gamma", "lambda"], "ln_update", "m_", "adamw"),
    "muon": ("muon", ["beta", "gamma"], "ln_update", "m_", "muon"),
    "soap": ("soap", ["beta1", "betaR", "gamma"], "ln_update", "m_", "soap"),
    "rmsprop": ("rmsprop", ["beta2", "gamma"], "ln_update", "", "rmsprop"),
    "ortho": ("ortho", ["gamma"], "ln_update", "", "ortho"),
    "shampoo": ("shampoo", ["betaR", "gamma"], "ln_update", "", "shampoo"),
    "tmm-zero": ("tmm-zero", ["mu", "beta", "gamma", "nu"], "ln_v", "", "triple-momentum"),
}


def streams(variant: str) -> dict[str, Tensor]:
    """Random weights in the release's layout, written from its description."""
    _, scalars, norm, tables, _ = STREAMS[variant]
    d, V, T = 12, 300, 10
    shapes: dict[str, tuple[int, ...]] = {"tok_emb.weight": (V, d), "pos_emb.weight": (T, d), "final_ln.weight": (d,)}
    if tables:
        shapes |= {f"{tables}tok_emb.weight": (V, d), f"{tables}pos_emb.weight": (T, d)}
    for i in range(2):
        layer = {
            "ln_attn.weight": (d,),
            "attn.qkv_proj.weight": (3 * d, d),
            "attn.out_proj.weight": (d, d),
            "ln_mlp.weight": (d,),
            "mlp.w1.weight": (4 * d, d),
            "mlp.w2.weight": (d, 4 * d),
            **{f"{norm}_{oracle}.weight": (d,) for oracle in ("attn", "mlp") if norm},
            **{f"{s}_{o}_raw": () if s == "lambda" else (1,) for s in scalars for o in ("attn", "mlp")},
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return random_like(shapes)


def transcribed(variant: str, w: dict[str, Tensor]) -> Tensor:
    """The release's equations on the file's tensors, without any code of ours."""
    _, scalars, norm, tables, template = STREAMS[variant]
    weights: dict[str, Any] = {
        "tok_emb": w["tok_emb.weight"],
        "pos_emb": w["pos_emb.weight"],
        "final_norm": w["final_ln.weight"],
        "blocks": [],
    }
    if tables:
        weights |= {"aux_tok_emb": w[f"{tables}tok_emb.weight"], "aux_pos_emb": w[f"{tables}pos_emb.weight"]}
    for i in range(2):
        at = f"layers.{i}."
        block = {
            "attn_norm": w[f"{at}ln_attn.weight"],
            "qkv": w[f"{at}attn.qkv_proj.weight"],
            "out": w[f"{at}attn.out_proj.weight"],
            "mlp_norm": w[f"{at}ln_mlp.weight"],
            "up": w[f"{at}mlp.w1.weight"],
            "down": w[f"{at}mlp.w2.weight"],
            "aux_norm": {o: w[f"{at}{norm}_{o}.weight"] for o in ("attn", "mlp") if norm},
            "coef": {f"{s}_{o}": w[f"{at}{s}_{o}_raw"] for s in scalars for o in ("attn", "mlp")},
        }
        weights["blocks"].append(block)
    return rules.logits(IDS, weights, {"template": template, "n_head": 3, "splitting": "lie-trotter"})


@pytest.mark.parametrize("variant", STREAMS)
def test_momentum_streams(variant: str, tmp_path: Path) -> None:
    weights = streams(variant)
    prefixed = {f"_orig_mod.{name}": value for name, value in weights.items()} if variant == "adam" else weights
    content = {"step": 900, "model": prefixed, "val_loss": 1.078, "train_loss": 1.1, "optimizer_muon": {}}
    torch.save(content, tmp_path / "best.pt")
    made = import_checkpoint(tmp_path / "best.pt", tmp_path / "run", tokenizer="bytes", heads=3)
    run = load_run(tmp_path / "run", device="cpu")
    assert sf.catalogue.preset_of(run.config.model) == sf.preset(STREAMS[variant][0])
    assert (run.step, made.record["val_loss"]) == (900, 1.078)
    assert made.record["variant"] == variant.removesuffix("-zero")
    expected = transcribed(variant, weights)
    found = logits_of(tmp_path / "run")
    assert (found - expected).abs().max() <= EXACT * expected.abs().max()


def test_heads_are_the_width_over_64_unless_given(tmp_path: Path) -> None:
    sizes = {36: 384, 48: 512, 12: 128, 300: 300, 10: 10}
    shapes = {name: tuple(sizes[n] for n in value.shape) for name, value in streams("vanilla").items()}
    torch.save({"model": random_like(shapes), "step": 1}, tmp_path / "best.pt")
    made = import_checkpoint(tmp_path / "best.pt", tmp_path / "run", tokenizer="bytes")
    assert load_run(tmp_path / "run", device="cpu").config.model.n_head == 2
    assert made.record["heads"] == "2, width / 64"
    torch.save({"model": streams("vanilla"), "step": 1}, tmp_path / "odd.pt")
    with pytest.raises(sf.InputError, match="width 12 is no multiple of 64: give --heads"):
        import_checkpoint(tmp_path / "odd.pt", tmp_path / "none", tokenizer="bytes")


# Hugging Face GPT-2


def gpt2_folder(folder: Path, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 12, "n_positions": 10, "vocab_size": 300}
    config = transformers.GPT2Config(**{**sizes, "bos_token_id": 256, "eos_token_id": 256, **settings})
    torch.manual_seed(shifted(0))
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation_function": "gelu", "n_inner": 20, "layer_norm_epsilon": 1e-3},
        {"activation_function": "relu2", "tie_word_embeddings": False},
    ],
)
def test_gpt2_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = gpt2_folder(tmp_path / "gpt2", **settings)
    made = import_checkpoint(tmp_path / "gpt2", tmp_path / "run", tokenizer="bytes")
    assert made.record["kind"] == "a Hugging Face GPT-2"
    with torch.no_grad():
        torch.testing.assert_close(logits_of(tmp_path / "run"), theirs(IDS).logits, atol=SINGLE, rtol=0)
        ours = load_run(tmp_path / "run", device="cpu").model.double()(IDS).logits
        torch.testing.assert_close(ours, theirs.double()(IDS).logits, atol=EXACT, rtol=0)


def test_other_forms_of_gpt2(tmp_path: Path) -> None:
    """Without the prefix and with buffers, as old files are; as a .bin; in shards."""
    theirs = gpt2_folder(tmp_path / "gpt2")
    with torch.no_grad():
        expected = theirs(IDS).logits
    weights = load_file(tmp_path / "gpt2" / "model.safetensors")
    old = {name.removeprefix("transformer."): value for name, value in weights.items() if name != "lm_head.weight"}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 10, 10), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    for form in ("bare", "bin", "shards"):
        folder = tmp_path / form
        folder.mkdir()
        (folder / "config.json").write_text((tmp_path / "gpt2" / "config.json").read_text())
        if form == "bare":
            save_file(old, folder / "model.safetensors")
        elif form == "bin":
            torch.save(old, folder / "pytorch_model.bin")
        else:
            theirs.save_pretrained(folder, max_shard_size="10KB")
            assert not (folder / "model.safetensors").exists()
        import_checkpoint(folder, tmp_path / f"run-{form}", tokenizer="bytes")
        torch.testing.assert_close(logits_of(tmp_path / f"run-{form}"), expected, atol=SINGLE, rtol=0)


# Our own


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    make_corpus(folder / "corpus", tokenizer="bpe:300")
    train(small_run(folder / "corpus", "adam"), folder / "run", quiet=True)
    return folder


def test_exported_and_imported_again(trained: Path, tmp_path: Path) -> None:
    hub().export_run(trained / "run", tmp_path / "out")
    made = import_checkpoint(tmp_path / "out", tmp_path / "again")
    first, again = load_run(trained / "run", device="cpu"), load_run(tmp_path / "again", device="cpu")
    ids = tokens(2, 16, vocab=300)
    assert torch.equal(first.model(ids).logits, again.model(ids).logits)
    assert again.tokenizer.describe() == first.tokenizer.describe()
    assert again.config.model == first.config.model
    assert again.step == first.step
    found, loaded = evaluate_run(tmp_path / "again", corpus=trained / "corpus", tokens=512, device="cpu")
    counted = f"{loaded.model.num_parameters():,} parameters"
    assert repr(loaded) == f"LoadedRun('{tmp_path / 'again'}', step={loaded.step}, {counted})"
    assert found.val_loss == pytest.approx(made.record["val_loss"], abs=1e-12)
    assert made.record["val_hash"] == found.val_hash
    hub().export_run(tmp_path / "again", tmp_path / "out2")  # and once more
    assert (tmp_path / "out2" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()
    assert "Imported by stepformer" in (tmp_path / "out2" / "README.md").read_text()


def test_what_can_be_done_with_an_imported_run(trained: Path, tmp_path: Path, capsys: Any) -> None:
    nanogpt(tmp_path / "ckpt.pt", bias=True, dtype=torch.float32)
    assert main(["import", str(tmp_path / "ckpt.pt"), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 0
    said = capsys.readouterr().out
    assert "is a nanoGPT checkpoint" in said
    assert "validation loss 3.2500 as recorded, tokens not recorded" in said
    assert "biases" not in said
    assert (
        main(["generate", str(tmp_path / "run"), "Hi", "--tokens", "3", "--temperature", "0", "--device", "cpu"]) == 0
    )
    assert capsys.readouterr().out.startswith("Hi")
    with pytest.raises(sf.InputError, match="came without a corpus"):
        evaluate_run(tmp_path / "run")
    corpus = make_corpus(tmp_path / "corpus")
    found, _ = evaluate_run(tmp_path / "run", corpus=corpus.folder, tokens=300, device="cpu")
    assert found.val_loss > 1
    with pytest.raises(sf.InputError, match="weights alone and has no training to continue"):
        resume(tmp_path / "run")
    assert main(["generate", str(tmp_path / "run"), "Hi", "--checkpoint", "last"]) == 2
    assert "has no last checkpoint, only a best one" in capsys.readouterr().err


def test_tokenizers_beside_the_weights_or_named(trained: Path, tmp_path: Path) -> None:
    save_tokenizer = hub().export.save_tokenizer
    bpe = load_tokenizer(trained / "run" / "tokenizer")
    gpt2_folder(tmp_path / "gpt2", vocab_size=320)
    save_tokenizer(bpe, tmp_path / "gpt2")
    import_checkpoint(tmp_path / "gpt2", tmp_path / "beside")
    assert load_run(tmp_path / "beside", device="cpu").tokenizer.fingerprint == bpe.fingerprint
    content = json.loads((tmp_path / "gpt2" / "tokenizer.json").read_text())["model"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vocab.json").write_text(json.dumps({**content["vocab"], "<|endoftext|>": bpe.eot}))
    lines = [" ".join(merge) for merge in content["merges"]]
    (tmp_path / "old" / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]))
    for number, given in enumerate((tmp_path / "old", trained / "run", trained / "corpus", tmp_path / "gpt2")):
        import_checkpoint(tmp_path / "gpt2", tmp_path / f"run{number}", tokenizer=str(given))
        assert load_run(tmp_path / f"run{number}", device="cpu").tokenizer.fingerprint == bpe.fingerprint
    save_tokenizer(ByteTokenizer(), tmp_path / "bytes")
    import_checkpoint(tmp_path / "gpt2", tmp_path / "b", tokenizer=str(tmp_path / "bytes"))
    assert load_run(tmp_path / "b", device="cpu").tokenizer.kind == "bytes"
    for change, sentence in (
        ({"normalizer": {"type": "Lowercase"}}, "not a byte-level BPE with GPT-2's pattern"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "not a byte-level BPE with GPT-2's pattern"),
        ({"added_tokens": [{"id": 1, "content": "<s>"}]}, "special token '<s>'"),
        ({"model": {**content, "merges": content["merges"][::-1]}}, "joins its pieces in another order"),
        ({"model": {"type": "BPE"}}, "cannot be read"),
    ):
        whole = json.loads((tmp_path / "gpt2" / "tokenizer.json").read_text())
        (tmp_path / "old" / "tokenizer.json").write_text(json.dumps({**whole, **change}))
        with pytest.raises(sf.InputError, match=sentence):
            import_checkpoint(tmp_path / "gpt2", tmp_path / "none", tokenizer=str(tmp_path / "old"))


# What is refused


class Malice:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_file_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    nanogpt(tmp_path / "ckpt.pt", bias=False, extra=Malice(trap))
    with pytest.raises(sf.InputError, match="running code from the file"):
        import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "run", tokenizer="bytes")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"model": Malice(trap)}))
    with pytest.raises(sf.InputError, match="no PyTorch zip archive"):
        import_checkpoint(tmp_path / "old.pt", tmp_path / "run", tokenizer="bytes")
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    torch.save({"wte.weight": Malice(trap)}, folder / "pytorch_model.bin")
    with pytest.raises(sf.InputError, match="running code from the file"):
        import_checkpoint(folder, tmp_path / "run", tokenizer="bytes")
    assert not trap.exists()
    torch.load(tmp_path / "ckpt.pt", weights_only=False)
    assert trap.exists(), "the trap works"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    nanogpt(tmp_path / "ckpt.pt", bias=False)
    whole = (tmp_path / "ckpt.pt").read_bytes()
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2] ^= 0xFF
    for content, sentence in (
        (whole[: len(whole) // 2], "no PyTorch zip archive, or only the beginning"),
        (bytes(spoilt), "is damaged"),
        (b"", "no PyTorch zip archive"),
        (b"not a checkpoint at all", "no PyTorch zip archive"),
    ):
        (tmp_path / "bad.pt").write_bytes(content)
        with pytest.raises(sf.InputError, match=sentence):
            import_checkpoint(tmp_path / "bad.pt", tmp_path / "run", tokenizer="bytes")
    with zipfile.ZipFile(tmp_path / "bad.pt", "w") as archive:
        archive.writestr("holiday.txt", "photos")
    with pytest.raises(sf.InputError, match="is damaged, or not written by torch"):
        import_checkpoint(tmp_path / "bad.pt", tmp_path / "run", tokenizer="bytes")
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def change(path: Path, **changes: Any) -> Path:
    """A copy of a nanoGPT file with some tensors replaced, or gone (None)."""
    content = torch.load(path, weights_only=True)
    for name, value in changes.items():
        key = name.replace("__", ".")
        content["model"].pop(key, None)
        if value is not None:
            content["model"][key] = value
    torch.save(content, path.with_name("changed.pt"))
    return path.with_name("changed.pt")


def test_every_tensor_must_find_its_place(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    nanogpt(path, bias=False)
    for changes, sentence in (
        ({"transformer__h__1__ln_2__weight": None}, r"lacks 'transformer.h.1.ln_2.weight' \(12,\)"),
        ({"adapter__weight": torch.zeros(3, 4)}, r"a place for its 'adapter.weight' \(3, 4\)"),
        ({"transformer__ln_f__weight": torch.zeros(13)}, r"is float32 \(13,\) instead of \(12,\)"),
        ({"transformer__ln_f__weight": torch.zeros(12, dtype=torch.long)}, r"is int64 \(12,\) instead of"),
        ({"transformer__h__2__ln_2__weight": torch.zeros(12)}, "n_layer = 2, but its tensors have 3"),
        ({"lm_head__weight": torch.zeros(300, 12, dtype=torch.float64)}, "a head of its own"),
        ({"transformer__wpe__weight": None}, "no table 'transformer.wpe.weight'"),
    ):
        with pytest.raises(sf.InputError, match=sentence):
            import_checkpoint(change(path, **changes), tmp_path / "run", tokenizer="bytes")
    assert not (tmp_path / "run").exists()


def test_what_else_import_refuses(trained: Path, tmp_path: Path, capsys: Any) -> None:
    nanogpt(tmp_path / "ckpt.pt", bias=False)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    (tmp_path / "empty").mkdir()
    for name, config in {
        "llama": {"model_type": "llama"},
        "relu": {"model_type": "gpt2", "activation_function": "relu"},
        "listed": {"model_type": "gpt2", "activation_function": ["gelu"]},
        "scaled": {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
        "broken": {"model_type": "stepformer", "template": "nonsense"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file({"wte.weight": torch.zeros(3, 3)}, tmp_path / name / "model.safetensors")
    (tmp_path / "llama" / "other.pt").write_bytes(b"")
    torch.save({"weights.of.mine": torch.zeros(2)}, tmp_path / "unknown.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"model": streams("adam") | {"layers.0.kappa_attn_raw": torch.zeros(1)}}, tmp_path / "new.pt")
    ckpt = str(tmp_path / "ckpt.pt")
    for words, sentence in (
        ([str(tmp_path / "nowhere"), "--tokenizer", "bytes"], "There is no file or folder"),
        ([str(trained / "run")], "is a run already"),
        ([str(tmp_path / "empty")], "has no config.json"),
        ([str(tmp_path)], "Did you mean"),
        ([str(tmp_path / "llama")], "type 'llama'; understood are"),
        ([str(tmp_path / "relu")], "activation_function = 'relu'"),
        ([str(tmp_path / "listed")], "activation_function = '['gelu']'"),
        ([str(tmp_path / "scaled")], "scale_attn_by_inverse_layer_idx = True"),
        ([str(tmp_path / "broken")], "cannot be built here: Unknown template"),
        ([str(tmp_path / "llama" / "model.safetensors")], "weights without their config"),
        ([str(tmp_path / "unknown.pt")], "unknown kind ('weights.of.mine', ...); understood are"),
        ([str(tmp_path / "list.pt")], "holds a list"),
        ([str(tmp_path / "new.pt"), "--heads", "3"], "none of its variants has the scalars"),
        ([ckpt], "does not say which tokenizer its 300 ids belong to"),
        ([ckpt, "--tokenizer", "bpe:400"], "is trained on a corpus"),
        ([ckpt, "--tokenizer", "klingon"], "There is no tokenizer 'klingon'"),
        ([ckpt, "--heads", "0"], "should be at least 1"),
        ([ckpt, "--tokenizer", "bytes", "--heads", "5"], "heads: leave out heads = 5"),
    ):
        assert main(["import", *words, "--out", str(tmp_path / "out")]) == 2, words
        said = capsys.readouterr().err
        assert sentence in said, said
        assert said.count("\n") == 1, said
    assert main(["import", ckpt, "--out", str(tmp_path / "taken"), "--tokenizer", "bytes"]) == 2
    assert "not empty" in capsys.readouterr().err
    nanogpt(tmp_path / "small.pt", bias=False)
    content = torch.load(tmp_path / "small.pt", weights_only=True)
    content["model"] = {k: v[:200] if v.shape[:1] == (300,) else v for k, v in content["model"].items()}
    content["model_args"]["vocab_size"] = 200
    torch.save(content, tmp_path / "small.pt")
    with pytest.raises(sf.InputError, match="has 257 ids, but the model's table has 200 rows"):
        import_checkpoint(tmp_path / "small.pt", tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out").exists()


def test_shards_stay_inside_their_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    index = tmp_path / "model.safetensors.index.json"
    for listed in ("../secret.safetensors", "missing.safetensors"):
        index.write_text(json.dumps({"weight_map": {"wte.weight": listed}}))
        with pytest.raises(sf.InputError, match="which is no file in"):
            import_checkpoint(tmp_path, tmp_path / "run", tokenizer="bytes")
    index.write_text("[]")
    with pytest.raises(sf.InputError, match="has no weight_map"):
        import_checkpoint(tmp_path, tmp_path / "run", tokenizer="bytes")


def test_a_model_of_ones_own_loop_becomes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its step is not known, and nothing says that it is 0."""
    model, corpus = shake(tiny("yurii", vocab_size=257)), make_corpus(tmp_path / "corpus").folder
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        sf.InputError, match=r"in a form that is not read here: .* docs/build-a-model\.md, under 'Save and load'\.$"
    ):
        import_checkpoint(tmp_path / "weights.pt", tmp_path / "run", tokenizer="bytes")
    assert "\n## Save and load\n" in (Path(__file__).parents[2] / "docs/build-a-model.md").read_text()
    hub().StepformerForCausalLM.of(model).save_pretrained(tmp_path / "mine")
    run = str(tmp_path / "run")
    assert main(["import", str(tmp_path / "mine"), "--tokenizer", "bytes", "--out", run]) == 0
    assert "\nstep not recorded\n" in capsys.readouterr().out
    assert torch.equal(load_run(run, device="cpu").model(tokens()).logits, model.eval()(tokens()).logits)
    assert main(["eval", run, "--corpus", str(corpus), "--quiet", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("yurii as imported: loss ")
    assert main(["eval", run, "--corpus", str(corpus), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] is None
    assert main(["eval", run, "--on", str(Path(__file__)), "--quiet", "--device", "cpu"]) == 0
    for folder in ("out", "out2"):
        hub().export_run(run, tmp_path / folder)
        card = (tmp_path / folder / "README.md").read_text()
        assert "These are the weights as they were imported." in card
        assert not re.search(r"\bstep 0\b|\| step \|", card)
        run = tmp_path / f"{folder}-run"
        assert import_checkpoint(tmp_path / folder, run).record["step"] is None


def test_bytes_need_257_rows(tmp_path: Path) -> None:
    hub().StepformerForCausalLM.of(sf.build("yurii", size="tiny", n_layer=1)).save_pretrained(tmp_path / "m")
    with pytest.raises(
        sf.InputError, match=r"257 ids, .* 256 rows: .* a model of bytes is built with vocab_size=257\.$"
    ):
        import_checkpoint(tmp_path / "m", tmp_path / "run", tokenizer="bytes")


def test_an_exported_model_with_other_weights_is_refused(tmp_path: Path) -> None:
    hub().StepformerForCausalLM.of(shake(tiny("yurii", vocab_size=300))).save_pretrained(tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["model.blocks.1.coefficients.mu_attn"]
    save_file(weights, tmp_path / "m" / "model.safetensors")
    with pytest.raises(sf.InputError, match=r"lacks 'model.blocks.1.coefficients.mu_attn' \(1,\)"):
        import_checkpoint(tmp_path / "m", tmp_path / "run", tokenizer="bytes")
