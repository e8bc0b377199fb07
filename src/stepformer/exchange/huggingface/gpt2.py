"""The plain GPT among our models as a `GPT2LMHeadModel`, for programs that know GPT-2 but not stepformer."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from stepformer.base.errors import InputError
from stepformer.exchange.importing.layouts import gpt2_sources
from stepformer.model import Model
from stepformer.model.config import ModelConfig

ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new"}
FIXED = {"template": "gd", "splitting": "lie-trotter", "attention": "softmax"}
FREE = {"n_layer", "n_head", "d_model", "context", "vocab_size", "real_vocab", "mlp_hidden", "norm_eps", "bias"}
# Keys without any meaning for the plain GPT, or that only say how it is computed.
IDLE = {"aux_init", "aux_norm_gain", "embedding_skip_start", "activation_checkpointing", "attention_backend"}


def refusal(config: ModelConfig) -> str | None:
    """Why an architecture is not GPT-2, or None if it is."""
    for key, value in config.to_dict().items():
        if key in FREE or key in IDLE or FIXED.get(key) == value or (key == "mlp" and value in ACTIVATIONS):
            continue
        return (
            f"{key} = {value!r} has no place in GPT-2, which is gd-lie-trotter with softmax attention, layernorm, "
            "learned positions and GELU: use the format 'stepformer'."
        )
    return None


def as_gpt2(model: Model, **ids: int) -> GPT2LMHeadModel:
    """The same function as a GPT2LMHeadModel; biases that ours does not have are zero."""
    config = model.config
    problem = refusal(config)
    if problem:
        raise InputError(problem)
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
