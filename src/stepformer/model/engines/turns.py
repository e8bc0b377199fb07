"""The same turns with the streams left behind: one fused pass per boundary between two oracle calls.

A substep is memory traffic: kick, velocity norm, drift, then the next substep's look-ahead and pre-norm, each reading
and writing vectors of every token. `FusedSubstep` only notes what a turn does to the streams. When the next turn asks
its oracle, everything noted is done in one pass (ops/velocity.py, ops/adaptive.py), which ends with the
normalised point at which that oracle looks. So boundaries between blocks are fused like those inside a block.

The velocity is carried as V = (beta / (scale gamma)) v with the coefficients of the turn that will kick it. Then
beta v + scale gamma g = scale gamma (V + g): V and g have the same gradient, and one vector less is written.

Splittings run unchanged if they touch the state through their turns alone (`Splitting.deferrable`). Only rules whose
exact class is listed in FAMILIES are served: a subclass may have changed the equations. The twin of all this is
`Substep` with the template's own methods. Integrators of Hamiltonian fields are in `integrators`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stepformer.base.errors import InputError
from stepformer.ops import kernels
from stepformer.rules.adaptive import Adam, AdamW, RMSProp
from stepformer.rules.coefficients import Values
from stepformer.rules.first_order import GradientDescent, HeavyBall, Nesterov, TripleMomentum
from stepformer.rules.kronecker import SOAP, Shampoo
from stepformer.rules.spectral import Muon, Ortho
from stepformer.rules.splittings import Splitting, Substep
from stepformer.rules.state import State
from stepformer.rules.template import Template

if TYPE_CHECKING:
    from stepformer.ops.common import Scalar

FAMILIES: dict[type[Template], str] = {
    GradientDescent: "plain",
    HeavyBall: "velocity",
    Nesterov: "velocity",
    TripleMomentum: "velocity",
    RMSProp: "adaptive",
    Adam: "adaptive",
    AdamW: "adaptive",
    # these propose an update by kernels of their own; the rest of the turn is fused
    Ortho: "proposal",
    Muon: "proposal",
    Shampoo: "proposal",
    SOAP: "proposal",
}


def muon_kick(rule: Any, s: State, c: Values, g: Tensor, scale: float) -> State:
    """Muon's kick with its running mean in the kernel of Newton-Schulz; the mean stays in its dtype."""
    from stepformer.ops import newton_schulz_kernels as fast
    from stepformer.ops.common import Scalar

    if not (kernels.usable(g, s.m) and fast.supports(rule.n_head, rule.head_dim)):
        return Muon.kick(rule, s, c, g, scale)
    low = rule.newton_schulz_dtype == "bfloat16"
    mean, u = fast.muon_pass(g, s.m, Scalar(c.beta), rule.n_head, s.x.dtype, low)
    return s.replace(m=mean, u=u)


def soap_kick(rule: Any, s: State, c: Values, g: Tensor, scale: float) -> State:
    """SOAP's kick with its running mean in the kernel of whitening."""
    from stepformer.ops import whitening as fast

    if not (kernels.usable(g, s.m, s.R) and fast.supports(rule.n_head, rule.head_dim)):
        return SOAP.kick(rule, s, c, g, scale)
    mean, covariance, u = fast.soap_pass(g, s.m, s.R, c.beta1, c.betaR, rule.n_head, s.x.dtype)
    return s.replace(m=mean, R=covariance, u=u)


KICKS: dict[type[Template], Callable[..., State]] = {Muon: muon_kick, SOAP: soap_kick}


@dataclass(eq=False)
class Moving:
    """A state whose last answer waits: `x` and `streams` are those before it, the other fields what it will do."""

    x: Tensor
    streams: dict[str, Tensor]
    memory: dict[str, Tensor]
    weights: tuple[tuple[Tensor, Tensor], ...] = ()  # of an integrator's layers to come (integrators.py)
    turn: FusedSubstep | None = None  # whose answer waits
    answers: tuple[Tensor, ...] = ()
    scale: float = 1.0
    normalises: bool = False
    moves: bool = False
    gain: Scalar | None = None  # of the drift; None for 1
    start: Moving | None = None  # the settled state that the answer kicks, of a velocity that others may kick again
    settled: Moving | None = None  # the same state with nothing waiting, once somebody has asked
    asker: FusedSubstep | None = None  # who that was: its coefficients scale V

    def finish(self, norm: nn.Module) -> Tensor:
        """The final norm of x after the last turn."""
        if self.turn is None:
            result: Tensor = norm(self.x)
            return result
        _, (u,) = self.turn.settle(self, None, 1.0, [norm])
        return u


class FusedSubstep(Substep):
    """A turn that defers what it does to the streams; `asks` are its oracles with the norms before them."""

    def __init__(
        self,
        template: Template,
        asks: Sequence[tuple[nn.Module, Callable[[Tensor], Tensor]]],
        c: Values,
        scalars: Mapping[str, Scalar],
        norm: nn.LayerNorm | None,
    ) -> None:
        """`scalars` are the coefficients as the kernels take them: raw, with the map that keeps each in its range."""
        self.template, self.asks, self.c, self.fields = template, asks, c, None
        self.layer_norm, self.scalars = norm, scalars
        self.family = FAMILIES.get(type(template), "velocity")  # an integrator's y is the velocity of its MLP

    def scalar(self, name: str) -> Scalar | None:
        """What the pass before this turn may ask for."""
        return self.scalars.get(name)

    # what splittings call

    def ask(self, s: Any, scale: float = 1.0) -> Any:
        """The oracles' answers at the point where the template looks."""
        norms = [norm for norm, _ in self.asks]
        if s.turn is None:
            # before the first turn of the model nothing waits: only look ahead and normalise
            velocity = s.streams["v"] if self.family == "velocity" else None
            s.settled, inputs = self._pass(s, velocity, self, scale, norms, drift=False)
        else:
            s.settled, inputs = s.turn.settle(s, self, scale, norms)
            if s.start is not None and not s.moves and torch.is_grad_enabled():
                s.start.x = s.settled.x  # who starts there again takes x as it came through this pass
        s.asker = self
        return tuple(oracle(u) for (_, oracle), u in zip(self.asks, inputs, strict=True))

    def kick(self, s: Any, g: Any, scale: float = 1.0) -> Any:
        assert s.asker is self, "a turn kicks the state at which it has asked"
        at = s.settled
        streams, answers = at.streams, g
        if self.family == "proposal":
            whole = answers[0] if len(answers) == 1 else answers[0] + answers[1]
            kick = KICKS.get(type(self.template), type(self.template).kick)
            proposed = kick(self.template, State(at.x, streams), self.c, whole, scale)
            streams, answers = proposed.without("u").streams, (proposed.u,)
        start = at if self.family == "velocity" else None
        return Moving(at.x, streams, s.memory, at.weights, turn=self, answers=answers, scale=scale, start=start)

    def normalise(self, s: Any) -> Any:
        return replace(s, normalises=True) if self.layer_norm is not None else s

    def drift(self, s: Any, scale: float = 1.0) -> Any:
        if self.family == "proposal":
            return replace(s, moves=True, gain=self.scalars["gamma"].times(scale))
        return self.follow(s, "nu")

    def follow(self, s: Any, name: str) -> Any:
        return replace(s, moves=True, gain=self.scalars.get(name))

    # the passes

    def settle(
        self, s: Moving, after: FusedSubstep | None, scale_after: float, norms: Sequence[nn.Module]
    ) -> tuple[Moving, list[Tensor]]:
        """Do what waits in `s`, and give the normalised points at which the turn `after` looks."""
        norm = self.layer_norm
        settings: dict[str, Any] = {
            "g2": s.answers[1] if len(s.answers) > 1 else None,
            # a proposal is normalised as it is: its step fraction is in the drift
            "scale": 1.0 if self.family == "proposal" else s.scale,
            "gain_v": norm.weight if s.normalises and norm is not None else None,
            "eps_v": norm.eps if norm is not None else 0.0,
        }
        if self.family == "adaptive":
            return self._adaptive(s, norms, settings)
        if self.family == "velocity":
            settings |= {"V": s.streams["v"], "gamma": self.scalars["gamma"]}
        elif self.family == "plain":  # x' = x + scale step g: the step is the kick's, the drift is by 1
            settings["gamma"] = self.scalars["step"]
        return self._pass(s, s.answers[0], after, scale_after, norms, nu=s.gain, drift=s.moves, **settings)

    def _pass(
        self,
        s: Moving,
        g: Tensor | None,
        after: FusedSubstep | None,
        scale_after: float,
        norms: Sequence[nn.Module],
        **settings: Any,
    ) -> tuple[Moving, list[Tensor]]:
        """From an answer, or the velocity with which the model begins, to where the turn `after` looks."""
        from stepformer.ops.velocity import velocity_pass

        kicks = after if self.family == "velocity" else None  # whose coefficients scale V
        x, v, *inputs = velocity_pass(
            g,
            x=s.x,
            mu_next=after.scalar("mu") if after is not None else None,
            beta_next=kicks.scalar("beta") if kicks is not None else None,
            gamma_next=kicks.scalar("gamma") if kicks is not None else None,
            scale_next=scale_after,
            **norm_settings(s.x, norms),
            **settings,
        )
        streams = s.streams if v is None else s.streams | {"v": v}
        return Moving(x, streams, s.memory, s.weights), [u for u in inputs if u is not None]

    def _adaptive(self, s: Moving, norms: Sequence[nn.Module], settings: dict[str, Any]) -> tuple[Moving, list[Tensor]]:
        from stepformer.ops.adaptive import adaptive_pass

        if not s.moves:
            raise InputError(
                f"Template '{self.template.name}' moves x with every answer, and this splitting does not: "
                "it cannot be `deferrable` with it."
            )
        own = {name: self.scalars.get(name) for name in ("beta1", "beta2", "gamma", "lam")}
        settings |= {"m": s.streams.get("m"), "s": s.streams["s"], **own, **norm_settings(s.x, norms)}
        x, m, second, *inputs = adaptive_pass(s.answers[0], x=s.x, **settings)
        streams = {"s": second} if m is None else {"m": m, "s": second}
        return Moving(x, streams, s.memory, s.weights), [u for u in inputs if u is not None]


def defers(splitting: Splitting) -> bool:
    """Whether this very class says `deferrable`: a subclass may do something else with the state."""
    return bool(type(splitting).__dict__.get("deferrable", False))


def same_norms(*norms: nn.Module) -> bool:
    """Whether a pass can end with these: LayerNorm or RMSNorm themselves, of one kind and eps."""
    first = norms[0]
    known = type(first) in (nn.LayerNorm, nn.RMSNorm)
    return known and all(type(n) is type(first) and n.eps == first.eps for n in norms)


def norm_settings(x: Tensor, norms: Sequence[nn.Module]) -> dict[str, Any]:
    """The norms that end a pass, for the kernels; their results are what autocast would cast to anyway."""
    first = norms[0]
    assert isinstance(first, nn.LayerNorm | nn.RMSNorm)
    kind = x.device.type
    return {
        "norms": tuple((norm.weight, getattr(norm, "bias", None)) for norm in norms),
        "norm_kind": "rmsnorm" if isinstance(first, nn.RMSNorm) else "layernorm",
        "eps": first.eps,
        "out_dtype": torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype,
    }
