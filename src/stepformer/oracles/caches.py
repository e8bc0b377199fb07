"""Where the tokens of a forward pass stand, and the memory of past tokens for incremental decoding.

Streams live along depth and belong to one token each, so nothing but the attention's own memory has to be kept.
Every attention *call* owns a slot: a block that asks its attention twice, at two points, has two.

Rows of a batch may have different lengths. Prompts are padded on the right; a row's next token is written at that
row's own position, over the padding, and keys beyond a query's position are never visible. So positions are
natural, and padding can neither be seen nor shift anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepformer.base.errors import StepformerError
from stepformer.ops.mixing import Mixed
from stepformer.ops.slots import Slot
from stepformer.ops.visibility import Confined, Sight


@dataclass
class Call(Sight):
    """Where the tokens of this forward pass stand; what an attention needs to know besides its input.

    positions: (T,) or, when rows differ, (B, T). shown: (B or 1, 1, T, end), True where a key is visible; None means
    plain causal attention among the new tokens (or, for one new token on rows of equal length, all keys).
    documents: if documents do not see each other, who sees whom instead of that.
    lengths: (B,), how many of each row's tokens are real, when prompts are padded on the right.
    memory: what this and shallower layers leave for deeper ones (`State.memory`), to read and to write.
    mixes: what extras make of an attention's values, each a function of them and of the memory; `mixed`: the same,
    where somebody has already found out what that is.
    observe: called with a name and a tensor by oracles that have something to report.
    rows: whether `observe` also wants entropy and energy of every row, (B, H, T), which cost a look at all scores.
    """

    positions: Tensor
    shown: Tensor | None = None
    start: int = 0
    end: int = 0
    uniform: bool = True
    lengths: Tensor | None = None
    slots: Sequence[Slot] | None = None
    used: int = 0
    documents: Confined | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)
    mixes: Sequence[Callable[[Tensor, dict[str, Tensor]], Tensor]] = ()
    mixed: Mixed | None = None
    observe: Callable[[str, Tensor], None] | None = None
    rows: bool = False

    def next_slot(self) -> Slot | None:
        """The cache of the attention call that is about to happen, in execution order within a block."""
        if self.slots is None:
            return None
        self.used += 1
        if self.used > len(self.slots):
            raise StepformerError(
                f"A block asks its attention {self.used} times and declares {len(self.slots)}: a splitting says how "
                "often in calls(), an integrator in attention_calls."
            )
        return self.slots[self.used - 1]

    def mix_values(self, v: Tensor) -> Tensor:
        """An attention's values as the model's extras want them gathered."""
        if self.mixed is not None:
            return self.mixed(v)
        for change in self.mixes:
            v = change(v, self.memory)
        return v


def fresh_call(tokens: Tensor, lengths: Tensor | None = None) -> Call:
    """How a forward pass without a cache sees its tokens (B, T)."""
    return Call(torch.arange(tokens.shape[1], device=tokens.device), end=tokens.shape[1], lengths=lengths)
