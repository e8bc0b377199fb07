"""Hamiltonian integrators with the streams left behind: the attention's turn, too, waits for the pass before the MLP.

Every integrator of `hamiltonian` moves (x, y) by a sum of fields and streams,

    x' = x + f F + f_older F_older,     y' = LN(y y + g G + g_older G_older + y_older y_older),

with numbers that only the coefficients and the clock decide, never the tokens. So they are computed at once for all
layers, a table of (layers, weights), and one pass per layer does the rest (ops/integrator.py). `WEIGHTS` holds the
table's row for each rule; its twin is that rule's `advance`. Where F waits for a new momentum, that is mixed first
(ops/mixing.py): y* = new_y y + new_g G.

The MLP's turn is that of a velocity rule: with `mlp_step = "B"` its velocity is y, which the pass above scales and
looks along; with "C" it is a stream of its own, V = (beta / gamma) v by the coefficients of the turn to come, and that
pass looks along mu v = mu (gamma / beta) V. Everything else ("A", rules that are not listed) takes the plain way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stepformer.model.engines.turns import FusedSubstep, Moving, norm_settings
from stepformer.ops.phi import phi1, phi2
from stepformer.rules.coefficients import CoefficientBank, Values
from stepformer.rules.hamiltonian import (
    AB2,
    ETDAB2,
    ConformalEuler,
    ExpEuler,
    Fields,
    HamiltonianStep,
    PlainEuler,
    PresympEuler,
)
from stepformer.rules.state import State
from stepformer.rules.template import Template

if TYPE_CHECKING:
    from stepformer.ops.common import Scalar

ORDER = ("f", "f_older", "y", "g", "g_older", "y_older")
OLDER = ("older_velocity", "older_force", "older_y", "older_scale")  # of the layer before
FIRST = ("new_y", "new_g")  # eight numbers a row with these: kernels like addresses that are multiples of 16 bytes

Row = dict[str, Tensor]


def before(values: Tensor, first: float) -> Tensor:
    """What the layer before had, and `first` in the first one."""
    return torch.cat([values.new_full((1,), first), values[:-1]])


def plain_euler(rule: HamiltonianStep, c: Values, s: State) -> Row:
    return {"f": c.h_x, "y": c.alpha, "g": c.h_y}


def presymp_euler(rule: HamiltonianStep, c: Values, s: State) -> Row:
    return {"f": c.h_x, "y": 1 - rule.friction(s, c) * c.h_y, "g": c.h_y}


def exp_euler(rule: HamiltonianStep, c: Values, s: State) -> Row:
    exponent = rule.exponent(s, c)
    return {"f": c.h_x, "y": torch.exp(-exponent), "g": c.h_y * phi1(exponent)}


def conformal_euler(rule: HamiltonianStep, c: Values, s: State) -> Row:
    kept = torch.exp(-rule.exponent(s, c))
    return {"f": c.h_x, "y": torch.ones_like(kept), "new_y": kept, "new_g": kept * c.h_y}


def ab2(rule: AB2, c: Values, s: State) -> Row:
    """f_prev of y is G_older - alpha_older y_older."""
    half_x, half_y = (0.5 * rule.ratio(h, before(h, math.inf)) for h in (c.h_x, c.h_y))
    alpha = rule.friction(s, c)
    now, then = c.h_y * (1 + half_y), -c.h_y * half_y
    return {
        "f": c.h_x * (1 + half_x),
        "f_older": -c.h_x * half_x,
        "y": 1 - now * alpha,
        "g": now,
        "g_older": then,
        "y_older": -then * before(alpha, 0.0),
    }


def etd_ab2(rule: ETDAB2, c: Values, s: State) -> Row:
    half_x, ratio_y = 0.5 * rule.ratio(c.h_x, before(c.h_x, math.inf)), rule.ratio(c.h_y, before(c.h_y, math.inf))
    exponent = rule.exponent(s, c)
    kept = torch.exp(-exponent)
    row = {"f": c.h_x * (1 + half_x), "f_older": -c.h_x * half_x, "y": kept}
    if rule.etd == "lawson":
        half = 0.5 * ratio_y * kept * c.h_y
        return row | {"g": kept * c.h_y + half, "g_older": -half * before(kept, 1.0)}
    second = c.h_y * ratio_y * phi2(exponent)
    return row | {"g": c.h_y * phi1(exponent) + second, "g_older": -second}


WEIGHTS: dict[type[Template], Callable[[Any, Values, State], Row]] = {
    PlainEuler: plain_euler,
    PresympEuler: presymp_euler,
    ExpEuler: exp_euler,
    ConformalEuler: conformal_euler,
    AB2: ab2,
    ETDAB2: etd_ab2,
}


def integrates_by_weights(template: Template) -> bool:
    """Whether a table of weights says all that this rule does for the attention, and its MLP follows a velocity."""
    if type(template) not in WEIGHTS or not isinstance(template, HamiltonianStep):
        return False
    return template.mlp_step == "B" or (template.mlp_step == "C" and not template.lookahead)


def alike(rules: Sequence[Template]) -> bool:
    """Whether all layers follow one rule with the same options, so that one table holds them."""
    first = rules[0]
    kinds = [(type(rule), {key: getattr(rule, key) for key in rule.options}) for rule in rules]
    return not integrates_by_weights(first) or all(kind == kinds[0] for kind in kinds)


def weights_of(rules: Sequence[Template], banks: Sequence[CoefficientBank]) -> tuple[tuple[Tensor, Tensor], ...]:
    """The weights of each layer in the orders of ORDER, (6,), and of FIRST, (2,), from all layers' coefficients.

    In fp32, as the clock of the plain rule also where weights are bf16.
    """
    rule = rules[0]
    if not integrates_by_weights(rule):
        return ()
    assert isinstance(rule, HamiltonianStep)
    first = banks[0]
    keys = first.keys_of["attn"]
    raw = {name: torch.cat([getattr(b, key) for b in banks]).float() for name, key in keys.items()}
    c = Values({name: first.specs[key].value(raw[name]) for name, key in keys.items()})
    steps = c.h_x if rule.step_gradient else c.h_x.detach()
    earlier = torch.ones(len(steps), len(steps), dtype=steps.dtype, device=steps.device).tril(-1)
    t = 1 + (earlier * steps).sum(1)  # a cumsum has no deterministic backward on every GPU
    row = WEIGHTS[type(rule)](rule, c, State(t, {"t": t}))
    none = torch.zeros_like(t)
    table = torch.stack([row.get(name, none) for name in (*ORDER, *FIRST)], dim=1)
    main, first_ = table.split([len(ORDER), len(FIRST)], dim=1)
    return tuple(zip(main.unbind(0), first_.unbind(0), strict=True))


class FusedIntegrator(FusedSubstep):
    """The attention's turn: it asks for both fields and leaves the motion to the pass that the MLP's turn asks for."""

    def __init__(self, turn: FusedSubstep, fields: Callable[[Tensor, Tensor], Fields], after: FusedSubstep) -> None:
        """`turn` has the norms and coefficients of this layer's attention, `after` those of its MLP."""
        super().__init__(turn.template, turn.asks, turn.c, turn.scalars, turn.layer_norm)
        assert isinstance(self.template, HamiltonianStep)
        self.rule, self.fields_at, self.after, self.family = self.template, fields, after, "integrator"
        self.own_velocity = self.rule.mlp_step == "C"
        self.look = turn.asks[0][0]

    def scalar(self, name: str) -> Scalar | None:
        """What the pass before this turn may ask for: how far it looks ahead along y, handed over as it is; or, of a
        velocity that only MLPs follow, what scales it for the next of them."""
        if name == "mu":
            return self.scalars.get("mu_la")
        return self.after.scalar(name) if self.own_velocity else None

    def take(self, s: Any, scale: float = 1.0) -> Any:
        if s.turn is None:
            at, (u,) = self._begin(s)
        else:
            at, (u,) = s.turn.settle(s, self, 1.0, [self.look])
        streams = dict(at.streams) if self.own_velocity else at.streams | {"y": at.streams["v"]}
        y = streams["y"]
        fields = self.fields_at(u, y)
        if self.rule.moves_with_new_momentum:
            from stepformer.ops.mixing import mix

            streams["y"] = mix(y, fields.force(), s.weights[0][1])
            answers: tuple[Tensor, ...] = (fields.velocity(streams["y"]),)
        else:
            scaled = getattr(fields, "scaled_velocity", None)
            velocity, factor = (fields.velocity(y), None) if scaled is None else scaled()
            answers = (velocity, fields.force()) if factor is None else (velocity, fields.force(), factor)
        return Moving(at.x, streams, s.memory, s.weights, turn=self, answers=answers)

    def _begin(self, s: Moving) -> tuple[Moving, list[Tensor]]:
        """Before the first layer: y is still a stream of the state."""
        y = s.streams["y"]
        at, points = self._pass(s, None if self.scalar("mu") is None else y, self, 1.0, [self.look], drift=False)
        # a velocity of the MLP's own starts at zero, whatever scales it
        at.streams = {"y": y, "v": s.streams["v"]} if self.own_velocity else {"v": y}
        return at, points

    def settle(
        self, s: Moving, after: FusedSubstep | None, scale_after: float, norms: Sequence[nn.Module]
    ) -> tuple[Moving, list[Tensor]]:
        from stepformer.ops.integrator import integrator_pass

        assert after is not None, "the MLP's turn follows"
        assert self.layer_norm is not None
        velocity, force, factor = (*s.answers, None, None)[:3]
        assert velocity is not None
        y, along = s.streams["y"], s.streams["v"] if self.own_velocity else None
        older: dict[str, Any] = {name: s.streams.get(name) for name in OLDER}
        x, new_y, u = integrator_pass(
            x=s.x,
            y=y,
            velocity=velocity,
            force=force,
            weights=s.weights[0][0],
            scale=factor,
            **older,
            along=along,
            gain_y=self.layer_norm.weight,
            eps_y=self.layer_norm.eps,
            mu_next=after.scalar("mu"),
            beta_next=after.scalar("beta"),
            gamma_next=after.scalar("gamma"),
            scale_next=scale_after,
            **norm_settings(s.x, norms),
        )
        assert u is not None
        streams = {"v": new_y} if along is None else {"y": new_y, "v": along}
        if self.rule.keeps_history:
            assert force is not None
            streams |= {"older_velocity": velocity, "older_force": force}
            streams |= {} if factor is None else {"older_scale": factor}
            streams |= {"older_y": y} if isinstance(self.rule, AB2) else {}
        return Moving(x, streams, s.memory, s.weights[1:]), [u]
