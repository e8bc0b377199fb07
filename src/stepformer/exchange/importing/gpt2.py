"""nanoGPT and Hugging Face GPT-2: the plain GPT, with or without biases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stepformer.base.errors import ConfigError, InputError
from stepformer.exchange.importing.layouts import (
    Layout,
    Source,
    count_layers,
    loss_notes,
    number,
    rows_of,
    whole_number,
)
from stepformer.exchange.importing.reading import Found
from stepformer.model.config import ModelConfig

BLOCK = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu_fast": "gelu-tanh", "gelu": "gelu"}
BUFFERS = r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias"  # causal masks


def sources(n_layer: int, prefix: str, *, transposed: bool, bias: bool) -> dict[str, Source]:
    """Where GPT-2 keeps each of our parameters; Conv1D, unlike Linear, stores its matrices transposed."""
    found = {
        "embed.tok_emb.weight": Source(f"{prefix}wte.weight"),
        "embed.pos_emb.weight": Source(f"{prefix}wpe.weight"),
    }
    parts = {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for i in range(n_layer) for ours, theirs in BLOCK.items()}
    for ours, theirs in {**parts, "final_norm": "ln_f"}.items():
        matrix = not ours.endswith("norm")
        found[f"{ours}.weight"] = Source(f"{prefix}{theirs}.weight", transposed=transposed and matrix)
        if bias:
            found[f"{ours}.bias"] = Source(f"{prefix}{theirs}.bias")
    return found


def is_nanogpt(found: Found) -> bool:
    return not found.config and "transformer.wte.weight" in found.tensors


def nanogpt(found: Found, heads: int | None) -> Layout:
    """A `ckpt.pt` of nanoGPT: `model`, `model_args`, `iter_num`, `best_val_loss`."""
    where, args = found.path.name, found.beside.get("model_args")
    args = args if isinstance(args, Mapping) else {}
    vocab, width = rows_of(found.tensors, "transformer.wte.weight", where)
    context, _ = rows_of(found.tensors, "transformer.wpe.weight", where)
    given = args.get("n_head", heads)
    if given is None:
        raise InputError(f"'{where}' has no model_args, which would say how many heads it has: give --heads.")
    config = gpt_config(
        where,
        n_layer=count_layers(found.tensors, r"transformer\.h\.(\d+)\."),
        n_head=given,
        d_model=width,
        context=context,
        vocab_size=vocab,
        bias="transformer.ln_f.bias" in found.tensors,
    )
    check_sizes(where, config, args, context="block_size")
    return Layout(
        "a nanoGPT checkpoint",
        config,
        sources(config.n_layer, "transformer.", transposed=False, bias=config.bias),
        step=whole_number(found.beside.get("iter_num")),
        val_loss=number(found.beside.get("best_val_loss")),
        head="lm_head.weight",
        ignored=BUFFERS,
    )


def huggingface(found: Found) -> Layout:
    """A Hugging Face GPT-2: config.json and weights, with or without the prefix `transformer.`."""
    where, config = str(found.path), found.config
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise InputError(
            f"activation_function = '{activation}' in '{where}' has no counterpart here; understood are "
            f"{', '.join(ACTIVATIONS)}."
        )
    for key, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(key, needed) != needed:
            raise InputError(f"{key} = {config[key]} in '{where}' has no counterpart here.")
    prefix = "transformer." if "transformer.wte.weight" in found.tensors else ""
    vocab, width = rows_of(found.tensors, f"{prefix}wte.weight", where)
    context, _ = rows_of(found.tensors, f"{prefix}wpe.weight", where)
    made = gpt_config(
        where,
        n_layer=count_layers(found.tensors, rf"{re.escape(prefix)}h\.(\d+)\."),
        n_head=config.get("n_head", config.get("num_attention_heads", 12)),
        d_model=width,
        context=context,
        vocab_size=vocab,
        mlp=ACTIVATIONS[activation],
        mlp_hidden=config.get("n_inner"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        bias=True,
    )
    check_sizes(where, made, config, context="n_positions")
    return Layout(
        "a Hugging Face GPT-2",
        made,
        sources(made.n_layer, prefix, transposed=True, bias=made.bias),
        step=whole_number(found.facts.get("step")),
        val_loss=number(found.facts.get("val_loss")),
        head="lm_head.weight",
        ignored=BUFFERS,
        notes={**loss_notes(found.facts), "biases": about_biases(found.tensors)},
    )


def about_biases(tensors: Mapping[str, Tensor]) -> str:
    """What became of them: a model without any has more parameters as GPT-2, which always has biases."""
    biases = [value for name, value in tensors.items() if name.endswith(".bias") and not re.fullmatch(BUFFERS, name)]
    if not biases or any(bool(value.any()) for value in biases):
        return "kept"
    count = sum(value.numel() for value in biases)
    return f"kept; all {count:,} are zero, as GPT-2's form adds them to a model that has none"


def check_sizes(where: str, config: ModelConfig, said: Mapping[str, Any], context: str) -> None:
    """Refuse a file whose settings and tensors are not of one size; `context` is its word for that."""
    names = {"n_layer": "n_layer", "d_model": "n_embd", "context": context, "vocab_size": "vocab_size"}
    for ours, theirs in names.items():
        if said.get(theirs) not in (None, getattr(config, ours)):
            raise InputError(
                f"'{where}' says {theirs} = {said[theirs]}, but its tensors have {getattr(config, ours)}: its parts do "
                "not belong together."
            )


def gpt_config(where: str, **settings: Any) -> ModelConfig:
    try:
        return ModelConfig(**settings)
    except ConfigError as error:
        raise InputError(f"'{where}' describes a model that cannot be built: {error.problems[0]}") from None
