"""What a forward pass does, written down: the rows of its attentions and the streams that its norms read.

Rows: for every layer, head and query the scores s and the weights a = softmax(ln p + beta s), with beta = 1 for softmax
and the solved inverse temperature for constrained attention. Streams: what a norm reads after an oracle has answered,
x + attention, x + MLP or whatever the depth rule makes of the answers. Both in fp32 at least, by plain PyTorch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.model import Model
from stepformer.ops import at_least_fp32, kernels
from stepformer.ops.constraint import constrained_softmax
from stepformer.ops.sharding import is_managed
from stepformer.oracles import Call
from stepformer.oracles.constrained import ConstrainedAttention
from stepformer.oracles.softmax import SoftmaxAttention


@dataclass(frozen=True)
class Rows:
    """The rows of one attention call: R queries of each sequence and K keys."""

    layer: int
    scores: Tensor  # s, (B, H, R, K), zero where not visible
    log_weights: Tensor  # ln a, (B, H, R, K), zero where not visible
    visible: Tensor  # broadcasts to these
    beta: Tensor  # (B, H, R)
    active: Tensor  # (B, H, R), bool: the constraint decides beta
    capped: Tensor  # (B, H, R), bool: out of reach, beta follows the spread of the scores
    log_prior: Tensor | None = None  # ln p, (B, H, R, K), normalised; None: uniform, always
    radius: Tensor | None = None  # (B, H, R)
    free: bool = False  # softmax: nothing decides beta

    @property
    def weights(self) -> Tensor:
        return self.log_weights.exp().masked_fill(~self.visible, 0.0)

    @property
    def below_top(self) -> Tensor:
        """s less the largest of its row, which moments do not see: near ties keep the digits of their difference."""
        top = self.scores.masked_fill(~self.visible, -math.inf).amax(dim=-1, keepdim=True)
        return (self.scores - top).masked_fill(~self.visible, 0.0)


@dataclass(frozen=True)
class Stream:
    """What a norm reads once an oracle has answered, (B, R, d); less its mean if that is a LayerNorm."""

    layer: int
    branch: str  # which oracle has answered: "attn", "mlp", or "both" at once
    x: Tensor
    eps: float
    centred: bool

    @property
    def square(self) -> Tensor:
        """rho^2, (B, R, 1): by rho the norm divides."""
        return self.x.square().mean(dim=-1, keepdim=True) + self.eps

    @property
    def normalised(self) -> Tensor:
        return self.x / self.square.sqrt()


class Inputs(SimpleNamespace):
    """What the matrices of one layer multiply, for the quadratics of single ones.

    call, and the step sizes `steps` by turn; attention_input (B, T, d) and after the joint product qkv (B, T, 3 d);
    gathered (B, R, d), what all heads gather; mlp_input, hidden and activated (B, R, ...), before the first matrix of
    the MLP, after it, and before the second.
    """


@dataclass
class Observation:
    """What one forward pass did; `loss` in nats if targets were given."""

    queries: Tensor | None
    rows: list[Rows] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    loss: Tensor | None = None
    inputs: list[Inputs] = field(default_factory=list)
    layers: int = 0


@torch.no_grad()
def observe(
    model: Model,
    tokens: Tensor,
    targets: Tensor | None = None,
    *,
    rows: Tensor | Sequence[int] | None = None,
    inputs: bool = False,
) -> Observation:
    """One forward pass over tokens (B, T), observed; `rows` are the positions of the queries to look at (all).

    Any depth rule and splitting is served. Softmax, entropy- and KL-constrained attention have rows; linear and
    Hamiltonian attention have none, so of these there are streams alone. The pass runs without autocast and kernels,
    whose rounding would be larger than small changes. `inputs` also keeps what every matrix multiplies, for `local`.
    Of a model that is spread over ranks each sees its own tokens, and all must ask together.
    """
    queries = None if rows is None else torch.as_tensor(rows, device=tokens.device)
    recorder = _Recorder(model, queries, inputs)
    compiled = any(block._compiled_call_impl is not None for block in model.blocks)
    with (
        recorder.listening(without_head=targets is None),
        kernels.off(),
        torch.autocast(tokens.device.type, enabled=False),
        torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext(),
    ):
        if targets is None:
            model(tokens)
        else:
            recorder.found.loss = model(tokens, targets, loss_only=True).loss
    if is_managed(model):  # its tables would stay whole, and be those of now in the next pass
        model.reshard()  # type: ignore[operator]
    return recorder.found


def has_rows(attention: nn.Module) -> bool:
    """Whether its weights are those of softmax or constrained attention, as they are written."""
    for kind in (SoftmaxAttention, ConstrainedAttention):
        if isinstance(attention, kind):
            return type(attention).forward is kind.forward and type(attention).attend is kind.attend
    return False


@contextlib.contextmanager
def moved(model: Model, step: Mapping[str, Tensor], scale: float = 1.0) -> Iterator[None]:
    """The model with its weights moved by scale * step; they are back to the bit afterwards."""
    own = dict(model.named_parameters())
    unknown = sorted(step.keys() - own.keys())
    if unknown:
        raise InputError(f"A step moves '{unknown[0]}', which is no parameter of this model.")
    before = {name: own[name].detach().clone() for name in step}
    try:
        with torch.no_grad():
            for name, value in step.items():
                own[name].add_(value.to(own[name].dtype), alpha=scale)
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                own[name].copy_(value)


class _Recorder:
    """Hooks on the norms and oracles of a model, and what they have told."""

    def __init__(self, model: Model, queries: Tensor | None, inputs: bool) -> None:
        self.model, self.queries = model, queries
        self.found = Observation(queries, layers=len(model.blocks))
        if inputs:
            self.found.inputs = [Inputs() for _ in model.blocks]
        self.point: Tensor | None = None
        self.answering: tuple[int, str] | None = None  # layer and oracle that read the last point
        self.layer = 0

    @contextlib.contextmanager
    def listening(self, *, without_head: bool) -> Iterator[None]:
        blocks = list(self.model.blocks)
        oracles = {id(part): part for block in blocks for part in (block.attn, block.mlp)}.values()
        attentions: list[Any] = [part for part in oracles if has_rows(part)]
        with contextlib.ExitStack() as stack:

            def before(module: nn.Module, told: Any) -> None:
                stack.callback(module.register_forward_pre_hook(lambda module, given: told(module, *given)).remove)

            for layer, block in enumerate(blocks):
                before(block.attn_norm, partial(self._read, layer, "attn"))
                before(block.mlp_norm, partial(self._read, layer, "mlp"))
            before(self.model.final_norm, partial(self._read, len(blocks), "head"))
            for attention in attentions:
                attention.attend = partial(self._attend, attention)
                stack.callback(delattr, attention, "attend")
            if without_head:
                self.model.logits_of = lambda h: h  # type: ignore[method-assign]
                stack.callback(delattr, self.model, "logits_of")
            if self.found.inputs:
                for part in oracles:
                    self._listen_inside(part, before, stack)
            yield

    def _listen_inside(self, part: Any, before: Any, stack: contextlib.ExitStack) -> None:
        """Keep what the matrices of an oracle multiply."""

        def after(module: nn.Module, told: Any) -> None:
            stack.callback(module.register_forward_hook(lambda module, given, answer: told(answer)).remove)

        if hasattr(part, "qkv"):
            before(part, self._enters)
            before(part.out, lambda module, o: self._keep(gathered=self._some(o)))
            after(part.qkv, lambda answer: self._keep(qkv=answer))
        elif hasattr(part, "up"):
            before(part, lambda module, u: self._keep(mlp_input=self._some(u)))
            before(part.down, lambda module, h: self._keep(activated=self._some(h)))
            after(part.up, lambda answer: self._keep(hidden=self._some(answer)))

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self.found.inputs[self.layer], name, value)

    def _enters(self, module: nn.Module, u: Tensor, call: Call) -> None:
        turns = self.model.blocks[self.layer].coefficients.values()
        steps = {turn: getattr(values, "step", None) for turn, values in turns.items()}
        # the memory as it is now: the call itself may write to it
        self._keep(attention_input=u, call=replace(call, memory=dict(call.memory)), steps=steps)

    def _some(self, tokens: Tensor) -> Tensor:
        """The queries to look at, of (B, T, d)."""
        return tokens if self.queries is None else tokens[:, self.queries]

    def _read(self, layer: int, oracle: str, norm: Any, point: Tensor) -> None:
        self.layer = min(layer, len(self.model.blocks) - 1)
        if point is self.point:  # two oracles at one point
            self.answering = (layer, "both")
            return
        if self.answering is not None:
            (x,) = at_least_fp32(self._some(point))
            centred = isinstance(norm, nn.LayerNorm)
            x = x - x.mean(dim=-1, keepdim=True) if centred else x
            self.found.streams.append(Stream(*self.answering, x, norm.eps, centred))
        self.point, self.answering = point, (layer, oracle)

    def _attend(self, attention: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        *radii, call = others
        prior = attention.log_prior(call) if radii else None
        chosen = slice(None) if self.queries is None else self.queries
        wide_q, wide_k = at_least_fp32(q[:, :, chosen], k)
        visible = call.visible()[..., chosen, :]
        scores = (wide_q @ wide_k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, 0.0)
        if radii:
            rows = self._constrained(attention, scores, visible, radii[0][:, :, chosen], prior, chosen)
        else:
            log_weights = scores.masked_fill(~visible, -math.inf).log_softmax(dim=-1).masked_fill(~visible, 0.0)
            no = torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
            rows = Rows(self.layer, scores, log_weights, visible, torch.ones_like(scores[..., 0]), no, no, free=True)
        self.found.rows.append(rows)
        if radii and self.queries is None:  # all rows are solved: once is enough
            attention.remember(rows.log_weights, call)
            return (rows.weights @ v.to(scores.dtype)).to(v.dtype)
        answer: Tensor = type(attention).attend(attention, q, k, v, *others)
        return answer

    def _constrained(
        self, attention: Any, scores: Tensor, visible: Tensor, radius: Tensor, prior: Tensor | None, chosen: Any
    ) -> Rows:
        ceiling = attention.ceiling
        if prior is not None:
            prior = prior.expand(*scores.shape[:2], -1, -1)[:, :, chosen].to(scores.dtype)
        solved = constrained_softmax(scores, radius, visible, prior, ceiling=ceiling)
        below = solved.beta < (math.inf if ceiling is None else ceiling)
        active = (solved.beta > 0) & below & ~solved.capped
        if prior is not None:
            prior = prior.masked_fill(~visible, -math.inf).log_softmax(dim=-1).masked_fill(~visible, 0.0)
        return Rows(self.layer, scores, solved.log_weights, visible, solved.beta, active, solved.capped, prior, radius)
