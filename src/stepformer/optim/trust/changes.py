"""What a step of the parameters does to the network, predicted to second order and measured (docs/trust-region.md).

For an attention row with weights a = softmax(l), l = ln p + beta s, and for a stream x with rho^2 = |x|^2 / d + eps:

    KL(a || a')         = 1/2 Var_a(dl) + ...           dl = beta ds + d ln p + s dbeta
    |d(x / rho)|^2 / d  = ( |dx|^2 - (1 + eps / rho^2) (x.dx)^2 / (d rho^2) ) / (d rho^2) + ...

beta moves in rows that a constraint decides, so that D(beta) stays at the radius: dbeta is given by the implicit
function theorem, and the part of ds along s drops out. The change of a whole step is, in the sum over layers,

    lambda_attn * (mean of KL over heads and queries)  +  (mean of |d(x / rho)|^2 / d over queries, after each branch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stepformer.base.errors import InputError
from stepformer.model import Model
from stepformer.ops import kernels
from stepformer.ops.sharding import whole
from stepformer.optim.trust.observing import Inputs, Observation, Rows, Stream, has_rows, moved, observe
from stepformer.oracles import MLP


@dataclass(frozen=True)
class Change:
    """kl (layers, H), mean over queries; rms: branch -> (layers,), squared; loss: difference. Calls of a layer add."""

    kl: Tensor  # (layers, 0) if attention has no rows
    rms: dict[str, Tensor]
    loss: Tensor | None

    def total(self, lambda_attn: float = 1.0) -> Tensor:
        """What the trust region bounds by eta^2."""
        rows = self.kl.mean(dim=1).sum() if self.kl.numel() else self.kl.sum()
        return lambda_attn * rows + torch.stack([*self.rms.values()]).sum()


def row_change(rows: Rows, scores: Tensor, log_prior: Tensor | None = None, radius: Tensor | None = None) -> Tensor:
    """KL(a || a') to second order, (B, H, R), for tangents of scores, ln p (both (B, H, R, K)) and radius (B, H, R)."""
    a, beta = rows.weights, rows.beta.unsqueeze(-1)

    def mean(t: Tensor) -> Tensor:
        return (a * t).sum(dim=-1, keepdim=True)

    if rows.free:
        return (a * (scores - mean(scores)).square()).sum(dim=-1) / 2
    s = rows.below_top
    centred = s - mean(s)
    variance = mean(centred.square())
    moves = beta * scores if log_prior is None else beta * scores + log_prior
    # D(beta) = radius: d radius = beta Cov(s, dl) - E[d ln p], solved for dbeta
    error = -beta * mean(centred * moves)
    error = error if log_prior is None else error + mean(log_prior)
    error = error if radius is None else error + radius.unsqueeze(-1)
    solvable = rows.active.unsqueeze(-1) & (beta.square() * variance > torch.finfo(s.dtype).eps)
    d_beta = torch.where(solvable, error / torch.where(solvable, beta * variance, 1.0), 0.0)
    if bool(rows.capped.any()):  # beta is a constant over the spread of the visible scores
        count = rows.visible.expand(s.shape).sum(dim=-1, keepdim=True)
        plain = (s - s.sum(dim=-1, keepdim=True) / count).masked_fill(~rows.visible, 0.0)
        relative = (plain * scores).sum(dim=-1, keepdim=True) / plain.square().sum(dim=-1, keepdim=True)
        d_beta = torch.where(rows.capped.unsqueeze(-1), -beta * relative, d_beta)
    logits = moves + d_beta * centred
    return (a * (logits - mean(logits)).square()).sum(dim=-1) / 2


def bounded(rows: Rows, kl: Tensor, largest: float | None) -> Tensor:
    """Changes of rows of which none counts more than `largest` times the upper quartile of its head and sequence.

    Where the scores of a row's first keys are nearly equal, a constraint gives it a beta without bound, and to second
    order a change without bound, which says nothing of a step that is larger than the difference. One such row among
    thousands would decide a mean. Rows of softmax are as they are.
    """
    if rows.free or largest is None:
        return kl
    place = 3 * (kl.shape[-1] - 1) // 4  # sorted: torch has no deterministic median on a GPU
    return kl.minimum(largest * kl.sort(dim=-1).values[..., place, None])


def stream_change(stream: Stream, dx: Tensor) -> Tensor:
    """|d(x / rho)|^2 / d to second order, (..., B, R), for a tangent dx (..., B, R, d) of what the norm reads."""
    square, d = stream.square, stream.x.shape[-1]
    dx = dx - dx.mean(dim=-1, keepdim=True) if stream.centred else dx
    along = (stream.x * dx).sum(dim=-1, keepdim=True).square() / (d * square)
    moved_by = dx.square().sum(dim=-1, keepdim=True) - (1 + stream.eps / square) * along
    return (moved_by / (d * square)).squeeze(-1)


def change(before: Observation, after: Observation, largest: float | None = None) -> Change:
    """What two observations of the same tokens differ by, measured: no approximation; rows are `bounded`."""
    kls = []
    for a, b in zip(before.rows, after.rows, strict=True):
        gain = b.log_weights - a.log_weights
        # sum_j a_j e^gain_j = 1: adding it takes the first order away, term by term; e^gain itself may overflow
        large = b.weights - a.weights * (1 + gain)
        kl = torch.where(gain > 20, large, a.weights * (gain.clamp_max(20).expm1() - gain)).sum(dim=-1)
        kls.append(bounded(a, kl, largest))
    rms = [
        (b.normalised - a.normalised).square().mean(dim=-1) for a, b in zip(before.streams, after.streams, strict=True)
    ]
    loss = None if before.loss is None or after.loss is None else after.loss - before.loss
    return _by_layer(before, kls, rms, loss)


def tangent(
    model: Model,
    tokens: Tensor,
    step: Mapping[str, Tensor],
    *,
    targets: Tensor | None = None,
    rows: Tensor | Sequence[int] | None = None,
    h: float | None = None,
    at: Observation | None = None,
) -> Change:
    """What a step (parameter names and their changes) does, predicted: change / tangent -> 1 as the step -> 0.

    All parameters move together, and later layers see changed inputs: the tangent of the network is the central
    difference of two passes at +-h times the step (1e-3; 1/4 in fp32, whose rounding is larger). `loss` is <G, dW> on
    these tokens. `at`: an observation of the same tokens and rows at the weights as they are, where there is one.
    """
    h = step_fraction(model, h)
    at = observe(model, tokens, targets, rows=rows) if at is None else at
    with moved(model, step, h):
        up = observe(model, tokens, targets, rows=rows)
    with moved(model, step, -h):
        down = observe(model, tokens, targets, rows=rows)
    return tangent_between(at, up, down, h)


def tangent_between(
    at: Observation, up: Observation, down: Observation, h: float, largest: float | None = None
) -> Change:
    """The same from observations at the beginning of a step and at +-h times the step; rows are `bounded`."""

    def slope(a: Any, b: Any) -> Any:
        return None if a is None or b is None else (a - b) / (2 * h)

    kls = [
        row_change(r, slope(a.scores, b.scores), slope(a.log_prior, b.log_prior), slope(a.radius, b.radius))
        for r, a, b in zip(at.rows, up.rows, down.rows, strict=True)
    ]
    kls = [bounded(r, kl, largest) for r, kl in zip(at.rows, kls, strict=True)]
    rms = [stream_change(s, slope(a.x, b.x)) for s, a, b in zip(at.streams, up.streams, down.streams, strict=True)]
    return _by_layer(at, kls, rms, slope(up.loss, down.loss))


def step_fraction(model: Model, h: float | None) -> float:
    """At which fractions of a step, there and back, differences are taken: rounding wants large ones."""
    return h or (1e-3 if next(model.parameters()).dtype == torch.float64 else 0.25)


def _by_layer(at: Observation, kls: Sequence[Tensor], rms: Sequence[Tensor], loss: Tensor | None) -> Change:
    """Means over queries, added up over the calls of a layer."""
    one = (kls[0] if kls else rms[0]).new_zeros(())
    kl = one.new_zeros(at.layers, kls[0].shape[1] if kls else 0)
    for rows, value in zip(at.rows, kls, strict=True):
        kl[rows.layer] += value.mean(dim=(0, 2))
    found: dict[str, Tensor] = {}
    for stream, value in zip(at.streams, rms, strict=True):
        found.setdefault(stream.branch, one.new_zeros(at.layers))[stream.layer] += value.mean()
    return Change(kl, found, loss)


def refusal(model: Model) -> str | None:
    """Why `local` does not know the quadratics of single matrices of an architecture; None if it does."""
    config, block = model.config, model.blocks[0]
    if (config.template, config.splitting) != ("gd", "lie-trotter"):
        return (
            "The quadratics of single matrices are those of x' = x + step g: they need template = 'gd' and splitting = "
            f"'lie-trotter', not '{config.template}' and '{config.splitting}'."
        )
    if not has_rows(block.attn):
        return f"Attention '{config.attention}' has no rows of weights whose change its matrices could be measured by."
    if (type(block.mlp).forward, type(block.mlp).project) != (MLP.forward, MLP.project):
        return f"MLP '{config.mlp}' is more than an activation between two matrices."
    if any(part.changes("enter") for part in model.parts):
        return "An extra changes x between the layers, which the quadratics of single matrices do not follow."
    return None


@torch.no_grad()
def local(
    model: Model,
    tokens: Tensor,
    step: Mapping[str, Tensor],
    *,
    rows: Tensor | Sequence[int] | None = None,
    lambda_attn: float = 1.0,
    h: float | None = None,
    at: Observation | None = None,
    largest: float | None = None,
) -> dict[str, Tensor]:
    """What each matrix would change in its own layer if it moved alone, to second order: exact, without propagation.

    Keys are parameter names; of stacked matrices with `.q`, `.k`, `.v`, each (H,) for the matrices of single heads
    (queries and keys change rows, values the stream after attention), and `.gate`, `.up`; the others are single
    numbers. The units are those of `Change.total`, where the KL of a head counts lambda_attn / H. A weight that layers
    share has the sum over them. `at`: an observation of the same tokens and rows with `inputs=True`. Rows are `bounded`
    by `largest`.
    """
    why = refusal(model)
    if why is not None:
        raise InputError(why)
    h = step_fraction(model, h)
    at = observe(model, tokens, rows=rows, inputs=True) if at is None else at
    names = {id(p): name for name, p in model.named_parameters()}
    streams = {(stream.layer, stream.branch): stream for stream in at.streams}
    found: dict[str, Tensor] = {}

    def add(weight: Tensor, part: str, value: Tensor) -> None:
        key = names[id(weight)] + part
        found[key] = found[key] + value if key in found else value

    def d(weight: Tensor) -> Tensor | None:
        name = names.get(id(weight), "")
        return whole(step[name]).to(weight.dtype) if name in step else None

    with kernels.off():
        for layer, (block, seen, row) in enumerate(zip(model.blocks, at.inputs, at.rows, strict=True)):
            attention: Any = block.attn
            mlp = block.mlp
            qkv, out, up, down = attention.qkv.weight, attention.out.weight, mlp.up.weight, mlp.down.weight
            after_attention, after_mlp = (streams[layer, branch] for branch in ("attn", "mlp"))
            if (dw := d(qkv)) is not None:
                by_queries, by_keys, values = _of_heads(attention, seen, row, dw, at.queries, h)
                for part, scores in ((".q", by_queries), (".k", by_keys)):
                    kl = bounded(row, row_change(row, scores), largest).mean(dim=(0, 2))
                    add(qkv, part, lambda_attn / attention.n_head * kl)
                heads = whole(out).unflatten(1, (attention.n_head, -1))
                dx = seen.steps["attn"] * torch.einsum("bhrk,dhk->hbrd", row.weights @ values, heads)
                add(qkv, ".v", stream_change(after_attention, dx).mean(dim=(1, 2)))
            if (dw := d(out)) is not None:
                add(out, "", stream_change(after_attention, seen.steps["attn"] * (seen.gathered @ dw.T)).mean())
            if (dw := d(down)) is not None:
                add(down, "", stream_change(after_mlp, seen.steps["mlp"] * (seen.activated @ dw.T)).mean())
            if (dw := d(up)) is not None:
                dh = seen.mlp_input @ dw.T
                for place in range(mlp.branches):
                    alone = torch.zeros_like(dh)
                    alone.chunk(mlp.branches, dim=-1)[place].copy_(dh.chunk(mlp.branches, dim=-1)[place])
                    slope = mlp.activation(seen.hidden + h * alone) - mlp.activation(seen.hidden - h * alone)
                    dx = seen.steps["mlp"] * (slope / (2 * h) @ whole(down).T)
                    part = (".gate", ".up")[place] if mlp.branches == 2 else ""
                    add(up, part, stream_change(after_mlp, dx).mean())
    return found


def _of_heads(
    attention: Any, seen: Inputs, row: Rows, dw: Tensor, queries: Tensor | None, h: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of the scores by the queries and by the keys (B, H, R, K), and of the values (B, H, K, head_dim)."""
    call, d_qkv = seen.call, seen.attention_input @ dw.T

    def heads(shift: float) -> tuple[Tensor, Tensor, Tensor]:
        # each from the memory as it was: what extras make of values may write to it
        return attention.in_heads(seen.qkv + shift * d_qkv, replace(call, memory=dict(call.memory)))

    (q, k, _), up, down = heads(0.0), heads(h), heads(-h)
    dq, dk, dv = ((a - b) / (2 * h) for a, b in zip(up, down, strict=True))
    chosen = slice(None) if queries is None else queries
    root = math.sqrt(q.shape[-1])
    by_queries, by_keys = dq[:, :, chosen] @ k.mT / root, q[:, :, chosen] @ dk.mT / root
    return by_queries.masked_fill(~row.visible, 0.0), by_keys.masked_fill(~row.visible, 0.0), dv
