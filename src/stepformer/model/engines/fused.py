"""The engine of training: what happens to the streams between two oracle calls is one generated pass.

The plan of a model is made once (tracing.py, planning.py) from its template's, splitting's and extras' own methods. A
run fills it with tensors: pass, oracle, pass, oracle. Its twin is the blocks as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepformer.base.plugins import is_ours
from stepformer.decoding.cache import Cache
from stepformer.model.backbone import Backbone
from stepformer.model.engines.planning import EventStep, PassStep, Plan, plan_of
from stepformer.model.engines.tracing import Trace
from stepformer.ops import connections, heads, kernels
from stepformer.ops.depth_attention import DepthAttention
from stepformer.ops.mixing import Mixed
from stepformer.ops.sharding import is_managed, is_sharded
from stepformer.ops.symbols import UntraceableError
from stepformer.oracles import Call
from stepformer.rules import State

FEW = 4  # numbers that a recorded function takes one by one
SETTINGS = (bool, int, float, str)  # of a rule or an extra


def refusal(model: Backbone, s: State, call: Call) -> str | None:
    """Why the blocks run as they are written now; None if this engine takes the pass."""
    if not kernels.usable(s.x, *s.streams.values()):
        return "kernels cannot take these tensors"
    if call.observe is not None:
        return "somebody watches its oracles"
    for block in model.blocks:
        if block.coefficients.pinned or block.extras.pinned or block.arrays.pinned:
            return "coefficients are pinned"
        if is_managed(block) or any(map(is_sharded, block.mlp.parameters())):
            return "its weights are sharded"
        norms = (block.attn_norm, block.mlp_norm, *block.aux_norms.values())
        if not kernels.may_replace(block, *norms, model.final_norm):
            return "a hook wants to see a block or a norm at work"
    plan = model.plan()
    if isinstance(plan, str):
        return plan
    for name, _ in plan.starts:
        kind, _, own = name.partition(" ")
        if kind == "memory" and (own not in s.memory or s.memory[own].shape != s.x.shape):
            return f"what its extras remember as '{own}' is not one row per token"
    return None


def structural(model: Backbone) -> str | None:
    """Why this engine does not know an architecture, whatever it runs on."""
    plan = model.plan()
    return plan if isinstance(plan, str) else None


@kernels.constant_result
def plan(model: Backbone, *, ready: bool = False) -> Plan | str:
    """`Backbone.plan`: as it was made before, or anew if somebody has exchanged a part or changed its settings.

    With `ready`, to be run, it is the one that `refusal` has just looked at.
    """
    found = model.plans.get(model.plain_layers)
    if found is None or (not ready and _changed(model, *found)):
        own = plan_for(model)  # first: a rule may count how often it is followed
        found = model.plans[model.plain_layers] = *made_of(model), own
    own = found[-1]
    return own.ready(model.config.d_model) if ready and isinstance(own, Plan) else own


def _changed(model: Backbone, parts: list[Any], settings: list[Any], own: Plan | str) -> bool:
    now = made_of(model)
    # a rule that cannot be followed runs as it is written, and may change its own settings by that
    return now[0] != parts or (isinstance(own, Plan) and now[1] != settings)


def made_of(model: Backbone) -> tuple[list[Any], list[Any]]:
    """What a plan depends on: the blocks and the types of their parts; the numbers and words that these were given."""
    norms: list[Any] = [model.final_norm]
    parts: list[Any] = []
    for b in model.blocks:
        norms += b.attn_norm, b.mlp_norm, *b.aux_norms.values()
        parts += b.template, b.splitting, *b.parts
    settings = [getattr(norm, "eps", None) for norm in norms]
    for part in parts:
        settings += settings_of(part)
    return [*model.blocks, *map(type, norms), *map(type, parts)], settings


def settings_of(part: Any) -> list[tuple[str, Any]]:
    """The numbers and words that a part was given."""
    return [own for own in vars(part).items() if type(own[1]) in SETTINGS]


def plan_for(model: Backbone) -> Plan | str:
    """What the model does between its oracles, or why it cannot be fused."""
    try:
        trace = Trace(model)
        if trace.digest() != Trace(model).digest():
            return "its rule does something else from time to time"
        return plan_of(trace)
    except UntraceableError as why:
        return str(why)
    except (AttributeError, TypeError, NotImplementedError, RuntimeError) as error:
        if not _has_plug_ins(model):
            raise  # ours can be followed: the fault is in the tracer
        # a rule may do anything with what it takes for tensors; as it is written it says better what is wrong
        said = (str(error).splitlines() or [""])[0]
        return f"its rule cannot be followed on symbols ({type(error).__name__}: {said})"


def _has_plug_ins(model: Backbone) -> bool:
    """Whether any part of it was written by somebody else."""
    parts = [part for b in model.blocks for part in (b, b.template, b.splitting, b.attn, b.mlp, *b.parts)]
    return not all(is_ours(type(part)) for part in parts)


def run(model: Backbone, start: State, call: Call, cache: Cache | None) -> Tensor:
    """The normalised x after the last layer."""
    plan = model.plan(ready=True)
    assert isinstance(plan, Plan)
    return Run(model, plan, start, call, cache).finish()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "along": connections.along_rows,
    "connections": connections.connections,
    "newton_schulz": heads.newton_schulz,
    "newton_schulz_of_mean": heads.newton_schulz_of_mean,
    "whiten": heads.whiten,
    "whiten_mean": heads.whiten_mean,
}


def parameter(model: Backbone, layer: int, norm: str, name: str) -> Tensor:
    """A gain or a bias as a plan names it."""
    owner: Any = model.final_norm
    if norm != "final_norm":
        block, _, key = norm.partition(".")
        owner = getattr(model.blocks[layer], block)
        owner = owner[key] if key else owner
    found: Tensor = getattr(owner, name)
    return found


def numbers_of(step: EventStep, lines: list[Tensor]) -> list[Tensor]:
    """The numbers that a recorded function takes: one by one, many as one line."""
    if step.count <= FEW:
        return [lines[step.line][i : i + 1] for i in range(step.count)]
    return [lines[step.line]]


def call_function(step: EventStep, needs: list[Any], lines: list[Tensor], dtype: torch.dtype) -> list[Tensor | None]:
    """What a recorded function gives; None for shares that it does not take gradients of."""
    answer = FUNCTIONS[step.kind](*needs, *numbers_of(step, lines), **dict(step.settings), dtype=dtype)
    found = [answer] if isinstance(answer, Tensor) else list(answer)
    shares = len(dict(step.settings).get("shares", ()))
    return found if len(found) == len(step.gives) else [*found, *[None] * shares]


def array(model: Backbone, name: str) -> Tensor:
    """A learned array of more dimensions than one as a plan names it."""
    layer, key = name.split()
    return model.blocks[int(layer)].arrays.get_parameter(key)


def depth_attention(model: Backbone, plan: Plan, dtype: torch.dtype) -> DepthAttention:
    """What carries out all events of attention over depth in one pass, with their vectors."""
    steps = [step for step in plan.steps if isinstance(step, EventStep) and step.kind == "attend_depth"]
    names = [dict(step.settings)["weight"].split() for step in steps]
    weights = [parameter(model, int(layer), bank, key) for layer, bank, key in names]
    return DepthAttention([step.needs for step in steps], weights, dict(steps[0].settings)["eps"], dtype)


class Run:
    """One forward pass: tensors in the places of a plan."""

    def __init__(self, model: Backbone, plan: Plan, start: State, call: Call, cache: Cache | None) -> None:
        self.model, self.plan, self.call, self.cache = model, plan, call, cache
        self.carried = start.x.dtype
        kind = start.x.device.type
        self.point = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else start.x.dtype
        self.places: list[Any] = [None] * plan.places
        for name, at in plan.starts:
            of, _, own = name.partition(" ")
            found = {"x": start.x} if of == "x" else start.streams if of == "stream" else start.memory
            self.places[at] = array(model, own) if of == "array" else found[own or of]
        self.memory = start.memory
        self.own: Call | None = None  # the call as the layer at work sees it
        self.layer = -1
        self.fields: Any = None
        self.depth: DepthAttention | None = None
        raws = [getattr(getattr(model.blocks[layer], bank), key) for layer, bank, key in plan.raws]
        from stepformer.ops.numbers import lines_of

        assert plan.numbers is not None
        self.lines = lines_of(plan.numbers, raws, start.x.device)

    def finish(self) -> Tensor:
        result: Any = None
        for step in self.plan.steps:
            if isinstance(step, PassStep):
                self._pass(step)
            elif step.kind == "finish":
                result = self.places[step.needs[0]]
            else:
                self._event(step)
            for at in step.drops:
                self.places[at] = None
        found: Tensor = result
        return found

    def _pass(self, step: PassStep) -> None:
        from stepformer.ops.row_passes import row_pass

        tensors = [self.places[at] for at in step.reads]
        tensors += [parameter(self.model, *gain) for gain in step.gains]
        if step.line >= 0:
            tensors.append(self.lines[step.line])
        taken = [self.places[at] for at in step.shares]
        shares = {} if any(t is None for t in taken) else dict(zip(step.weighted, taken, strict=True))
        outs, passed = row_pass(step.program, tensors, self.carried, self.point, step.handed, step.borrows, shares)
        for name, tensor in passed.items():
            self.places[(step.lends if name[0] == "l" else step.reads)[int(name[1:])]] = tensor
        for at, tensor in zip(step.writes, outs, strict=True):
            self.places[at] = tensor

    def _event(self, step: EventStep) -> None:
        needs = [self.places[at] for at in step.needs]
        block = self.model.blocks[step.layer]
        if step.layer != self.layer:
            self._enter(step.layer)
        call = self.own
        assert call is not None
        if step.kind == "ask":
            call.mixed = self._mixed(step)
            found = [
                block.attn(u, call) if o == "attn" else block.mlp(u) for o, u in zip(step.oracles, needs, strict=True)
            ]
            if step.mixture is not None and call.mixed is not None:
                self.places[step.mixture[0]] = call.mixed.earlier
        elif step.kind == "fields":
            self.fields, found = block.attn.fields(needs[0], needs[1], call), []
            self.momentum = needs[1]
        elif step.kind == "velocity":
            found = [self.fields.velocity(needs[0])] if needs else self._velocity()
        elif step.kind == "force":
            found = [self.fields.force()]
        elif step.kind == "attend_depth":
            if self.depth is None:
                self.depth = depth_attention(self.model, self.plan, self.carried)
            answer, self.places[step.needs[-1]] = self.depth(step.needs, needs)
            found = [answer]
        else:
            found = call_function(step, needs, self.lines, self.carried)
        for at, tensor in zip(step.gives, found, strict=True):
            self.places[at] = tensor

    def _enter(self, layer: int) -> None:
        """The call as the oracles of the next layer see it."""
        self.layer = layer
        call = self.call if self.cache is None else replace(self.call, slots=self.cache.slots[layer])
        if self.own is not None:
            self.memory = self.own.memory
        if self.plan.mixes:
            self.own = replace(call, used=0, memory=dict(self.memory), mixes=())
        else:
            self.own = self.model.blocks[layer].own_call(call, self.memory)

    def _mixed(self, step: EventStep) -> Mixed | None:
        if step.mixture is None:
            return None
        return Mixed(self.lines[step.line], self.places[step.mixture[0]]) if step.mixes else Mixed()

    def _velocity(self) -> list[Tensor]:
        """F at its own momentum as rows and a factor for each."""
        scaled = getattr(self.fields, "scaled_velocity", None)
        if scaled is not None:
            return list(scaled())
        row = self.fields.velocity(self.momentum)
        return [row, torch.ones(row.shape[:-1], device=row.device)]
