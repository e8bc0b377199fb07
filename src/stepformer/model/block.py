"""One layer: a splitting of a template's step between an attention and an MLP oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import combinations

from torch import Tensor, nn

from stepformer.base.errors import ComponentError, given
from stepformer.extras import chosen
from stepformer.model.config import REGISTRIES, ModelConfig
from stepformer.oracles import MLP, Attention, Call, make_norm
from stepformer.rules import Splitting, State, Substep, Template
from stepformer.rules.coefficients import ArrayBank, CoefficientBank, Values
from stepformer.rules.hamiltonian import Fields


class Block(nn.Module):
    """The oracles with their pre-norms, the learned coefficients and the auxiliary norms of one layer."""

    def __init__(self, config: ModelConfig, *, layer: int) -> None:
        super().__init__()
        d, eps, bias, rotary = config.d_model, config.norm_eps, config.bias, config.positions == "rotary"
        own = {kind: partial(config.component(kind), **config.options_of(kind)) for kind in REGISTRIES}
        self.template: Template = own["template"](config.n_head, config.head_dim)
        self.template.norm, self.template.eps = config.norm, eps
        self.template.place(layer, config.n_layer)
        self.splitting: Splitting = own["splitting"](layer=layer, n_layer=config.n_layer)

        self.attn_norm = make_norm(config.norm, d, eps=eps, bias=bias)
        longest = {"context": config.context} if config.component("attention").takes_context else {}
        self.attn: Attention = own["attention"](d, config.n_head, bias=bias, rotary=rotary, **longest)
        self.attn.moves_with_new_momentum = getattr(self.template, "moves_with_new_momentum", False)
        self.mlp_norm = make_norm(config.norm, d, eps=eps, bias=bias)
        self.mlp: MLP = own["mlp"](d, config.mlp_hidden, bias=bias)

        rule, shares, oracles = self.template, self.splitting.shares, self.splitting.oracles
        self.reads_out = rule.reads_out and rule.last
        turns = [*oracles, *(["out"] if self.reads_out else [])]
        learned = {turn: {**rule.coefficients_of(turn)} for turn in turns}
        for turn in oracles:
            learned[turn] |= self.splitting.coefficients
        self.coefficients = CoefficientBank(learned, shares, {turn: rule.constants_of(turn) for turn in turns})
        self.arrays = ArrayBank({turn: rule.arrays_of(turn) for turn in turns}, shares)
        self.parts = chosen(config, layer)  # the extras, whose learned scalars are the bank `extras`
        self.extras = CoefficientBank(
            {
                "block": {k: c for part in self.parts for k, c in part.coefficients().items()},
                **{
                    turn: {k: c for part in self.parts for k, c in part.turn_coefficients().items()} for turn in oracles
                },
            }
        )
        self._refuse_one_name_twice(config, turns)
        keys = self.splitting.norm_keys()
        self.norm_keys = {turn: key for turn, key in keys.items() if self.template.normalises_in(turn)}
        self.aux_norms = nn.ModuleDict(
            {key: nn.LayerNorm(d, eps=eps, bias=False) for key in dict.fromkeys(self.norm_keys.values())}
        )
        self.aux_norm_gain = config.aux_norm_gain
        self.unused = self._find_unused(config)
        for name in self.unused:
            self.get_parameter(name).requires_grad_(False)

    def _refuse_one_name_twice(self, config: ModelConfig, turns: Iterable[str]) -> None:
        """Learned scalars are shown, pinned and saved by name: a sentence if two parts of the layer share one."""
        rule, attention = self.template, getattr(self.attn, "coefficients", None)
        owners: dict[str, set[str]] = {
            f"template '{config.template}'": {k for turn in turns for k in rule.coefficients_of(turn)},
            f"splitting '{config.splitting}'": {*self.splitting.coefficients},
            **{f"extra '{part.name}'": {*part.coefficients(), *part.turn_coefficients()} for part in self.parts},
            f"attention '{config.attention}'": {*(attention.names() if isinstance(attention, CoefficientBank) else ())},
        }
        for (one, names), (other, others) in combinations(owners.items(), 2):
            if names & others:
                raise ComponentError(
                    f"The {one} and the {other} both name a coefficient '{min(names & others)}': call yours otherwise."
                )

    def _find_unused(self, config: ModelConfig) -> frozenset[str]:
        """Names of the parameters that cannot reach the logits in this block."""
        first, calls = self.template.first, self.calls()["attn"]
        parts = [
            *self.template.unused(config),
            *(part for turn in self.splitting.idle() for part in self._owned_by(turn)),
        ]
        parts += [f"attn.{name}" for name in self.attn.unused(first=first, calls=calls)]
        parts += [f"extras.{name}" for part in self.parts for name in part.unused(first=first, calls=calls)]
        within = tuple(f"{part}." for part in parts)
        return frozenset(name for name, _ in self.named_parameters() if f"{name}.".startswith(within))

    def calls(self) -> dict[str, int]:
        """Oracle evaluations in this block; every one of the attention needs a cache of its own."""
        calls = self.splitting.calls()
        return {**calls, "attn": calls["attn"] * self.template.attention_calls}

    def banks(self) -> list[CoefficientBank]:
        """All learned scalars of the layer: the template's and splitting's, the extras', the attention's."""
        own = getattr(self.attn, "coefficients", None)
        return [self.coefficients, self.extras, *([own] if isinstance(own, CoefficientBank) else [])]

    def _owned_by(self, turn: str) -> list[str]:
        """Modules and coefficients that this turn alone uses."""
        others = [t for t in self.splitting.oracles if t != turn]
        shared = {oracle for t in others for oracle in self.splitting.oracles[t]}
        modules = [m for o in self.splitting.oracles[turn] if o not in shared for m in (o, f"{o}_norm")]
        key = self.norm_keys.get(turn)
        if key is not None and key not in {self.norm_keys[t] for t in others}:
            modules.append(f"aux_norms.{key}")
        banks = {"coefficients": self.coefficients, "arrays": self.arrays, "extras": self.extras}
        return modules + [f"{name}.{k}" for name, bank in banks.items() for k in bank.owned_by(turn)]

    def use(self, oracle: str, shared: nn.Module) -> None:
        """Ask an oracle of the model's instead of an own one."""
        delattr(self, oracle)
        self.__dict__[oracle] = shared  # its parameters are the model's: they have one name and one place
        self.unused = frozenset(name for name in self.unused if not name.startswith(f"{oracle}."))

    def initialise(self) -> None:
        for gain in self.aux_norms.parameters():
            gain.fill_(self.aux_norm_gain)

    def ask(self, oracles: tuple[str, ...], point: Tensor, *, call: Call) -> Tensor:
        """The summed answers of the oracles at one point (B, T, d)."""
        answers: list[Tensor] = [
            given(self.attn(self.attn_norm(point), call), self.attn, "forward")
            if oracle == "attn"
            else given(self.mlp(self.mlp_norm(point)), self.mlp, "forward")
            for oracle in oracles
        ]
        return answers[0] if len(answers) == 1 else sum(answers[1:], answers[0])

    def fields_at(self, point: Tensor, y: Tensor, *, call: Call) -> Fields:
        """The fields of a Hamiltonian attention at a point and a momentum, both (B, T, d)."""
        return self.attn.fields(self.attn_norm(point), y, call)

    def forward(self, s: State, call: Call, plain: bool = False) -> State:
        """One step of the template; with `plain`, the ordinary residual block (hybrid inference)."""
        c = self.extras.values()["block"] if self.parts else Values({})
        before, s = s, State(s.x, s.streams, dict(s.memory))
        for part in self.parts:
            s = given(part.enter(s, c), part, "enter", State)
        call = self.own_call(call, s.memory, c)
        s = self.residual(s, call) if plain else self.splitting.step(self.turns(call), s)
        if self.reads_out:
            s = s.replace(x=self.template.read_out(s, self.values()["out"]))
        s = State(s.x, s.streams, call.memory).in_dtypes_of(before)
        for part in self.parts:
            s = given(part.leave(s, c), part, "leave", State)
        return s.in_dtypes_of(before)

    def own_call(self, call: Call, memory: dict[str, Tensor], c: Values | None = None) -> Call:
        """The call as this block's oracles see it: its own count, its own memory (checkpointing runs it twice)."""
        if not self.parts:
            return replace(call, used=0, memory=dict(memory), mixes=())
        c = self.extras.values()["block"] if c is None else c
        mixes = [
            lambda v, memory, part=part: part.values(v, c, memory) for part in self.parts if part.changes("values")
        ]
        return replace(call, used=0, memory=dict(memory), mixes=mixes)

    def values(self) -> dict[str, Values]:
        """What each turn reads: mapped coefficients, constants and arrays."""
        found = self.coefficients.values()
        if not self.arrays.specs:
            return found
        arrays = self.arrays.values()
        return {turn: own | arrays[turn] for turn, own in found.items()}

    def answered(self, ask: Callable[[Tensor], Tensor], c: Values) -> Callable[[Tensor], Tensor]:
        """An oracle as extras let the rule of a turn hear it, from their coefficients of that turn."""
        parts = [part for part in self.parts if part.changes("answer")]

        def answer(point: Tensor) -> Tensor:
            g = ask(point)
            for part in parts:
                g = given(part.answer(g, c), part, "answer")
            return g

        return answer if parts else ask

    def drifting(self, s: State, *, c: Values) -> State:
        """The state with which the drift of a turn begins."""
        for part in self.parts:
            s = given(part.drifting(s, c), part, "drifting", State)
        return s

    def turns(self, call: Call) -> dict[str, Substep]:
        """The template bound to what each turn uses."""
        values, own = self.values(), self.extras.values()
        turns = {}
        for turn, oracles in self.splitting.oracles.items():
            norm = self.aux_norms[self.norm_keys[turn]] if turn in self.norm_keys else None
            fields = partial(self.fields_at, call=call) if self.attn.has_fields and "attn" in oracles else None
            ask = self.answered(partial(self.ask, oracles, call=call), own[turn])
            drifting = partial(self.drifting, c=own[turn])
            turns[turn] = Substep(self.template, ask, values[turn], norm, fields, drifting)
        return turns

    def residual(self, s: State, call: Call) -> State:
        """The ordinary residual block with this layer's oracles; streams pass through."""
        own = self.extras.values()
        for turn in ("attn", "mlp"):
            ask = self.answered(partial(self.ask, (turn,), call=call), own[turn])
            s = s.replace(x=self.drifting(s, c=own[turn]).x + ask(s.x))
        return s
