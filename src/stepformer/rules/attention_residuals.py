"""Attention residuals: every oracle reads all that earlier ones have answered, weighted by a softmax over depth."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stepformer.base.options import integer
from stepformer.base.registry import Selection
from stepformer.ops.depth_attention import attend_depth
from stepformer.rules.coefficients import Array, Values
from stepformer.rules.state import State
from stepformer.rules.template import Stream, Template, register_template


def calls_of(n_layer: int, splitting: str) -> int:
    return n_layer if splitting == "parallel" else 2 * n_layer


@register_template(
    "attnres",
    equation="v' = g(n sum_i c_i v_i),  c = softmax_i(w . RMSNorm(v_i)) over the n sources v so far",
    cite="kimi2026attention",
    aliases=("attention-residuals",),
)
class AttentionResiduals(Template):
    """The point is the mean of the embedding and of all answers so far, by weights that depend on them, times their
    number: at w = 0, where training starts, it is their sum, the x of gradient descent.

    With `blocks` answers add up inside a block of consecutive calls: sources are the embedding, the sums of finished
    blocks and the running sum of the present one. x is the sum of everything, which nothing reads; after the last call
    it becomes one more such mean over all sources, with a w of its own.
    """

    options = {
        "blocks": integer(
            0, minimum=0, help="blocks of oracle calls whose answers add up; 0: as many as calls, the full form"
        )
    }
    reads_out = True
    blocks: int

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        if config.splitting not in ("lie-trotter", "parallel") and not config.component("splitting").needs_velocity:
            return (
                f"Template 'attnres' keeps the answer of every oracle call, and splitting '{config.splitting}' takes "
                "fractions of steps: use 'lie-trotter' or 'parallel'."
            )
        calls = calls_of(config.get("n_layer"), config.splitting)
        if config.option("blocks") > calls:
            return f"blocks = {config.option('blocks')} is more than the {calls} oracle calls of this model."
        return None

    def describe(self) -> str:
        answers = f"sums of the answers of {self.blocks} blocks of calls" if self.blocks else "all answers"
        return f"{super().describe()}: the embedding, {answers}"

    def place(self, layer: int, n_layer: int) -> None:
        super().place(layer, n_layer)
        count = self.blocks or 2 * n_layer
        later = {f"b{i}": Stream("later", "answer or sum of answers") for i in range(1, count + 1)}
        running = {"r": Stream("later", "sum of the answers of the present block")} if self.blocks else {}
        self.streams = {"b0": Stream("copy", "embedding"), **later, **running}

    def arrays_of(self, turn: str) -> Mapping[str, Array]:
        return {"w": Array((self.n_head * self.head_dim,))}

    def constants_of(self, turn: str) -> Mapping[str, float]:
        """Which block the turn's call ends, 0 for none."""
        calls = calls_of(self.n_layer, "parallel" if turn == "both" else "")
        count, done = self.blocks or calls, self.call_of(turn) + 1
        block, rest = divmod(done, calls // count)
        ends = count if done == calls else block if rest == 0 and block < count else 0
        return {"ends": float(ends)}

    def unused(self, config: Selection) -> tuple[str, ...]:
        """The first call has one source, whatever its w."""
        return ("arrays.w_attn", "arrays.w_both", "arrays.w") if self.first else ()

    def query(self, s: State, c: Values) -> Tensor:
        sources = [s.streams[name] for name in self.streams if name in s.streams]
        return sources[0] if len(sources) == 1 else attend_depth(sources, c.w, eps=self.eps)

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        total = s.r + g if "r" in s.streams else g
        if c.ends:
            return s.without("r").replace(u=g, **{f"b{int(c.ends)}": total})
        return s.replace(u=g, r=total)

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.without("u").replace(x=s.x + s.u)

    def read_out(self, s: State, c: Values) -> Tensor:
        return self.query(s, c)
