"""Value tables: what attentions gather knows the token and its position directly, from tables that all layers share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stepformer.base.registry import Selection
from stepformer.extras.extra import Extra, register_extra
from stepformer.ops.mixing import like_values
from stepformer.rules.coefficients import Coefficient, Values, free


@register_extra("value-tables", equation="v = v + lambda (F[token] + Q[position])", cite="jordan2024modded")
class ValueTables(Extra):
    """value_tables = true; lambda is learned in every layer, F and Q are one pair of tables for all of them."""

    tables = ("value_tables",)

    @classmethod
    def chosen(cls, config: Selection) -> bool:
        return bool(config.get("value_tables"))

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if config.component("attention").has_values:
            return None
        return (
            f"value_tables = true adds to values, and attention '{config.attention}' has none: leave it off, or use "
            "another attention."
        )

    def coefficients(self) -> Mapping[str, Coefficient]:
        return {"lambda_table": free(0.5, "mix")}

    def values(self, v: Tensor, c: Values, memory: dict[str, Tensor]) -> Tensor:
        rows = like_values(memory["value_tables"], v)
        return (v + c.lambda_table * rows).to(v.dtype)  # an fp32 lambda widens it
