"""Integrators of the damped Hamiltonian pair (x, y): how a Hamiltonian attention's two fields move tokens in depth.

The attention supplies the velocity field F and the force field G; y is the momentum, h_x and h_y are learned step
sizes. Friction follows a clock t that runs along depth from t_0 = 1 (`t0`), t' = t + h_x:

    alpha(t) = c_log / t + c_lin,    s = c_log ln(1 + h_y / t) + c_lin h_y    (its integral over one step).

LN_Y, written in the equations as LN, acts on y after x has moved. The MLP takes its turn afterwards, in one of three
ways (`mlp_step`):

    B   y' = LN_V(beta y + gamma M(x + mu y));  x' = x + y'
    C   the same with a velocity v of its own instead of y
    A   x' = x + gamma M(x + mu w) with w = (motion of x by the attention) / h_x
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stepformer.base.options import Option, choice, flag
from stepformer.base.registry import Selection
from stepformer.ops.phi import phi1, phi2
from stepformer.rules.coefficients import Coefficient, Values, positive, unit
from stepformer.rules.state import State
from stepformer.rules.template import Stream, Template, register_template, scaled

MOST_DAMPING = 12.0  # bound on s: beyond it e^{-s} < 1e-5 forgets everything anyway
SHORTEST_STEP = 1e-8


class Fields(Protocol):
    """The two fields of a Hamiltonian attention at one (x, y)."""

    def velocity(self, y: Tensor) -> Tensor:
        """F at the same x, for this momentum or a newer one."""

    def force(self) -> Tensor:
        """G."""


FieldsAt = Callable[[Tensor, Tensor], Fields]
"""The fields at the point where the attention looks and at a momentum."""


class HamiltonianStep(Template):
    """What all integrators share; a subclass says in `advance` how one step is taken."""

    streams = {"y": Stream("embed", "momentum")}
    integrates = True
    goes_with = {"attention": "hamiltonian"}
    damped = True
    keeps_history = False
    moves_with_new_momentum = False
    options = {
        "h0": Option(0.1, help="initial step sizes h_x and h_y", minimum=1e-6),
        "mlp_step": choice(
            "B", "A", "C", help="MLP kicks y (B), looks along attention's motion (A), has its own v (C)"
        ),
        "lookahead": flag(False, help="the attention looks at x + mu_la y instead of x"),
        "step_gradient": flag(False, help="let gradients reach h_x through the clock t and through w of mlp_step A"),
    }
    exact_gradient = {"step_gradient": True}
    h0: float
    mlp_step: str
    lookahead: bool
    step_gradient: bool
    damping: str = "loglin"
    t0: float = 1.0

    def __init__(self, n_head: int, head_dim: int, **options: Any) -> None:
        super().__init__(n_head, head_dim, **options)
        self.streams = dict(type(self).streams)
        if self.damped:
            self.streams["t"] = Stream(float(self.t0), "clock")
        if self.mlp_step == "C":
            self.streams["v"] = Stream("zero", "velocity of the MLP")
        self.normalises = {"A": None, "B": "y", "C": "v"}[self.mlp_step]  # in the MLP's turn

    def describe(self) -> str:
        mlp = {
            "A": "x += gamma M(x + mu w), w = motion of x by the attention / h_x",
            "B": "y = LN_V(beta y + gamma M(x + mu y)); x += y",
            "C": "v = LN_V(beta v + gamma M(x + mu v)); x += v",
        }
        return f"{self.moves()};  then {mlp[self.mlp_step]}"

    def moves(self) -> str:
        """The attention's turn under these options, for people."""
        return super().describe()

    @classmethod
    def refusals(cls, config: Selection) -> list[str]:
        found = super().refusals(config)
        if config.splitting != "lie-trotter":
            found.append(
                f"Template '{config.template}' brings its own integrator, which splitting '{config.splitting}' cannot "
                "divide: use splitting = 'lie-trotter'."
            )
        still = config.aux_init == "zero" and config.option("mlp_step") != "B"
        if still and config.n_layer == 1 and not cls.moves_with_new_momentum:
            found.append(
                "In a single layer a momentum that starts at zero moves nothing, unless the MLP follows it: "
                "use n_layer > 1, aux_init = 'embed' or mlp_step = 'B'."
            )
        if still and not config.component("attention").forces_at_rest(config):
            found.append(
                "With no potential (kappa = 0), momentum starting at zero and an MLP that leaves it alone "
                f"(mlp_step = '{config.option('mlp_step')}'), y stays zero and the attention does nothing: "
                "use mlp_step = 'B', aux_init = 'embed' or kappa > 0."
            )
        return found

    def coefficients_of(self, turn: str) -> Mapping[str, Coefficient]:
        if turn == "mlp":
            memory = {} if self.mlp_step == "A" else {"beta": unit(0.9, "memory")}
            return {"mu": unit(0.9, "lookahead"), **memory, "gamma": positive(1.0, "step")}
        own: dict[str, Coefficient] = {"h_x": positive(self.h0, "drift"), "h_y": positive(self.h0, "step")}
        own |= self.friction_coefficients()
        return own | ({"mu_la": unit(0.001, "lookahead")} if self.lookahead else {})

    def friction_coefficients(self) -> dict[str, Coefficient]:
        both = {"c_log": positive(3.0, "damping"), "c_lin": positive(1e-4, "damping")}
        return {"loglin": both, "log": {"c_log": both["c_log"]}, "linear": {"c_lin": both["c_lin"]}}[self.damping]

    def normalises_in(self, turn: str) -> str | None:
        return "y" if turn == "attn" else self.normalises

    def unused(self, config: Selection) -> tuple[str, ...]:
        attention = config.component("attention")
        names: list[str] = []
        at_rest = self.first and config.aux_init == "zero"
        if at_rest and not attention.forces_at_rest(config):
            return ("attn", "attn_norm", "aux_norms.attn", *(f"coefficients.{k}" for k in self.coefficients_of("attn")))
        if at_rest and not self.moves_with_new_momentum:
            names += [f"attn.{name}" for name in attention.idle_at_rest(config)]
        if self.last and self.mlp_step != "B":  # nobody reads the momentum again
            names.append("aux_norms.attn")
            if not self.moves_with_new_momentum:
                names += [f"attn.{name}" for name in attention.idle_without_force(config)]
                names += [f"coefficients.{k}" for k in ("h_y", *self.friction_coefficients())]
        return tuple(names)

    # the attention's turn

    def integrate(self, s: State, c: Values, fields: FieldsAt, norm: Callable[[Tensor], Tensor]) -> State:
        """The attention's whole turn: look, advance (x, y), normalise y."""
        point = s.x + c.mu_la * s.y if self.lookahead else s.x
        new = self.advance(s, c, fields(point, s.y))
        # back from the clock's fp32 where the streams are narrower
        new = new.replace(x=new.x.to(s.x.dtype), y=norm(new.y.to(s.y.dtype)))
        if self.mlp_step == "A":
            step = c.h_x if self.keeps_history or self.step_gradient else c.h_x.detach()
            new = new.replace(w=(new.x - s.x) / step.clamp_min(SHORTEST_STEP))
        return new

    def advance(self, s: State, c: Values, field: Fields) -> State:
        """x, y (before LN_Y), the clock and the history after one step."""
        raise NotImplementedError(f"{type(self).__name__} does not say how (x, y) moves: define advance().")

    def friction(self, s: State, c: Values) -> Tensor:
        """alpha(t)."""
        parts = [c.c_log / s.t] if self.damping != "linear" else []
        parts += [c.c_lin] if self.damping != "log" else []
        return sum(parts[1:], parts[0])

    def exponent(self, s: State, c: Values) -> Tensor:
        """s, the friction integrated over this step."""
        parts = [c.c_log * torch.log1p(c.h_y / s.t)] if self.damping != "linear" else []
        parts += [c.c_lin * c.h_y] if self.damping != "log" else []
        return sum(parts[1:], parts[0]).clamp(-MOST_DAMPING, MOST_DAMPING)

    def tick(self, s: State, c: Values) -> Tensor:
        """The clock after this step."""
        return s.t + (c.h_x if self.step_gradient else c.h_x.detach())

    # the MLP's turn

    def query(self, s: State, c: Values) -> Tensor:
        along = {"A": "w", "B": "y", "C": "v"}[self.mlp_step]
        return s.x + c.mu * getattr(s, along)

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        g = scaled(scale, c.gamma) * g
        if self.mlp_step == "A":
            return s.replace(u=g)
        if self.mlp_step == "B":
            return s.replace(y=c.beta * s.y + g)
        return s.replace(v=c.beta * s.v + g)

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        moved = {"A": "u", "B": "y", "C": "v"}[self.mlp_step]
        return s.replace(x=s.x + getattr(s, moved)).without("u", "w")


SYMP = "stein2026sympformer"


@register_template("plain-euler", equation="x' = x + h_x F(x, y);  y' = LN(alpha y + h_y G(x, y))", cite=SYMP)
class PlainEuler(HamiltonianStep):
    """Explicit Euler with a memory alpha instead of a friction: learned, or Nesterov's (k - 1) / (k + 2)."""

    damped = False
    options = {
        **HamiltonianStep.options,
        "memory": choice("learned", "nesterov", help="alpha learned, or (k - 1) / (k + 2) in layer k = 1, 2, ..."),
    }
    memory: str

    def __init__(self, n_head: int, head_dim: int, **options: Any) -> None:
        super().__init__(n_head, head_dim, **options)
        if self.memory == "nesterov":
            self.streams["k"] = Stream(1.0, "number of the layer")

    def moves(self) -> str:
        return super().moves() + ";  alpha = (k - 1) / (k + 2) in layer k = 1, 2, ..." * (self.memory == "nesterov")

    def friction_coefficients(self) -> dict[str, Coefficient]:
        return {"alpha": unit(0.9, "memory")} if self.memory == "learned" else {}

    def advance(self, s: State, c: Values, field: Fields) -> State:
        x = s.x + c.h_x * field.velocity(s.y)
        if self.memory == "learned":
            return s.replace(x=x, y=c.alpha * s.y + c.h_y * field.force())
        return s.replace(x=x, y=(s.k - 1) / (s.k + 2) * s.y + c.h_y * field.force(), k=s.k + 1)


class Damped(HamiltonianStep):
    """Integrators with friction that follows the clock."""

    options = {
        **HamiltonianStep.options,
        "damping": choice("loglin", "log", "linear", help="friction c_log/t + c_lin, c_log/t alone, or c_lin alone"),
        "t0": Option(1.0, help="where the clock starts", minimum=1e-6),
    }


@register_template(
    "presymp-euler",
    equation="x' = x + h_x F(x, y);  y' = LN((1 - alpha(t) h_y) y + h_y G(x, y))",
    cite=SYMP,
    aliases=("damped-euler",),
)
class PresympEuler(Damped):
    """Explicit Euler on the damped system; the factor of y may become negative."""

    def advance(self, s: State, c: Values, field: Fields) -> State:
        x = s.x + c.h_x * field.velocity(s.y)
        y = (1 - self.friction(s, c) * c.h_y) * s.y + c.h_y * field.force()
        return s.replace(x=x, y=y, t=self.tick(s, c))


@register_template(
    "exp-euler",
    equation="x' = x + h_x F(x, y);  y' = LN(e^-s y + h_y phi1(s) G(x, y)),  phi1(s) = (1 - e^-s) / s",
    cite=SYMP,
)
class ExpEuler(Damped):
    """Exponential Euler: friction exactly, force frozen over the step."""

    def advance(self, s: State, c: Values, field: Fields) -> State:
        decay = self.exponent(s, c)
        x = s.x + c.h_x * field.velocity(s.y)
        y = torch.exp(-decay) * s.y + c.h_y * phi1(decay) * field.force()
        return s.replace(x=x, y=y, t=self.tick(s, c))


@register_template(
    "conformal-euler",
    equation="y* = e^-s (y + h_y G(x, y));  x' = x + h_x F(x, y*);  y' = LN(y*)",
    cite=SYMP,
)
class ConformalEuler(Damped):
    """Kick, damp, then drift with the new momentum. Not symplectic for this energy, which does not separate."""

    moves_with_new_momentum = True

    def advance(self, s: State, c: Values, field: Fields) -> State:
        y = torch.exp(-self.exponent(s, c)) * (s.y + c.h_y * field.force())
        return s.replace(x=s.x + c.h_x * field.velocity(y), y=y, t=self.tick(s, c))


class TwoStep(Damped):
    """Integrators that extrapolate from the previous layer's fields, with r = h / (previous h) for x and for y.

    Before the first layer the previous step counts as infinitely long: r = 0, and the first step is a one-step method.
    """

    keeps_history = True
    streams = {
        **Damped.streams,
        "fx": Stream("zero", "velocity field of the previous layer"),
        "fy": Stream("zero", "force field of the previous layer"),
        "hx": Stream(math.inf, "previous h_x"),
        "hy": Stream(math.inf, "previous h_y"),
    }
    options = {
        **Damped.options,
        "history": choice("variable", "constant", help="weights from the ratio of step sizes, or as if it were 1"),
    }
    history: str

    def ratio(self, h: Tensor, previous: Tensor) -> Tensor:
        if self.history == "variable":
            return h / previous
        return torch.where(previous.isinf(), 0.0, torch.ones_like(previous))

    def extrapolate(self, f: Tensor, previous: Tensor, r: Tensor) -> Tensor:
        """(1 + r/2) f - (r/2) f_previous: the mean of the line through both over the coming step."""
        return f + 0.5 * r * (f - previous)


@register_template(
    "ab2",
    equation="f = (F, G - alpha(t) y);  (x, y)' = (x, y) + h ((1 + r/2) f - (r/2) f_prev), then LN on y",
    cite=SYMP,
)
class AB2(TwoStep):
    """Adams-Bashforth of order two on the damped system."""

    def advance(self, s: State, c: Values, field: Fields) -> State:
        fx, fy = field.velocity(s.y), field.force() - self.friction(s, c) * s.y
        rx, ry = self.ratio(c.h_x, s.hx), self.ratio(c.h_y, s.hy)
        x = s.x + c.h_x * self.extrapolate(fx, s.fx, rx)
        y = s.y + c.h_y * self.extrapolate(fy, s.fy, ry)
        return s.replace(x=x, y=y, t=self.tick(s, c), fx=fx, fy=fy, hx=c.h_x, hy=c.h_y)


AS_AB2 = "x' = x + h_x ((1 + r/2) F - (r/2) F_prev)"


@register_template(
    "etd-ab2",
    equation=f"{AS_AB2};  y' = LN(e^-s y + h_y (phi1(s) G + r phi2(s) (G - G_prev))),  phi2(s) = (s - 1 + e^-s) / s^2",
    cite=(SYMP, "cox2002exponential"),
)
class ETDAB2(TwoStep):
    """Exponential time differencing of order two.

    `etd = "lawson"` is Adams-Bashforth on the undamped pair (x, e^eta y), eta' = alpha, the paper's ETD-AB2: an
    integrating factor.
    """

    options = {
        **TwoStep.options,
        "etd": choice("cox-matthews", "lawson", help="exact weights of the exponential, or an integrating factor"),
    }
    etd: str

    def __init__(self, n_head: int, head_dim: int, **options: Any) -> None:
        super().__init__(n_head, head_dim, **options)
        if self.etd == "lawson":
            self.streams["decay"] = Stream(1.0, "e^-s of the previous layer")

    def moves(self) -> str:
        if self.etd == "cox-matthews":
            return super().moves()
        return f"{AS_AB2};  y' = LN(e^-s (y + h_y ((1 + r/2) G - (r/2) e^-s_prev G_prev)))"

    def advance(self, s: State, c: Values, field: Fields) -> State:
        fx, fy = field.velocity(s.y), field.force()
        rx, ry = self.ratio(c.h_x, s.hx), self.ratio(c.h_y, s.hy)
        exponent = self.exponent(s, c)
        kept = torch.exp(-exponent)
        if self.etd == "lawson":
            y = kept * (s.y + c.h_y * self.extrapolate(fy, s.decay * s.fy, ry))
            s = s.replace(decay=kept)
        else:
            y = kept * s.y + c.h_y * (phi1(exponent) * fy + ry * phi2(exponent) * (fy - s.fy))
        x = s.x + c.h_x * self.extrapolate(fx, s.fx, rx)
        return s.replace(x=x, y=y, t=self.tick(s, c), fx=fx, fy=fy, hx=c.h_x, hy=c.h_y)
