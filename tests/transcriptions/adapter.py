"""Hands a stepformer model's parameters to the transcriptions; the one file here that knows both sides."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor

from stepformer.model import Model
from stepformer.model.config import declared_options
from stepformer.rules.coefficients import CoefficientBank
from transcriptions import connections, rivals, rules
from transcriptions.attend import attention
from transcriptions.parts import Memory, mlp, visible_tokens

# Options that say how something is computed, not what; and those spelled differently on the other side.
NOT_A_RULE = {"attention_backend", "chunk", "query_chunk", "h0", "learned_kappa", "learned_steps"}
SPELLED = {"step_gradient": "clock_gradient", "memory": "alpha_k"}


def rule_of(model: Model) -> dict[str, Any]:
    """A config in the vocabulary of the transcriptions."""
    config = model.config
    options = {SPELLED.get(key, key): config.option(key) for key in declared_options(config) if key not in NOT_A_RULE}
    fields = ("template", "splitting", "attention", "mlp", "norm", "n_head", "positions", "value_residual")
    extras = ("value_tables", "embedding_skip", "logit_softcap", "document_separator")
    extras += ("output_norm", "scale", "denseformer", "dilation", "period", "unet")
    rule = {key: getattr(config, key) for key in (*fields, *extras)}
    if options.get("etd") == "lawson":
        options["etd_start"] = "lawson"  # the integrating factor from the first layer on
    return {**rule, **options}


def weights_of(model: Model) -> dict[str, Any]:
    """The model's own parameters (not copies: gradients flow to them) under the transcriptions' names."""
    w: dict[str, Any] = {"tok_emb": model.embed.tok_emb.weight}
    if model.embed.pos_emb is not None:
        w["pos_emb"] = model.embed.pos_emb.weight
    for name, tables in model.aux_embed.items():
        several = model.config.template in connections.TEMPLATES
        prefix = "value" if name == "value_tables" else f"aux_{name}" if several else "aux"
        w[f"{prefix}_tok_emb"] = tables.tok_emb.weight
        if tables.pos_emb is not None:
            w[f"{prefix}_pos_emb"] = tables.pos_emb.weight
    if model.lm_head is not None:
        w["head"] = model.lm_head.weight
    gained = model.config.norm == "layernorm"
    if gained:
        w["final_norm"] = model.final_norm.weight
    w["blocks"] = []
    for block in model.blocks:
        layer: dict[str, Any] = {
            "up": block.mlp.up.weight,
            "down": block.mlp.down.weight,
            "aux_norm": {key: norm.weight for key, norm in block.aux_norms.items()},
            "coef": {**raw_of(block.coefficients), **raw_of(block.extras)},
            "arrays": raw_of(block.arrays),
            "coef_value": {spell(k): v for k, v in block.coefficients.pinned.items()},
            "attn_coef": raw_of(getattr(block.attn, "coefficients", None)),
            **attention_of(block.attn),
        }
        if gained:
            layer |= {"attn_norm": block.attn_norm.weight, "mlp_norm": block.mlp_norm.weight}
        w["blocks"].append(layer)
    return w


def spell(key: str) -> str:
    """A coefficient's name on the other side (lambda is a Python keyword; gd's step sizes are alpha and beta)."""
    steps = {"step": "alpha", "step_attn": "alpha", "step_mlp": "beta"}
    return steps.get(key) or ("lambda" + key[3:] if key.split("_")[0] == "lam" else key)


def raw_of(bank: CoefficientBank | None) -> dict[str, Any]:
    return {} if bank is None else {spell(key): bank.get_parameter(key) for key in bank.specs}


def attention_of(attn: Any) -> dict[str, Any]:
    linear = {"kernel": "A", "value": "V"} if "kernel" in dict(attn.named_children()) else {"value": "value"}
    names = {"qkv": "qkv", "out": "out", "query": "query", "key": "key", "root": "root", "ratio_map": "ratio_map"}
    table = getattr(attn, "prior_table", None)
    return {
        theirs: getattr(attn, ours).weight
        for ours, theirs in {**names, **linear}.items()
        if getattr(attn, ours, None) is not None
    } | ({} if table is None else {"prior_table": table})


def transcribe(model: Model, tokens: Tensor) -> Tensor | None:
    """Logits by the transcribed equations, or None for an architecture that is not transcribed."""
    config = model.config
    if config.template in RIVALS and not config.extras and not config.bias and config.mlp in rules.CHOICES["mlp"]:
        return transcribe_rival(model, tokens)
    known = (config.template, config.splitting) in rules.LAYERS
    shipped = config.attention in rules.CHOICES["attention"]
    if config.scale == "scalar" and config.template != "gd":
        return None
    if model.config.extras or not known or not shipped or config.mlp not in rules.CHOICES["mlp"] or config.bias:
        return None
    return rules.logits(tokens, weights_of(model), rule_of(model))


def transcribe_rival(model: Model, tokens: Tensor) -> Tensor:
    """Logits of a rule that is transcribed as a walk through all oracle calls."""
    w, own = weights_of(model), rule_of(model)
    rule = rules.complete_rule({**own, "template": "gd"})
    rule["memory"] = Memory(visible_tokens(tokens, rule["document_separator"]))
    if rule["value_tables"]:
        rule["memory"].value_rows = rules.embed(tokens, w, "value_", rule)
    oracles: list[rivals.Function] = []
    for b in w["blocks"]:
        both = [partial(attention, b=b, rule=rule), partial(mlp, b=b, rule=rule)]
        oracles += both if own["splitting"] == "lie-trotter" else [lambda x, both=both: both[0](x) + both[1](x)]
    return rules.head(RIVALS[own["template"]](model, rules.embed(tokens, w, "", rule), oracles), w, rule)


def attention_residuals(model: Model, x: Tensor, oracles: list[rivals.Function]) -> Tensor:
    arrays = [dict(block.arrays.named_parameters()) for block in model.blocks]
    vectors = [own[key] for own in arrays for key in ("w_attn", "w_mlp", "w_both", "w", "w_out") if key in own]
    number = model.config.option("blocks")
    if number:
        return rivals.attnres_blocks(x, oracles, vectors, number, times_sources=True)
    return rivals.attnres(x, oracles, vectors, times_sources=True)


RIVALS = {"attnres": attention_residuals}


def transcribe_hybrid(model: Model, tokens: Tensor, momentum_layers: Collection[int]) -> Tensor:
    """Logits of hybrid inference by the transcribed equations."""
    return rules.hybrid_logits(tokens, weights_of(model), rule_of(model), momentum_layers)
