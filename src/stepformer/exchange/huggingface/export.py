"""A run as a folder for the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from stepformer.base import documents, files
from stepformer.base.errors import InputError, StepformerError
from stepformer.base.version import __version__
from stepformer.data.tokenizers import END_OF_TEXT, Tokenizer, byte_of_letter, merges_of
from stepformer.exchange import whole
from stepformer.exchange.huggingface.card import model_card, validation
from stepformer.exchange.huggingface.modeling import StepformerForCausalLM
from stepformer.exchange.importing.layouts import gpt2_sources
from stepformer.exchange.importing.reading import RECORD
from stepformer.model import Model
from stepformer.training.checkpoints import weights_sha256
from stepformer.training.loading import LoadedRun, load_run

# Names that an export may have; a folder with anything else in it, a repository's .git say, is not replaced.
OWN = re.compile(
    r"README\.md|stepformer\.json|config\.json|generation_config\.json|modeling_stepformer\.py|vocab\.json|merges\.txt"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|model(-\d+-of-\d+)?\.safetensors"
    r"|model\.safetensors\.index\.json|plugins"
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
    real, size = loaded.config.model.real_vocab, loaded.config.model.vocab_size
    padding = list(range(real or size, size)) if form == "gpt2" else []
    model.generation_config = GenerationConfig(**ids, **({"suppress_tokens": padding} if padding else {}))
    with whole(out.resolve()) as folder, quiet_progress():  # a link stays one
        model.save_pretrained(folder)
        save_tokenizer(loaded.tokenizer, folder, loaded.config.model.context)
        for name, source in loaded.folder.sources():  # to be read: nothing imports them from here
            files.write_text(folder / name, source.read_text(errors="replace"))
        files.write_text(folder / "README.md", model_card(loaded, gpt2=form == "gpt2"))
        vouched = {p.name: files.sha256(p) for p in sorted(folder.iterdir()) if VOUCHED.fullmatch(p.name)}
        files.write_json(folder / RECORD, {**facts_of(loaded, form), "files": vouched})
    return out


def _check_result(run: LoadedRun) -> None:
    """The weights after the last step must be those that the run ended with."""
    path = run.folder.result
    result = documents.read(path, documents.RESULT) if path.is_file() else {}
    ended = result.get("steps") == run.step
    if ended and weights_sha256(dict(run.model.named_parameters())) != result["weights_sha256"]:
        raise InputError(
            f"The run '{run.folder.path}' ended with other weights (SHA-256 {result['weights_sha256'][:12]}) than its "
            f"checkpoint of step {run.step} has."
        )


def facts_of(run: LoadedRun, form: str) -> dict[str, Any]:
    """What `stepformer import` wants to know about the run; nothing about the machine it is on."""
    corpus = run.record.get("corpus") or run.record.get("imported", {}).get("corpus", {})
    return {
        "format": documents.EXPORT.format,
        "stepformer": __version__,
        "form": form,
        "model": run.config.model.to_dict(),
        "title": run.config.title,
        "run": run.record.get("id", ""),
        **({} if run.known_step is None else {"step": run.step}),
        **{key: value for key, value in validation(run).items() if key != "tokens"},
        "tokenizer": run.tokenizer.describe(),
        "corpus": {"splits": corpus["splits"]} if "splits" in corpus else {},
        "weights_sha256": weights_sha256(dict(run.model.named_parameters())),
    }


def check_target(out: Path) -> None:
    """Refuse a place that holds something other than an earlier export."""
    if out.exists() and not out.is_dir():
        raise InputError(f"'{out}' is a file: name a folder.")
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    foreign = [name for name in names if not OWN.fullmatch(name)] if RECORD in names else names
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


# A tokenizer with the same ids, as a tokenizer.json.


def as_transformers_tokenizer(tokenizer: Tokenizer, context: int | None = None) -> PreTrainedTokenizerFast:
    """The same tokenizer for `transformers`; end of text begins, ends and pads, on the left as generation needs it.

    Unlike ours it reads "<|endoftext|>" in a text as that token, unless called with `split_special_tokens=True`.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=as_tokenizers(tokenizer),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=context,
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    as_transformers_tokenizer(tokenizer, context).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # the name of the class that transformers 4 and 5 both know
    files.write_json(path, {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}, sealed=False)


def as_tokenizers(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer in the form of the package `tokenizers`: a byte-level BPE; bytes are one without merges."""
    pieces = [tokenizer.piece(i) for i in range(tokenizer.eot)]
    letters = {byte: letter for letter, byte in byte_of_letter().items()}

    def spelled(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    merges = [(spelled(left), spelled(right)) for left, right in merges_of(pieces)]
    model = models.BPE(vocab={spelled(piece): i for i, piece in enumerate(pieces)}, merges=merges)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    if made.token_to_id(END_OF_TEXT) != tokenizer.eot:
        raise StepformerError(
            f"The tokenizer {tokenizer.name} ends a text with id {tokenizer.eot}, which is not the one after all "
            "others: it cannot be written as a Hugging Face tokenizer."
        )
    return made


# The plain GPT among our models, for programs that know GPT-2 but not stepformer.

ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "relu2": "relu2"}
FIXED = {"template": "gd", "splitting": "lie-trotter", "attention": "softmax"}
FREE = {"n_layer", "n_head", "d_model", "context", "vocab_size", "real_vocab", "mlp_hidden", "norm_eps", "bias", "head"}
# Keys without any meaning for the plain GPT, or that only say how it is computed.
IDLE = {
    *("aux_init", "aux_norm_gain", "embedding_skip_start", "output_norm_gain", "output_init"),
    *("activation_checkpointing", "attention_backend"),
}


def as_gpt2(model: Model, **ids: int) -> GPT2LMHeadModel:
    """The same function as a GPT2LMHeadModel; biases that ours does not have are zero."""
    config = model.config
    for key, value in config.to_dict().items():
        if key not in FREE | IDLE and FIXED.get(key) != value and not (key == "mlp" and value in ACTIVATIONS):
            raise InputError(
                f"{key} = {value!r} has no place in GPT-2, which is gd-lie-trotter with softmax attention, layernorm, "
                "learned positions and GELU or ReLU^2: use the format 'stepformer'."
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
        tie_word_embeddings=config.head == "tied",
        **ids,
    )
    made = GPT2LMHeadModel(theirs).to(model.embed.tok_emb.weight.dtype)
    made.load_state_dict(gpt2_weights(model), strict=True)
    return made.eval()


def gpt2_weights(model: Model) -> dict[str, Tensor]:
    """Our weights under GPT-2's names."""
    ours = {name: p.detach() for name, p in model.named_parameters()}
    weights = {"lm_head.weight": ours.get("lm_head.weight", ours["embed.tok_emb.weight"])}
    for name, source in gpt2_sources(model.config.n_layer, "transformer.", transposed=True, bias=True).items():
        weight = ours[f"{name.rpartition('.')[0]}.weight"]
        value = ours[name] if name in ours else torch.zeros(weight.shape[0], dtype=weight.dtype)
        weights[source.name] = value.T.contiguous() if source.transposed else value
    return weights
