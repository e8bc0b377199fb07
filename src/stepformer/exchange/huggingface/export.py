"""A run as a folder for the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from stepformer.base import documents, files
from stepformer.base.errors import InputError
from stepformer.base.version import __version__
from stepformer.exchange import whole
from stepformer.exchange.huggingface.card import model_card, validation
from stepformer.exchange.huggingface.modeling import StepformerForCausalLM
from stepformer.exchange.huggingface.tokenizer import save_tokenizer
from stepformer.exchange.importing.layouts import gpt2_sources
from stepformer.model import Model
from stepformer.training.checkpoints import weights_sha256
from stepformer.training.run import LoadedRun, load_run

FACTS = "stepformer.json"  # marks a folder of ours, and tells `stepformer import` about the run
FORMAT = 1
# Names that an export may have; a folder with anything else in it, a repository's .git say, is not replaced.
OWN = re.compile(
    r"README\.md|stepformer\.json|config\.json|generation_config\.json|modeling_stepformer\.py|vocab\.json|merges\.txt"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|model(-\d+-of-\d+)?\.safetensors"
    r"|model\.safetensors\.index\.json"
)
VOUCHED = re.compile(
    r"config\.json|model.*\.safetensors|model\.safetensors\.index\.json|tokenizer\.json|vocab\.json|merges\.txt"
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_run(
    run: str | Path,
    out: str | Path,
    which: str = "best",
    *,
    dtype: Literal["fp32", "bf16"] | None = None,
    form: Literal["stepformer", "gpt2"] = "stepformer",
    allow_nan: bool = False,
) -> Path:
    """Write a run's best or last weights as a Hugging Face folder with tokenizer and model card; returns the folder.

    `form = "gpt2"` writes a GPT2LMHeadModel, which needs no stepformer to load; only the plain GPT has that form. The
    folder appears whole or not at all; an earlier export in its place is replaced, anything else is not. What a killed
    export left beside it is cleared away, and what that one had already moved is put back first.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype = '{dtype}' should be 'fp32' or 'bf16'.")
    if form not in ("stepformer", "gpt2"):
        raise InputError(f"format '{form}' should be 'stepformer' or 'gpt2'.")
    out = Path(out)
    files.clear_left(out.resolve())
    check_target(out)
    loaded = load_run(run, which, device="cpu", allow_nan=allow_nan)
    _check_result(loaded)
    if dtype is not None:
        loaded.model.to(DTYPES[dtype])
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), loaded.tokenizer.eot)
    model = as_gpt2(loaded.model, **ids) if form == "gpt2" else StepformerForCausalLM.of(loaded.model, **ids)
    settings = dict(ids)
    real, size = loaded.config.model.real_vocab, loaded.config.model.vocab_size
    if form == "gpt2" and real is not None and real < size:
        settings["suppress_tokens"] = list(range(real, size))  # type: ignore[assignment]
    model.generation_config = GenerationConfig(**settings)
    with whole(out.resolve()) as folder, quiet_progress():  # a link stays one
        model.save_pretrained(folder)
        save_tokenizer(loaded.tokenizer, folder, loaded.config.model.context)
        files.write_text(folder / "README.md", model_card(loaded, gpt2=form == "gpt2"))
        vouched = {p.name: files.sha256(p) for p in sorted(folder.iterdir()) if VOUCHED.fullmatch(p.name)}
        files.write_json(folder / FACTS, {**facts_of(loaded, form), "files": vouched})
    return out


def _check_result(run: LoadedRun) -> None:
    """The weights after the last step must be those that the run ended with."""
    path = run.folder.result
    result = documents.read(path, documents.RESULT) if path.is_file() else {}
    if (
        result.get("steps") == run.step
        and weights_sha256(dict(run.model.named_parameters())) != result["weights_sha256"]
    ):
        raise InputError(
            f"The run '{run.folder.path}' ended with other weights (SHA-256 {result['weights_sha256'][:12]}) than its "
            f"checkpoint of step {run.step} has."
        )


def facts_of(run: LoadedRun, form: str) -> dict[str, Any]:
    """What `stepformer import` wants to know about the run; nothing about the machine it is on."""
    known = run.record.get("corpus") or run.record.get("imported", {}).get("corpus", {})
    corpus = {"splits": known["splits"]} if "splits" in known else {}
    return {
        "format": FORMAT,
        "stepformer": __version__,
        "form": form,
        "model": run.config.model.to_dict(),
        "title": run.config.title,
        "run": run.record.get("id", ""),
        "step": run.step,
        **{key: value for key, value in validation(run).items() if key != "tokens"},
        "tokenizer": run.tokenizer.describe(),
        "corpus": corpus,
        "weights_sha256": weights_sha256(dict(run.model.named_parameters())),
    }


def check_target(out: Path) -> None:
    """Refuse a place that holds something other than an earlier export."""
    if out.exists() and not out.is_dir():
        raise InputError(f"'{out}' is a file: name a folder.")
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    foreign = [name for name in names if not OWN.fullmatch(name)] if FACTS in names else names
    if foreign:
        raise InputError(f"'{out}' holds other files ('{foreign[0]}'): choose another --out.")


@contextlib.contextmanager
def quiet_progress() -> Iterator[None]:
    """Without the progress bars of `transformers`, which say less than they cost in lines."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


# The plain GPT among our models, for programs that know GPT-2 but not stepformer.

ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new"}
FIXED = {"template": "gd", "splitting": "lie-trotter", "attention": "softmax"}
FREE = {"n_layer", "n_head", "d_model", "context", "vocab_size", "real_vocab", "mlp_hidden", "norm_eps", "bias"}
# Keys without any meaning for the plain GPT, or that only say how it is computed.
IDLE = {"aux_init", "aux_norm_gain", "embedding_skip_start", "activation_checkpointing", "attention_backend"}


def as_gpt2(model: Model, **ids: int) -> GPT2LMHeadModel:
    """The same function as a GPT2LMHeadModel; biases that ours does not have are zero."""
    config = model.config
    for key, value in config.to_dict().items():
        if key not in FREE | IDLE and FIXED.get(key) != value and not (key == "mlp" and value in ACTIVATIONS):
            raise InputError(
                f"{key} = {value!r} has no place in GPT-2, which is gd-lie-trotter with softmax attention, layernorm, "
                "learned positions and GELU: use the format 'stepformer'."
            )
    theirs = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.context,
        n_embd=config.d_model,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_inner=config.mlp_hidden,
        activation_function=ACTIVATIONS[config.mlp],
        layer_norm_epsilon=config.norm_eps,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **ids,
    )
    made = GPT2LMHeadModel(theirs).to(model.embed.tok_emb.weight.dtype)
    made.load_state_dict(gpt2_weights(model), strict=True)
    return made.eval()


def gpt2_weights(model: Model) -> dict[str, Tensor]:
    """Our weights under GPT-2's names."""
    ours = {name: p.detach() for name, p in model.named_parameters()}
    weights = {"lm_head.weight": ours["embed.tok_emb.weight"]}
    for name, source in gpt2_sources(model.config.n_layer, "transformer.", transposed=True, bias=True).items():
        weight = ours[f"{name.rpartition('.')[0]}.weight"]
        value = ours[name] if name in ours else torch.zeros(weight.shape[0], dtype=weight.dtype)
        weights[source.name] = value.T.contiguous() if source.transposed else value
    return weights
