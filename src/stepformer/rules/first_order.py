"""Gradient descent, the velocity methods (heavy ball, Nesterov, triple momentum), and tables without a velocity."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from stepformer.base.options import Option, flag
from stepformer.base.registry import Selection
from stepformer.rules.coefficients import Coefficient, Values, positive, unit
from stepformer.rules.state import State
from stepformer.rules.template import Stream, Template, register_template, scaled

VELOCITY = Stream("embed", "velocity")


@register_template("gd", equation="x' = x + g(x)", cite="geshkovski2025mathematical")
class GradientDescent(Template):
    """Follow the oracle's answer: the residual connection of every pre-norm GPT.

    With a step size, x' = x + alpha g(x) for attention and x + beta g(x) for the MLP: the step from x that maximises
    <g, x'> - |x' - x|^2 / (2 alpha).
    """

    options = {
        "alpha": Option(1.0, help="step size of the attention (of both oracles under 'parallel')", minimum=1e-6),
        "beta": Option(1.0, help="step size of the MLP", minimum=1e-6),
        "learned_steps": flag(False, help="learn the step sizes (positive, per layer) from these values"),
    }
    alpha: float
    beta: float
    learned_steps: bool

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if config.splitting == "parallel" and config.option("beta") != 1:
            return "Splitting 'parallel' takes one step with both oracles: its step size is alpha, leave beta out."
        return None

    def step_size(self, turn: str) -> float:
        return self.beta if turn == "mlp" else self.alpha

    def coefficients_of(self, turn: str) -> Mapping[str, Coefficient]:
        return {"step": positive(self.step_size(turn), "step")} if self.learned_steps else {}

    def constants_of(self, turn: str) -> Mapping[str, float]:
        return {} if self.learned_steps else {"step": self.step_size(turn)}

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        return s.replace(u=scaled(scale * c.step, g))

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.without("u").replace(x=s.x + s.u)


@register_template(
    "heavy-ball",
    equation="v' = LN_v(beta v + gamma g(x));  x' = x + v'",
    cite="polyak1964some",
    aliases=("hb", "polyak"),
)
class HeavyBall(Template):
    """Keep a velocity, kick it with the oracle's answer at x, follow it."""

    streams = {"v": VELOCITY}
    coefficients = {"beta": unit(0.5, "memory"), "gamma": positive(math.log(2), "step")}
    normalises = "v"

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if cls is HeavyBall and config.splitting == "imex" and config.option("k") > 1:
            return (
                f"Template 'heavy-ball' with splitting 'imex' and k = {config.option('k')} repeats itself: without "
                "look-ahead every refinement asks at the same x. Use k = 1 or template 'nesterov'."
            )
        return None

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        return s.replace(v=c.beta * s.v + scaled(scale, c.gamma) * g)

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.replace(x=s.x + s.v)


@register_template(
    "nesterov",
    equation="v' = LN_v(beta v + gamma g(x + mu v));  x' = x + v'",
    cite="nesterov1983method",
)
class Nesterov(HeavyBall):
    """Look ahead along the velocity, ask the oracle there, kick the velocity, follow it."""

    coefficients = {"mu": unit(0.5, "lookahead"), **HeavyBall.coefficients}

    def query(self, s: State, c: Values) -> Tensor:
        return s.x + c.mu * s.v


@register_template(
    "triple-momentum",
    equation="v' = LN_v(beta v + gamma g(x + mu v));  x' = x + nu v'",
    cite="vanscoy2018fastest",
    aliases=("tmm",),
)
class TripleMomentum(Nesterov):
    """Nesterov with its own gain nu on the way from velocity to x; nu starts at 1, that is, as Nesterov."""

    coefficients = {**Nesterov.coefficients, "nu": positive(1.0, "drift")}

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if config.splitting == "symplectic-euler":
            return (
                "Template 'triple-momentum' with splitting 'symplectic-euler' has two names for one number: the drift "
                "gain nu is the splitting's delta. Use template 'nesterov'."
            )
        return None

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.replace(x=s.x + c.nu * s.v)


@register_template("tables", equation="x' = x + g(x + mu LN_v(w)), w as it starts", cite="gai2026momentum")
class TablesAlone(Template):
    """Nesterov's tables without its dynamics: the look-ahead is along the tables in every layer, and no stream moves.

    The control for momentum with parameters of its own: what is better than this comes from the velocity's motion.
    """

    streams = {"w": Stream("embed", "what a velocity would start from, which stays")}
    coefficients = {"mu": unit(0.5, "lookahead")}
    normalises = "w"
    normalises_point = True

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if config.aux_init == "zero":
            return (
                "Template 'tables' with aux_init = 'zero' has no tables: it would be gradient descent, template 'gd'."
            )
        return None

    def query(self, s: State, c: Values) -> Tensor:
        return s.x + c.mu * s.w

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        return s.replace(u=scaled(scale, g))

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.without("u").replace(x=s.x + s.u)
