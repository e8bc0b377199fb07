"""One layer: a splitting of a template's step between an attention and an MLP oracle."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from stepformer.config import ModelConfig
from stepformer.oracles import Call, attentions, make_norm, mlps
from stepformer.schemes import State, Substep, splittings, templates
from stepformer.schemes.coefficients import CoefficientBank


class Block(nn.Module):
    """The oracles with their pre-norms, the learned coefficients and the auxiliary norms of one layer."""

    def __init__(self, config: ModelConfig, *, last: bool) -> None:
        super().__init__()
        d, eps = config.d_model, config.norm_eps
        self.template = templates[config.template].component(
            config.n_head, config.head_dim, **config.options_of("template")
        )
        self.splitting = splittings[config.splitting].component(last=last, **config.options_of("splitting"))

        self.attn_norm = make_norm(config.norm, d, eps=eps, bias=config.bias)
        self.attn = attentions[config.attention].component(
            d,
            config.n_head,
            bias=config.bias,
            rotary=config.positions == "rotary",
            **config.options_of("attention"),
        )
        self.mlp_norm = make_norm(config.norm, d, eps=eps, bias=config.bias)
        self.mlp = mlps[config.mlp].component(d, config.mlp_hidden, bias=config.bias)

        turns = self.splitting.oracles
        self.coefficients = CoefficientBank(
            {**self.template.coefficients, **self.splitting.coefficients}, tuple(turns), self.splitting.shares
        )
        self.norm_keys = self.splitting.norm_keys() if self.template.normalises else {}
        self.aux_norms = nn.ModuleDict(
            {key: nn.LayerNorm(d, eps=eps, bias=False) for key in dict.fromkeys(self.norm_keys.values())}
        )
        for turn in self.splitting.idle():
            self._freeze(turn)

    def _freeze(self, turn: str) -> None:
        """Mark what only this turn uses as not trained: it never reaches the logits."""
        idle: list[nn.Parameter] = []
        for oracle in self.splitting.oracles[turn]:
            idle += [*getattr(self, oracle).parameters(), *getattr(self, f"{oracle}_norm").parameters()]
        key = self.norm_keys.get(turn)
        if key is not None and sum(k == key for k in self.norm_keys.values()) == 1:
            idle += self.aux_norms[key].parameters()
        idle += [self.coefficients.get_parameter(k) for k in self.coefficients.owned_by(turn)]
        for parameter in idle:
            parameter.requires_grad_(False)

    def ask(self, oracles: tuple[str, ...], point: Tensor, *, call: Call) -> Tensor:
        """The (summed) answers of the oracles at one point (B, T, d)."""
        answers = [
            self.attn(self.attn_norm(point), call) if oracle == "attn" else self.mlp(self.mlp_norm(point))
            for oracle in oracles
        ]
        return answers[0] if len(answers) == 1 else answers[0] + answers[1]

    def forward(self, s: State, call: Call) -> State:
        values = self.coefficients.values()
        turns = {}
        for turn, oracles in self.splitting.oracles.items():
            norm = self.aux_norms[self.norm_keys[turn]] if self.norm_keys else None
            turns[turn] = Substep(self.template, partial(self.ask, oracles, call=call), values[turn], norm)
        return self.splitting.step(turns, s)

    def plain(self, s: State, call: Call) -> State:
        """The ordinary residual block with this layer's oracles; streams pass through (hybrid inference)."""
        x = s.x
        for oracle in ("attn", "mlp"):
            x = x + self.ask((oracle,), x, call=call)
        return s.replace(x=x)
