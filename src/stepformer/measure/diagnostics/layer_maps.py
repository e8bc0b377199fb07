"""A layer as a map, and its Jacobian as an operator: products with J and with its transpose, never J itself.

block    x -> x' with every stream and the oracles' memory held at what they are;
oracle   X -> R(X) = A(LN X) + M(LN(X + A(LN X))), at the X that the attention's pre-norm receives;
joint    (x, streams, memory) -> the same after the layer: everything that belongs to tokens and reaches deeper layers.

J^T u is a backward pass. J v is one through that pass: w -> v.J^T w is linear, and its gradient in w is J v.
Forward-mode differentiation would do too, but neither constrained attention nor fused kernels have it; this is one way
for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.measure.diagnostics.common import twin
from stepformer.model import Model, Passage
from stepformer.model.block import Block
from stepformer.ops import kernels
from stepformer.rules import State

KINDS = ("block", "oracle", "joint")
Map = Callable[[Sequence[Tensor]], Sequence[Tensor]]

# Numbers in the vectors of one batched product: beyond this a loop is as fast and saves memory.
AT_ONCE = {"cpu": 2**16, "cuda": 2**22}
# How attention is computed, not what: plain products, all queries at once.
PLAINLY = {"attention_backend": "math", "query_chunk": 0}


class Linearised:
    """The Jacobian of a map at a point. Tensors in and out are flattened and joined in their order."""

    def __init__(self, map: Map, point: Sequence[Tensor]) -> None:
        with torch.enable_grad(), kernels.twice_differentiable():
            self.inputs = [t.detach().clone().requires_grad_() for t in point]
            self.outputs = list(map(self.inputs))
            moving = [t for t in self.outputs if t.requires_grad]  # one that no input reaches has zero rows
            self.cotangents = [torch.zeros_like(t, requires_grad=True) for t in moving]
            self.pulled: Sequence[Tensor] = [torch.zeros_like(t) for t in self.inputs]
            if moving:
                self.pulled = torch.autograd.grad(
                    moving, self.inputs, self.cotangents, create_graph=True, materialize_grads=True
                )
        self.shape = (sum(t.numel() for t in self.outputs), sum(t.numel() for t in self.inputs))
        self.dtype, self.device = self.inputs[0].dtype, self.inputs[0].device

    def push(self, v: Tensor) -> Tensor:
        """J v for each row of v, (n, columns) to (n, rows)."""
        return self._derivatives(v, self.pulled, self.cotangents, self.outputs)

    def pull(self, u: Tensor) -> Tensor:
        """J^T u for each row of u, (n, rows) to (n, columns)."""
        return self._derivatives(u, self.outputs, self.inputs, self.inputs)

    def _derivatives(
        self, vectors: Tensor, ends: Sequence[Tensor], starts: Sequence[Tensor], like: Sequence[Tensor]
    ) -> Tensor:
        """Backward passes from `ends`, for some of the rows of cotangents at a time, to `starts`: those of the tensors
        `like` that anything reaches.
        """
        chunk = max(1, AT_ONCE.get(self.device.type, AT_ONCE["cpu"]) // max(self.shape))
        rows, reached = [], [end for end in ends if end.requires_grad]
        for some in vectors.split(chunk):
            several = len(some) > 1
            parts = zip(ends, some.split([end.numel() for end in ends], dim=1), strict=True)
            along = [part.reshape(len(some), *end.shape) for end, part in parts if end.requires_grad]
            given = along if several else [part[0] for part in along]
            how = {"retain_graph": True, "allow_unused": True, "is_grads_batched": several}
            found = iter(torch.autograd.grad(reached, starts, given, **how) if reached else ())
            slopes = [next(found) if reached and t.requires_grad else None for t in like]
            columns = [
                t.new_zeros(len(some), t.numel()) if slope is None else slope.reshape(len(some), -1)
                for slope, t in zip(slopes, like, strict=True)
            ]
            rows.append(torch.cat(columns, dim=1))
        return torch.cat(rows)


def twice_differentiable(model: Model, dtype: torch.dtype) -> Model:
    """The same function in `dtype`, in plain operations, which also work for several vectors at once."""
    plain = twin(model, dtype, frozen=True)
    for block in plain.blocks:
        for name, value in PLAINLY.items():
            if hasattr(block.attn, name):
                setattr(block.attn, name, value)
    return plain


class LayerMaps:
    """The maps of every layer of a model around the path that tokens (B, T) take through it."""

    def __init__(self, model: Model, tokens: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
        self.model = twice_differentiable(model, dtype)
        self.passages = list(self.model.passages(tokens.to(self.model.device)))

    def jacobian(self, layer: int, kind: str) -> Linearised | None:
        """Of one layer; None for the oracle of a layer that has none (`why_no_oracle`)."""
        if kind not in KINDS:
            raise InputError(f"'{kind}' is none of {', '.join(KINDS)}.")
        map, point = getattr(self, kind)(layer)
        return None if map is None else Linearised(map, point)

    def block(self, layer: int) -> tuple[Map, list[Tensor]]:
        at = self.passages[layer]
        return lambda x: [self._step(at, at.before.replace(x=x[0])).x], [at.before.x]

    def joint(self, layer: int) -> tuple[Map, list[Tensor]]:
        at = self.passages[layer]
        before, streams = at.before, per_token(at.before)

        def map(point: Sequence[Tensor]) -> list[Tensor]:
            x, *rest = point
            given = dict(zip(streams, rest, strict=False))
            kept = dict(zip(before.memory, rest[len(streams) :], strict=True))
            new = self._step(at, State(x, {**before.streams, **given}, kept))
            return [t for _, t in travelling(new)]

        return map, [t for _, t in travelling(before)]

    def oracle(self, layer: int) -> tuple[Map | None, list[Tensor]]:
        at, block = self.passages[layer], self.model.blocks[layer]
        plain = layer in self.model.plain_layers
        if why_no_oracle(block, plain) is not None or at.point is None:
            return None, []
        together = not plain and block.splitting.name == "parallel"

        def map(point: Sequence[Tensor]) -> list[Tensor]:
            (x,) = point
            call = block.own_call(at.call, at.before.memory)  # what `Block.forward` hands to its oracles
            a = block.ask(("attn",), x, call=call)
            return [a + block.ask(("mlp",), x if together else x + a, call=call)]

        return map, [at.point]

    def parts(self) -> list[str]:
        """What the joint map is about: x, streams and memory, as layers receive them."""
        return list(dict.fromkeys(name for at in self.passages for name, _ in travelling(at.before)))

    def has_only_x(self, layer: int) -> bool:
        """Whether nothing but x reaches the next layer, so that the joint map is the block's."""
        at = self.passages[layer]
        return len(travelling(at.before)) == len(travelling(at.after)) == 1

    def left_out(self) -> list[str]:
        """Streams that are the same for all tokens, which no token's perturbation can reach."""
        before = self.passages[0].before
        return [name for name in before.streams if name not in per_token(before)]

    def _step(self, at: Passage, s: State) -> State:
        return self.model.blocks[at.layer](s, at.call, at.layer in self.model.plain_layers)


def why_no_oracle(block: Block, plain: bool = False) -> str | None:
    """Why R is not defined for a layer, or None if it is."""
    if block.attn.has_fields:
        return (
            f"Attention '{block.attn.name}' moves x and a momentum by two fields instead of answering at a point: "
            "the oracle's Jacobian is left out."
        )
    if not plain and block.splitting.name not in ("lie-trotter", "parallel"):
        return (
            f"Splitting '{block.splitting.name}' asks its oracles at points that R(X) does not have: the oracle's "
            "Jacobian is left out (it is defined for lie-trotter and parallel)."
        )
    return None


def per_token(s: State) -> list[str]:
    """The streams that belong to the tokens; the others, such as a clock, are the same for all."""
    return [name for name, stream in s.streams.items() if stream.shape[:2] == s.x.shape[:2]]


def travelling(s: State) -> list[tuple[str, Tensor]]:
    """Everything that belongs to tokens and reaches deeper layers: x, streams and memory."""
    return [("x", s.x), *((name, s.streams[name]) for name in per_token(s)), *s.memory.items()]
