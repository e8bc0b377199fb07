"""One layer: a splitting of a template's step between an attention and an MLP oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from stepformer.model.config import ModelConfig
from stepformer.model.engines.fused import FAMILIES, FusedSubstep, Moving, same_norms
from stepformer.model.engines.fused_hamiltonian import FusedIntegrator, integrates_by_weights
from stepformer.ops import kernels
from stepformer.ops.sharding import is_managed, is_sharded
from stepformer.oracles import Call, attentions, make_norm, mlps
from stepformer.rules import State, Substep, free, splittings, templates, unit
from stepformer.rules.coefficients import Coefficient, CoefficientBank
from stepformer.rules.hamiltonian import Fields, HamiltonianStep

VALUE_MIX = 0.5  # lambda of the value residual, fixed or at its start


class Block(nn.Module):
    """The oracles with their pre-norms, the learned coefficients and the auxiliary norms of one layer."""

    def __init__(self, config: ModelConfig, *, layer: int) -> None:
        super().__init__()
        d, eps = config.d_model, config.norm_eps
        self.template = templates[config.template].component(
            config.n_head, config.head_dim, **config.options_of("template")
        )
        self.template.first, self.template.last = layer == 0, layer == config.n_layer - 1
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
        self.attn.moves_with_new_momentum = getattr(self.template, "moves_with_new_momentum", False)
        self.mlp_norm = make_norm(config.norm, d, eps=eps, bias=config.bias)
        self.mlp = mlps[config.mlp].component(d, config.mlp_hidden, bias=config.bias, **config.options_of("mlp"))

        turns = self.splitting.oracles
        self.coefficients = CoefficientBank(
            {turn: {**self.template.coefficients_of(turn), **self.splitting.coefficients} for turn in turns},
            self.splitting.shares,
            {turn: self.template.constants_of(turn) for turn in turns},
        )
        self.extras = CoefficientBank({"block": _extra_coefficients(config)})
        self.embedding_skip, self.value_residual = config.embedding_skip, config.value_residual
        keys = self.splitting.norm_keys()
        self.norm_keys = {turn: key for turn, key in keys.items() if self.template.normalises_in(turn)}
        self.aux_norms = nn.ModuleDict(
            {key: nn.LayerNorm(d, eps=eps, bias=False) for key in dict.fromkeys(self.norm_keys.values())}
        )
        self.aux_norm_gain = config.aux_norm_gain
        self.unused = self._find_unused(config)
        for name in self.unused:
            self.get_parameter(name).requires_grad_(False)

    def _find_unused(self, config: ModelConfig) -> frozenset[str]:
        """Names of the parameters that cannot reach the logits in this block."""
        calls = self.calls()["attn"]
        alone = self.template.first and calls == 1  # the model's first and this block's only attention call
        parts = [*self.template.unused(config)]
        parts += [f"attn.{name}" for name in self.attn.unused(first=self.template.first, calls=calls)]
        parts += ["extras.lambda_v"] if alone and "lambda_v" in self.extras.specs else []
        names = {name for turn in self.splitting.idle() for name in self._owned_by(turn)}
        for part in parts:
            found = {name for name, _ in self.named_parameters() if f"{name}.".startswith(f"{part}.")}
            names |= found
        return frozenset(names)

    def calls(self) -> dict[str, int]:
        """Oracle evaluations in this block; every one of the attention needs a cache of its own."""
        calls = self.splitting.calls()
        return {**calls, "attn": calls["attn"] * self.template.attention_calls}

    def banks(self) -> list[CoefficientBank]:
        """All learned scalars of the layer: the template's and splitting's, the extras', the attention's."""
        own = getattr(self.attn, "coefficients", None)
        return [self.coefficients, self.extras, *([own] if isinstance(own, CoefficientBank) else [])]

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

    def fields_at(self, point: Tensor, y: Tensor, *, call: Call) -> Fields:
        """The fields of a Hamiltonian attention at a point and a momentum, both (B, T, d)."""
        return self.attn.fields(self.attn_norm(point), y, call)

    def forward(self, s: State, call: Call, plain: bool = False) -> State:
        """One step of the template; with `plain`, the ordinary residual block (hybrid inference)."""
        # Its own count of attention calls and its own memory, also when checkpointing runs it twice.
        call = replace(call, used=0, memory=dict(s.memory), value_mix=self.value_mix())
        if isinstance(s, Moving):
            moved = self.splitting.step(self.fused_turns(call), s)
            moved.memory = call.memory
            return moved
        before = s
        if self.embedding_skip:
            x, x0 = self.extras.value("skip_x"), self.extras.value("skip_x0")
            s = s.replace(x=x * s.x + x0 * s.memory["x0"])
        s = self.residual(s, call) if plain else self.splitting.step(self.turns(call), s)
        return State(s.x, s.streams, call.memory).in_dtypes_of(before)

    def fuses(self, call: Call) -> bool:
        """Whether kernels may defer this block's stream updates (schemes/fused.py)."""
        return (
            (type(self.template) in FAMILIES or integrates_by_weights(self.template))
            and self.splitting.defers()
            and same_norms(self.attn_norm, self.mlp_norm)
            and all(type(norm) is nn.LayerNorm for norm in self.aux_norms.values())
            and kernels.may_replace(*self.aux_norms.values())
            and not self.embedding_skip
            and call.observe is None
            and not self.coefficients.pinned
            and not is_managed(self)
            and not any(map(is_sharded, self.mlp.parameters()))
        )

    def fused_turns(self, call: Call) -> dict[str, FusedSubstep]:
        """As `turns`, deferring what they do to the streams."""
        values = self.coefficients.values()
        parts: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
            "attn": (self.attn_norm, partial(self.attn, call=call)),
            "mlp": (self.mlp_norm, self.mlp),
        }
        turns: dict[str, FusedSubstep] = {}
        for turn, oracles in self.splitting.oracles.items():
            norm = self.aux_norms[self.norm_keys[turn]] if turn in self.norm_keys else None
            assert norm is None or isinstance(norm, nn.LayerNorm)
            raw = self.coefficients.raw_values(turn)
            turns[turn] = FusedSubstep(self.template, [parts[o] for o in oracles], values[turn], raw, norm)
        if isinstance(self.template, HamiltonianStep):
            turns["attn"] = FusedIntegrator(turns["attn"], partial(self.attn.fields, call=call), turns["mlp"])
        return turns

    def turns(self, call: Call) -> dict[str, Substep]:
        """The template bound to what each turn uses."""
        values = self.coefficients.values()
        turns = {}
        for turn, oracles in self.splitting.oracles.items():
            norm = self.aux_norms[self.norm_keys[turn]] if turn in self.norm_keys else None
            fields = partial(self.fields_at, call=call) if self.attn.has_fields and "attn" in oracles else None
            turns[turn] = Substep(self.template, partial(self.ask, oracles, call=call), values[turn], norm, fields)
        return turns

    def value_mix(self) -> Tensor | float | None:
        """lambda of the value residual in this layer; None without one."""
        if self.value_residual == "off":
            return None
        return VALUE_MIX if self.value_residual == "fixed" else self.extras.value("lambda_v")

    def residual(self, s: State, call: Call) -> State:
        """The ordinary residual block with this layer's oracles; streams pass through."""
        x = s.x
        for oracle in ("attn", "mlp"):
            x = x + self.ask((oracle,), x, call=call)
        return s.replace(x=x)


def _extra_coefficients(config: ModelConfig) -> dict[str, Coefficient]:
    """Learned scalars of the value residual and the embedding skip."""
    extras: dict[str, Coefficient] = {}
    if config.value_residual in ("free", "unit"):
        extras["lambda_v"] = (free if config.value_residual == "free" else unit)(VALUE_MIX, "mix")
    if config.embedding_skip:
        extras["skip_x"] = free(1 - config.embedding_skip_start, "mix")
        extras["skip_x0"] = free(config.embedding_skip_start, "mix")
    return extras
