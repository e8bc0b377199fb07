"""Whose checkpoint it is, and for each of our parameters the name it has there.

Known are exported models of ours, nanoGPT and Hugging Face GPT-2 (the plain GPT, with or without biases), and `best.pt`
of the Momentum-Streams release, which says its sizes and its variant by its tensors only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepformer.base.errors import ConfigError, InputError
from stepformer.exchange.importing.reading import Found
from stepformer.model import Model
from stepformer.model.config import ModelConfig
from stepformer.present.tables import listed

UNDERSTOOD = (
    "understood are folders of `stepformer export`, nanoGPT's ckpt.pt, best.pt of Momentum-Streams and Hugging Face "
    "GPT-2 folders"
)


class Source(NamedTuple):
    """Where a parameter is in the file; `transposed` as in GPT-2's Conv1D, `scalar` if () and (1,) are the same."""

    name: str
    transposed: bool = False
    scalar: bool = False


@dataclass
class Layout:
    """A recognised checkpoint: which architecture it is, and where its weights are."""

    kind: str
    config: ModelConfig
    sources: dict[str, Source]
    step: str = "step"  # what it calls the step
    val_loss: str = "val_loss"  # and the loss
    head: str | None = None  # the tied head, if the file has it a second time
    ignored: str = r"(?!)"  # buffers that are no weights
    notes: dict[str, Any] = field(default_factory=dict)


def recognise(found: Found, heads: int | None = None) -> Layout:
    """Whose checkpoint it is, by its content."""
    kind = found.config.get("model_type")
    if kind == "stepformer":
        return exported(found)
    if kind == "gpt2":
        return huggingface(found)
    if kind is not None:
        raise InputError(f"'{found.path}' is a Hugging Face model of type '{kind}'; {UNDERSTOOD}.")
    if not found.config and "transformer.wte.weight" in found.tensors:
        return nanogpt(found, heads)
    if not found.config and {"tok_emb.weight", "layers.0.ln_attn.weight"} <= found.tensors.keys():
        return momentum_streams(found, heads)
    if not found.config and "embed.tok_emb.weight" in found.tensors:
        raise InputError(
            f"'{found.path}' holds the weights of a stepformer model in a form that is not read here: how they become "
            "a run is in docs/build-a-model.md, under 'Save and load'."
        )
    first = ", ".join(f"'{name}'" for name in sorted(found.tensors)[:3])
    raise InputError(f"'{found.path}' holds weights of an unknown kind ({first}, ...); {UNDERSTOOD}.")


def carry(layout: Layout, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Our parameters from a file's tensors, each of which is used exactly once; in fp32, or fp64 if all are."""
    wanted = {name: tuple(p.shape) for name, p in Model(layout.config, device="meta").named_parameters()}
    ignored = {name for name in tensors if re.fullmatch(layout.ignored, name)}
    used = {source.name for source in layout.sources.values()}
    assert wanted.keys() == layout.sources.keys()
    assert len(used) == len(layout.sources)
    missing = [f"'{s.name}' {wanted[ours]}" for ours, s in layout.sources.items() if s.name not in tensors]
    left = [f"'{name}' {tuple(tensors[name].shape)}" for name in tensors.keys() - used - ignored - {layout.head}]
    problems = [f"it lacks {listed(missing, 3)}"] if missing else []
    problems += [f"nothing here has a place for its {listed(sorted(left), 3)}"] if left else []
    carried = {}
    for ours, source in layout.sources.items():
        if source.name not in tensors:
            continue
        value = given = tensors[source.name]
        if source.scalar and value.numel() == 1:
            value = value.reshape(1)
        carried[ours] = value = value.mT if source.transposed and value.ndim == 2 else value
        if tuple(value.shape) != wanted[ours] or not value.is_floating_point():
            kind = f"{value.dtype} {tuple(given.shape)}".removeprefix("torch.")
            shape = wanted[ours][::-1] if source.transposed else wanted[ours]
            problems.append(f"'{source.name}' is {kind} instead of {shape}")
    if problems:
        raise InputError(f"'{where}' looks like {layout.kind}, but {'; '.join(problems[:4])}.")
    table = layout.sources["embed.tok_emb.weight"].name
    if layout.head is not None and layout.head in tensors and not torch.equal(tensors[layout.head], tensors[table]):
        raise InputError(
            f"'{where}' has a head of its own ('{layout.head}' differs from '{table}') and does not say so: without "
            f"tie_word_embeddings = false in its config, the head of {layout.kind} is the token table."
        )
    dtype = torch.float64 if {value.dtype for value in carried.values()} == {torch.float64} else torch.float32
    return {name: value.to(dtype).contiguous() for name, value in carried.items()}


# What the tensors say.


def count_layers(found: Found, pattern: str) -> int:
    """How many layers the names have; `pattern` captures their numbers, which must have no gaps."""
    numbers = {match[1] for name in found.tensors if (match := re.match(pattern, name))}
    if numbers != {str(i) for i in range(len(numbers))}:
        raise InputError(f"The layers of the weights are not numbered from 0 to {len(numbers) - 1}: some are missing.")
    return len(numbers)


def sizes(found: Found, tokens: str, positions: str, layers: str) -> dict[str, int]:
    """Those of a model, from its two tables and the pattern of its layers' names."""
    for name in (tokens, positions):
        if name not in found.tensors or found.tensors[name].ndim != 2:
            raise InputError(f"'{found.where}' has no table '{name}', so its sizes cannot be read.")
    vocab, width = found.tensors[tokens].shape
    context, count = len(found.tensors[positions]), count_layers(found, layers)
    return {"n_layer": count, "d_model": width, "context": context, "vocab_size": vocab}


def built(found: Found, **settings: Any) -> ModelConfig:
    try:
        return ModelConfig(**settings)
    except ConfigError as error:
        raise InputError(f"'{found.where}' describes a model that cannot be built: {error.problems[0]}") from None


# Folders that `stepformer export` wrote, or `save_pretrained` of our Hugging Face class.


def exported(found: Found) -> Layout:
    """Our own names behind `model.`; step and loss from stepformer.json, if it is there."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    try:
        config = ModelConfig.from_dict({key: value for key, value in found.config.items() if key in known})
    except ConfigError as error:
        raise InputError(
            f"'{found.path}' describes a model that cannot be built here: {error.problems[0]} Rules of its own have "
            "to be imported first (--plugin)."
        ) from None
    layers = count_layers(found, r"model\.blocks\.(\d+)\.")
    bare = config.weight_sharing == "oracles" and not layers  # as in training/checkpoints.py
    if layers != config.n_layer and not bare:
        raise InputError(f"'{found.path}' says n_layer = {config.n_layer}, but its weights have {layers} layers.")
    sources = {name: Source(f"model.{name}") for name, _ in Model(config, device="meta").named_parameters()}
    notes = {key: found.facts[key] for key in ("run", "corpus") if found.facts.get(key)}
    return Layout("an exported stepformer model", config, sources, notes=notes)


# GPT-2.

GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu-tanh"),
    **{"gelu": "gelu", "relu2": "relu2"},
}
BUFFERS = r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias"  # causal masks


def gpt2_sources(n_layer: int, prefix: str, *, transposed: bool, bias: bool) -> dict[str, Source]:
    """Where GPT-2 keeps each of our parameters; Conv1D, unlike Linear, stores its matrices transposed."""
    found = {
        "embed.tok_emb.weight": Source(f"{prefix}wte.weight"),
        "embed.pos_emb.weight": Source(f"{prefix}wpe.weight"),
    }
    parts = {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for i in range(n_layer) for ours, theirs in GPT2_BLOCK.items()}
    for ours, theirs in {**parts, "final_norm": "ln_f"}.items():
        matrix = not ours.endswith("norm")
        found[f"{ours}.weight"] = Source(f"{prefix}{theirs}.weight", transposed=transposed and matrix)
        if bias:
            found[f"{ours}.bias"] = Source(f"{prefix}{theirs}.bias")
    return found


def nanogpt(found: Found, heads: int | None) -> Layout:
    """A `ckpt.pt` of nanoGPT: `model`, `model_args`, `iter_num`, `best_val_loss`."""
    args = found.beside.get("model_args")
    args = args if isinstance(args, Mapping) else {}
    n_head = args.get("n_head", heads)
    if n_head is None:
        raise InputError(f"'{found.where}' has no model_args, which would say how many heads it has: give --heads.")
    bias = "transformer.ln_f.bias" in found.tensors
    config = gpt_config(found, "transformer.", args, "block_size", n_head=n_head, bias=bias)
    sources = gpt2_sources(config.n_layer, "transformer.", transposed=False, bias=bias)
    return Layout(
        "a nanoGPT checkpoint", config, sources, "iter_num", "best_val_loss", head="lm_head.weight", ignored=BUFFERS
    )


def huggingface(found: Found) -> Layout:
    """A Hugging Face GPT-2: config.json and weights, with or without the prefix `transformer.`."""
    config = found.config
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise InputError(
            f"activation_function = '{activation}' in '{found.where}' has no counterpart here; understood are "
            f"{', '.join(ACTIVATIONS)}."
        )
    fixed = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    for key, needed in fixed.items():
        if config.get(key, needed) != needed:
            raise InputError(f"{key} = {config[key]} in '{found.where}' has no counterpart here.")
    prefix = "transformer." if "transformer.wte.weight" in found.tensors else ""
    untied = config.get("tie_word_embeddings") is False
    made = gpt_config(
        found,
        prefix,
        config,
        "n_positions",
        n_head=config.get("n_head", config.get("num_attention_heads", 12)),
        mlp=ACTIVATIONS[activation],
        mlp_hidden=config.get("n_inner"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        bias=True,
        head="untied" if untied else "tied",
    )
    sources = gpt2_sources(made.n_layer, prefix, transposed=True, bias=True)
    if untied:
        sources["lm_head.weight"] = Source("lm_head.weight")
    notes = {"biases": about_biases(found.tensors)}
    return Layout(
        "a Hugging Face GPT-2", made, sources, head=None if untied else "lm_head.weight", ignored=BUFFERS, notes=notes
    )


def about_biases(tensors: Mapping[str, Tensor]) -> str:
    """What became of them: a model without any has more parameters as GPT-2, which always has biases."""
    biases = [value for name, value in tensors.items() if name.endswith(".bias") and not re.fullmatch(BUFFERS, name)]
    if not biases or any(bool(value.any()) for value in biases):
        return "kept"
    count = sum(value.numel() for value in biases)
    return f"kept; all {count:,} are zero, as GPT-2's form adds them to a model that has none"


def gpt_config(found: Found, prefix: str, said: Mapping[str, Any], context: str, **settings: Any) -> ModelConfig:
    """What tensors and settings say, which must be of one size; `context` is the file's word for that."""
    own = sizes(found, f"{prefix}wte.weight", f"{prefix}wpe.weight", rf"{re.escape(prefix)}h\.(\d+)\.")
    config = built(found, **own, **settings)
    for ours, size in own.items():
        theirs = {"d_model": "n_embd", "context": context}.get(ours, ours)
        if said.get(theirs) not in (None, size):
            raise InputError(
                f"'{found.where}' says {theirs} = {said[theirs]}, but its tensors have {size}: its parts do not belong "
                "together."
            )
    return config


# Momentum-Streams.


class Variant(NamedTuple):
    """One of the release's models: our template, its scalars there, its auxiliary norm and stream."""

    template: str
    scalars: str = ""
    norm: str = ""  # ln_v (of the velocity) or ln_update
    stream: str = ""  # our stream that begins from tables of its own


VARIANTS = {
    "vanilla": Variant("gd"),
    "yurii": Variant("nesterov", "mu beta gamma", "ln_v", "v"),
    "tmm": Variant("triple-momentum", "mu beta gamma nu", "ln_v", "v"),
    "hb": Variant("heavy-ball", "beta gamma", "ln_v", "v"),
    "adam": Variant("adam", "beta1 beta2 gamma", "ln_update", "m"),
    "adamw": Variant("adamw", "beta1 beta2 gamma lambda", "ln_update", "m"),
    "muon": Variant("muon", "beta gamma", "ln_update", "m"),
    "soap": Variant("soap", "beta1 betaR gamma", "ln_update", "m"),
    "rmsprop": Variant("rmsprop", "beta2 gamma", "ln_update"),
    "ortho": Variant("ortho", "gamma", "ln_update"),
    "shampoo": Variant("shampoo", "betaR gamma", "ln_update"),
}
TABLES = {"v": "vel_", "m": "m_"}  # prefixes of a stream's own
OUR_SCALARS = {"lambda": "lam"}
STREAMS_BLOCK = {
    "attn_norm": "ln_attn",
    "attn.qkv": "attn.qkv_proj",
    "attn.out": "attn.out_proj",
    "mlp_norm": "ln_mlp",
    "mlp.up": "mlp.w1",
    "mlp.down": "mlp.w2",
}
HEAD_DIM = 64  # of all published models


def momentum_streams(found: Found, heads: int | None) -> Layout:
    """The layout of a variant; the number of heads is not in the file: as given, or width / 64."""
    name, variant = _which(found)
    own = sizes(found, "tok_emb.weight", "pos_emb.weight", r"layers\.(\d+)\.")
    width = own["d_model"]
    if heads is None and width % HEAD_DIM:
        raise InputError(
            f"'{found.where}' does not say how many heads it has, and its width {width} is no multiple of {HEAD_DIM}: "
            "give --heads."
        )
    n_head = heads or width // HEAD_DIM
    tables = {"embed": ""}
    if variant.stream and f"{TABLES[variant.stream]}tok_emb.weight" in found.tensors:
        tables[f"aux_embed.{variant.stream}"] = TABLES[variant.stream]
    hidden = found.tensors.get("layers.0.mlp.w1.weight")
    config = built(
        found,
        **own,
        template=variant.template,
        n_head=n_head,
        mlp_hidden=hidden.shape[0] if hidden is not None and hidden.ndim == 2 else None,
        aux_init="zero" if variant.stream and len(tables) == 1 else "embed",
    )
    names = {f"{ours}.{t}": f"{theirs}{t}" for ours, theirs in tables.items() for t in ("tok_emb", "pos_emb")}
    names["final_norm"] = "final_ln"
    scalars = {}
    for i in range(config.n_layer):
        names |= {f"blocks.{i}.{ours}": f"layers.{i}.{theirs}" for ours, theirs in STREAMS_BLOCK.items()}
        for oracle in ("attn", "mlp") if variant.norm else ():
            names[f"blocks.{i}.aux_norms.{oracle}"] = f"layers.{i}.{variant.norm}_{oracle}"
            for scalar in variant.scalars.split():
                ours = f"blocks.{i}.coefficients.{OUR_SCALARS.get(scalar, scalar)}_{oracle}"
                scalars[ours] = Source(f"layers.{i}.{scalar}_{oracle}_raw", scalar=True)
    sources = {f"{ours}.weight": Source(f"{theirs}.weight") for ours, theirs in names.items()} | scalars
    notes = {"variant": name, "heads": f"{n_head}, {'as given' if heads else f'width / {HEAD_DIM}'}"}
    return Layout(f"the variant '{name}' of Momentum-Streams", config, sources, notes=notes)


def _which(found: Found) -> tuple[str, Variant]:
    """The variant that has these scalars and norms in its first layer."""
    scalars, norms = (
        {match[1] for key in found.tensors if (match := re.fullmatch(pattern, key))}
        for pattern in (r"layers\.0\.(\w+)_attn_raw", r"layers\.0\.(ln_v|ln_update)_attn\.weight")
    )
    for name, variant in VARIANTS.items():
        if set(variant.scalars.split()) == scalars and set(variant.norm.split()) == norms:
            return name, variant
    raise InputError(
        f"'{found.path.name}' looks like Momentum-Streams, but none of its variants has the scalars "
        f"{', '.join(sorted(scalars)) or 'none'} with the norms {', '.join(sorted(norms)) or 'none'}; known are "
        f"{', '.join(VARIANTS)}."
    )
