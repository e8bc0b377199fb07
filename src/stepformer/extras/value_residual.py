"""Value residual: every attention gathers values that are mixed with those of the first one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra
from stepformer.rules.coefficients import Coefficient, Values, free, unit

START = 0.5  # of lambda, or where it stays


@register_extra(
    "value-residual", equation="v = (1 - lambda) v + lambda v_1, v_1 of the first call", cite="zhou2025value"
)
class ValueResidual(Extra):
    """value_residual = "fixed": lambda is one half; "free" and "unit" learn it, the latter in (0, 1)."""

    def __init__(self, config: Selection) -> None:
        super().__init__(config)
        self.kind = config.get("value_residual")

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return bool(config.get("value_residual") != "off")

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if config.component("attention").has_values:
            return None
        return (
            f"value_residual = '{config.get('value_residual')}' mixes values, and attention '{config.attention}' has "
            "none: leave it off, or use another attention."
        )

    def coefficients(self) -> Mapping[str, Coefficient]:
        if self.kind == "fixed":
            return {}
        return {"lambda_v": (free if self.kind == "free" else unit)(START, "mix")}

    def unused(self, *, first: bool, calls: int) -> tuple[str, ...]:
        return tuple(self.coefficients()) if first and calls == 1 else ()

    def values(self, v: Tensor, c: Values, memory: dict[str, Tensor]) -> Tensor:
        if "v1" not in memory:
            memory["v1"] = v
            return v
        mix = START if self.kind == "fixed" else c.lambda_v
        # back to the values' dtype, which an fp32 lambda widens: kernels want one for queries, keys and values
        return ((1 - mix) * v + mix * memory["v1"]).to(v.dtype)

    def describe(self) -> str:
        how = {"fixed": "lambda = 0.5", "unit": "lambda learned in (0, 1)", "free": "lambda learned"}[self.kind]
        return f"{super().describe()}; {how}"
