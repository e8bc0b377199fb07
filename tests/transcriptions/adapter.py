"""Hands a stepformer model's parameters to the transcriptions; the one file here that knows both sides."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from stepformer.model import Model
from transcriptions import rules


def rule_of(model: Model) -> dict[str, Any]:
    """A config in the vocabulary of the transcriptions."""
    config = model.config
    keys = ("order", "k", "velocity_norm", "final_drift")
    options = {key: value for key, value in config.options_of("splitting").items() if key in keys}
    return {
        "template": config.template,
        "splitting": config.splitting,
        "norm": config.norm,
        "n_head": config.n_head,
        **options,
    }


def weights_of(model: Model) -> dict[str, Any]:
    """The model's own parameters (not copies: gradients flow to them) under the transcriptions' names."""
    w: dict[str, Any] = {"tok_emb": model.embed.tok_emb.weight, "pos_emb": model.embed.pos_emb.weight}
    for tables in model.aux_embed.values():
        w["aux_tok_emb"], w["aux_pos_emb"] = tables.tok_emb.weight, tables.pos_emb.weight
    gained = model.config.norm == "layernorm"
    if gained:
        w["final_norm"] = model.final_norm.weight
    w["blocks"] = []
    for block in model.blocks:
        spell = lambda key: key.replace("lam", "lambda")  # noqa: E731  (lambda is a Python keyword)
        coefficients = {spell(k): block.coefficients.get_parameter(k) for k in block.coefficients.specs}
        layer = {
            "qkv": block.attn.qkv.weight,
            "out": block.attn.out.weight,
            "up": block.mlp.up.weight,
            "down": block.mlp.down.weight,
            "aux_norm": {key: norm.weight for key, norm in block.aux_norms.items()},
            "coef": coefficients,
            "coef_value": {spell(k): v for k, v in block.coefficients.pinned.items()},
        }
        if gained:
            layer |= {"attn_norm": block.attn_norm.weight, "mlp_norm": block.mlp_norm.weight}
        w["blocks"].append(layer)
    return w


def transcribe(model: Model, tokens: Tensor) -> Tensor | None:
    """Logits by the transcribed equations, or None for an architecture that is not transcribed."""
    config = model.config
    known = (config.template, config.splitting) in rules.LAYERS
    plain = config.attention == "softmax" and config.mlp == "gelu" and config.positions == "learned"
    if not known or not plain or config.bias:
        return None
    return rules.logits(tokens, weights_of(model), rule_of(model))


def transcribe_hybrid(model: Model, tokens: Tensor, momentum_layers: Collection[int]) -> Tensor:
    """Logits of hybrid inference by the transcribed equations."""
    return rules.hybrid_logits(tokens, weights_of(model), rule_of(model), momentum_layers)
