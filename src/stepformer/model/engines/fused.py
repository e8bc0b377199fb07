"""The engine of training: the streams are left behind and moved in one pass between two oracle calls (turns.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from stepformer.decoding.cache import Cache
from stepformer.model.backbone import Backbone
from stepformer.model.block import Block
from stepformer.model.engines.integrators import FusedIntegrator, alike, integrates_by_weights, weights_of
from stepformer.model.engines.turns import FAMILIES, FusedSubstep, Moving, defers, same_norms
from stepformer.ops import kernels
from stepformer.ops.sharding import is_managed, is_sharded
from stepformer.oracles import Call
from stepformer.rules import State
from stepformer.rules.hamiltonian import HamiltonianStep


def refusal(model: Backbone, s: State, call: Call) -> str | None:
    """Why the blocks run as they are written now; None if this engine takes the pass."""
    if not kernels.usable(s.x, *s.streams.values()):
        return "kernels cannot take these tensors"
    if model.plain_layers:
        return "some of its layers are plain residual blocks"
    if call.observe is not None:
        return "somebody watches its oracles"
    for block in model.blocks:
        if block.coefficients.pinned:
            return "coefficients are pinned"
        if is_managed(block) or any(map(is_sharded, block.mlp.parameters())):
            return "its weights are sharded"
        norms = (block.attn_norm, block.mlp_norm, *block.aux_norms.values())
        if not kernels.may_replace(block, *norms, model.final_norm):
            return "a hook wants to see a block or a norm at work"
    return structural(model)


def structural(model: Backbone) -> str | None:
    """Why this engine does not know an architecture, whatever it runs on."""
    config = model.config
    for part in model.parts:
        if part.changes("enter"):
            return f"{part.name} changes x between two layers"
    for block in model.blocks:
        if type(block.template) not in FAMILIES and not integrates_by_weights(block.template):
            return f"template '{config.template}' as it is set here has no fused pass"
        if not defers(block.splitting):
            return f"splitting '{config.splitting}' touches the state outside its turns"
        if not same_norms(block.attn_norm, block.mlp_norm):
            return "its norms are not LayerNorm or RMSNorm themselves"
        if any(type(norm) is not nn.LayerNorm for norm in block.aux_norms.values()):
            return "its auxiliary norms are not LayerNorm itself"
    if not same_norms(model.final_norm):
        return "its final norm is not LayerNorm or RMSNorm itself"
    return None if alike([block.template for block in model.blocks]) else "its layers follow different rules"


def run(model: Backbone, start: State, call: Call, cache: Cache | None) -> Tensor:
    """The normalised x after the last layer."""
    blocks = list(model.blocks)
    weights = weights_of([b.template for b in blocks], [b.coefficients for b in blocks])
    s = Moving(start.x, start.streams, start.memory, weights)
    for i, block in enumerate(blocks):
        own = block.own_call(call if cache is None else replace(call, slots=cache.slots[i]), s.memory)
        s = block.splitting.step(turns_of(block, own), s)  # type: ignore[arg-type, assignment]
        s.memory = own.memory
    return s.finish(model.final_norm)


def turns_of(block: Block, call: Call) -> dict[str, FusedSubstep]:
    """As `Block.turns`, deferring what they do to the streams."""
    from stepformer.ops.common import Scalar

    bank, values = block.coefficients, block.coefficients.values()
    parts: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
        "attn": (block.attn_norm, partial(block.attn, call=call)),
        "mlp": (block.mlp_norm, block.mlp),
    }
    turns: dict[str, FusedSubstep] = {}
    for turn, oracles in block.splitting.oracles.items():
        norm = block.aux_norms[block.norm_keys[turn]] if turn in block.norm_keys else None
        assert norm is None or isinstance(norm, nn.LayerNorm)
        raw = {name: Scalar(getattr(bank, key), bank.specs[key].range) for name, key in bank.keys_of[turn].items()}
        raw |= {name: Scalar(constant=number) for name, number in bank.constants.get(turn, {}).items()}
        turns[turn] = FusedSubstep(block.template, [parts[o] for o in oracles], values[turn], raw, norm)
    if isinstance(block.template, HamiltonianStep):
        turns["attn"] = FusedIntegrator(turns["attn"], partial(block.attn.fields, call=call), turns["mlp"])
    return turns
