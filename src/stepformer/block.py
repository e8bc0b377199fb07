"""One layer: a splitting of a template's step between an attention and an MLP oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from stepformer.config import ModelConfig
from stepformer.oracles import Call, attentions, make_norm, mlps
from stepformer.schemes import State, Substep, splittings, templates
from stepformer.schemes.coefficients import CoefficientBank


class Block(nn.Module):
    """The oracles with their pre-norms, the learned coefficients and the auxiliary norms of one layer."""

    def __init__(self, config: ModelConfig, *, layer: int) -> None:
        super().__init__()
        d, eps = config.d_model, config.norm_eps
        self.template = templates[config.template].component(
            config.n_head, config.head_dim, **config.options_of("template")
        )
        self.splitting = splittings[config.splitting].component(
            layer=layer, n_layer=config.n_layer, **config.options_of("splitting")
        )

        self.attn_norm = make_norm(config.norm, d, eps=eps, bias=config.bias)
        self.attn = attentions[config.attention].component(
            d,
            config.n_head,
            bias=config.bias,
            rotary=config.positions == "rotary",
            **config.options_of("attention"),
        )
        self.mlp_norm = make_norm(config.norm, d, eps=eps, bias=config.bias)
        self.mlp = mlps[config.mlp].component(d, config.mlp_hidden, bias=config.bias, **config.options_of("mlp"))

        turns = self.splitting.oracles
        self.coefficients = CoefficientBank(
            {**self.template.coefficients, **self.splitting.coefficients}, tuple(turns), self.splitting.shares
        )
        self.norm_keys = self.splitting.norm_keys() if self.template.normalises else {}
        self.aux_norms = nn.ModuleDict(
            {key: nn.LayerNorm(d, eps=eps, bias=False) for key in dict.fromkeys(self.norm_keys.values())}
        )
        self.aux_norm_gain = config.aux_norm_gain
        self.unused = frozenset(name for turn in self.splitting.idle() for name in self._owned_by(turn))
        for name in self.unused:
            self.get_parameter(name).requires_grad_(False)

    def _owned_by(self, turn: str) -> list[str]:
        """Names of the parameters that this turn alone uses."""
        others = [t for t in self.splitting.oracles if t != turn]
        shared = {oracle for t in others for oracle in self.splitting.oracles[t]}
        modules = [m for o in self.splitting.oracles[turn] if o not in shared for m in (o, f"{o}_norm")]
        key = self.norm_keys.get(turn)
        if key is not None and key not in {self.norm_keys[t] for t in others}:
            modules.append(f"aux_norms.{key}")
        names = [f"{m}.{name}" for m in modules for name, _ in self.get_submodule(m).named_parameters()]
        return names + [f"coefficients.{k}" for k in self.coefficients.owned_by(turn)]

    def initialise(self) -> None:
        for gain in self.aux_norms.parameters():
            gain.fill_(self.aux_norm_gain)

    def ask(self, oracles: tuple[str, ...], point: Tensor, *, call: Call) -> Tensor:
        """The summed answers of the oracles at one point (B, T, d)."""
        answer = None
        for oracle in oracles:
            g = self.attn(self.attn_norm(point), call) if oracle == "attn" else self.mlp(self.mlp_norm(point))
            answer = g if answer is None else answer + g
        assert answer is not None
        return answer

    def forward(self, s: State, call: Call, plain: bool = False) -> State:
        """One step of the template; with `plain`, the ordinary residual block (hybrid inference)."""
        call = replace(call, used=0)  # its own count of attention calls, also when checkpointing runs it twice
        if plain:
            return self.residual(s, call)
        values = self.coefficients.values()
        turns = {}
        for turn, oracles in self.splitting.oracles.items():
            norm = self.aux_norms[self.norm_keys[turn]] if self.norm_keys else None
            turns[turn] = Substep(self.template, partial(self.ask, oracles, call=call), values[turn], norm)
        return self.splitting.step(turns, s)

    def residual(self, s: State, call: Call) -> State:
        """The ordinary residual block with this layer's oracles; streams pass through."""
        x = s.x
        for oracle in ("attn", "mlp"):
            x = x + self.ask((oracle,), x, call=call)
        return s.replace(x=x)
