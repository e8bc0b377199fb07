"""Checkpoints of the Momentum-Streams release: `best.pt`, which says its sizes and its variant by its tensors only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepformer.base.errors import InputError
from stepformer.exchange.importing.gpt2 import gpt_config
from stepformer.exchange.importing.layouts import Layout, Source, count_layers, number, rows_of, whole_number
from stepformer.exchange.importing.reading import Found

HEAD_DIM = 64  # of all published models


@dataclass(frozen=True)
class Variant:
    """One of the release's models: our template, its scalars there, its auxiliary norm and stream."""

    template: str
    scalars: frozenset[str]
    norm: str = ""  # ln_v (of the velocity) or ln_update
    stream: str = ""  # our stream that begins from tables of its own
    tables: str = ""  # their prefix there


def _variant(template: str, scalars: str, norm: str = "ln_update", stream: str = "") -> Variant:
    tables = {"v": "vel_", "m": "m_"}.get(stream, "")
    return Variant(template, frozenset(scalars.split()), norm if scalars else "", stream, tables)


VARIANTS = {
    "vanilla": _variant("gd", ""),
    "yurii": _variant("nesterov", "mu beta gamma", "ln_v", "v"),
    "tmm": _variant("triple-momentum", "mu beta gamma nu", "ln_v", "v"),
    "hb": _variant("heavy-ball", "beta gamma", "ln_v", "v"),
    "adam": _variant("adam", "beta1 beta2 gamma", stream="m"),
    "adamw": _variant("adamw", "beta1 beta2 gamma lambda", stream="m"),
    "muon": _variant("muon", "beta gamma", stream="m"),
    "soap": _variant("soap", "beta1 betaR gamma", stream="m"),
    "rmsprop": _variant("rmsprop", "beta2 gamma"),
    "ortho": _variant("ortho", "gamma"),
    "shampoo": _variant("shampoo", "betaR gamma"),
}
OUR_SCALARS = {"lambda": "lam"}
BLOCK = {
    "attn_norm.weight": "ln_attn.weight",
    "attn.qkv.weight": "attn.qkv_proj.weight",
    "attn.out.weight": "attn.out_proj.weight",
    "mlp_norm.weight": "ln_mlp.weight",
    "mlp.up.weight": "mlp.w1.weight",
    "mlp.down.weight": "mlp.w2.weight",
}


def is_momentum_streams(found: Found) -> bool:
    return not found.config and {"tok_emb.weight", "layers.0.ln_attn.weight"} <= found.tensors.keys()


def momentum_streams(found: Found, heads: int | None) -> Layout:
    """The layout of a variant; the number of heads is not in the file: as given, or width / 64."""
    where = found.path.name
    name, variant = _which(found)
    vocab, width = rows_of(found.tensors, "tok_emb.weight", where)
    context, _ = rows_of(found.tensors, "pos_emb.weight", where)
    if heads is None and width % HEAD_DIM:
        raise InputError(
            f"'{where}' does not say how many heads it has, and its width {width} is no multiple of {HEAD_DIM}: "
            "give --heads."
        )
    n_head = heads or width // HEAD_DIM
    tabled = f"{variant.tables}tok_emb.weight" in found.tensors
    hidden = found.tensors.get("layers.0.mlp.w1.weight")
    config = gpt_config(
        where,
        template=variant.template,
        n_layer=count_layers(found.tensors, r"layers\.(\d+)\."),
        n_head=n_head,
        d_model=width,
        context=context,
        vocab_size=vocab,
        mlp_hidden=hidden.shape[0] if hidden is not None and hidden.ndim == 2 else None,
        aux_init="zero" if variant.stream and not tabled else "embed",
    )
    sources = {
        "embed.tok_emb.weight": Source("tok_emb.weight"),
        "embed.pos_emb.weight": Source("pos_emb.weight"),
        "final_norm.weight": Source("final_ln.weight"),
    }
    if variant.stream and tabled:
        for table in ("tok_emb", "pos_emb"):
            sources[f"aux_embed.{variant.stream}.{table}.weight"] = Source(f"{variant.tables}{table}.weight")
    for i in range(config.n_layer):
        sources |= {f"blocks.{i}.{ours}": Source(f"layers.{i}.{theirs}") for ours, theirs in BLOCK.items()}
        for oracle in ("attn", "mlp") if variant.norm else ():
            sources[f"blocks.{i}.aux_norms.{oracle}.weight"] = Source(f"layers.{i}.{variant.norm}_{oracle}.weight")
            for scalar in variant.scalars:
                ours = f"blocks.{i}.coefficients.{OUR_SCALARS.get(scalar, scalar)}_{oracle}"
                sources[ours] = Source(f"layers.{i}.{scalar}_{oracle}_raw", scalar=True)
    return Layout(
        f"the variant '{name}' of Momentum-Streams",
        config,
        sources,
        step=whole_number(found.beside.get("step")),
        val_loss=number(found.beside.get("val_loss")),
        notes={"variant": name, "heads": f"{n_head}, {'as given' if heads else f'width / {HEAD_DIM}'}"},
    )


def _which(found: Found) -> tuple[str, Variant]:
    """The variant that has these scalars and norms in its first layer."""
    scalars = {m[1] for key in found.tensors if (m := re.fullmatch(r"layers\.0\.(\w+)_attn_raw", key))}
    norms = {m[1] for key in found.tensors if (m := re.fullmatch(r"layers\.0\.(ln_v|ln_update)_attn\.weight", key))}
    for name, variant in VARIANTS.items():
        if variant.scalars == scalars and ({variant.norm} if variant.norm else set()) == norms:
            return name, variant
    given = ", ".join(sorted(scalars)) or "none"
    raise InputError(
        f"'{found.path.name}' looks like Momentum-Streams, but none of its variants has the scalars {given} with the "
        f"norms {', '.join(sorted(norms)) or 'none'}; known are {', '.join(VARIANTS)}."
    )
