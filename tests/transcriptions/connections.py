"""Layers of hyper-connections: the equations of rivals.py with the oracles and weights of a block; notation there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transcriptions import rivals
from transcriptions.attend import attention, oracle
from transcriptions.parts import NORM_EPS, Block, Rule, layer_norm, mlp, rms_norm

TEMPLATES = ("hyper", "mhc")


def turns(b: Block, rule: Rule) -> Iterator[tuple[str, rivals.Function]]:
    """What each call's weights end in, and the call: one of both oracles, or one of each."""
    if rule["splitting"] == "parallel":
        yield "", lambda h: attention(h, b, rule) + mlp(h, b, rule)
    else:
        for name in ("attn", "mlp"):
            yield f"_{name}", partial(oracle, name, b=b, rule=rule)


def hyper_layer(*state: Any) -> tuple[Tensor, ...]:
    *H, b, rule = state
    n, d = len(H), H[0].shape[-1]
    for end, T in turns(b, rule):
        shapes = {"A_m": (n, 1), "A_r": (n, n), "B": (1, n)}
        call = {name: b["coef"][name + end].reshape(shape) for name, shape in shapes.items()}
        if rule["dynamic"]:
            call |= {name: b["coef"][name + end] for name in ("s_a", "s_b")}
            W = b["arrays"]["W" + end].T
            call |= {"W_m": W[:, :1], "W_b": W[:, 1:2], "W_r": W[:, 2:]}
            norm = rms_norm if rule["norm"] == "rmsnorm" else lambda z: layer_norm(z, torch.ones(d, dtype=z.dtype))
            H = rivals.hyper_call(H, T, *rivals.hyper_dynamic_matrices(H, call, norm))
        else:
            H = rivals.hyper_call(H, T, *rivals.hyper_static_matrices(H, call))
    return tuple(H)


def mhc_weights(b: Block, end: str, n: int) -> rivals.Call:
    F = b["arrays"]["F" + end]
    call = {"F1": F[:n].T, "F2": F[n : 2 * n].T, "F3": F[2 * n :].T}
    call |= dict(zip(("a1", "a2", "a3"), b["coef"]["a" + end], strict=True))
    return call | {name: b["coef"][name + end] for name in ("b1", "b2", "b3")}


def mhc_layer(*state: Any) -> tuple[Tensor, ...]:
    *H, b, rule = state
    for end, T in turns(b, rule):
        H = rivals.mhc_call(H, T, mhc_weights(b, end, len(H)), rule["mixing"], NORM_EPS)
    return tuple(H)
