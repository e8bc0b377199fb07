"""Who sees whom: causal attention, a mask that is given, or documents that do not see each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Confined:
    """Tokens that see those of their own document alone; what layers ask about it is made once, when first asked for.

    positions, origins: (B, T), where each token stands and where its document begins; keys: how many there are.
    """

    positions: Tensor
    origins: Tensor
    keys: int
    made: dict[str, Tensor] = field(default_factory=dict)

    def mask(self) -> Tensor:
        """(B, 1, T, keys), True where a key is visible: from the first of its document, a contiguous stretch, on."""
        if "mask" not in self.made:
            keys = torch.arange(self.keys, device=self.origins.device)
            visible = (keys <= self.positions[..., None]) & (keys >= self.origins[..., None])
            self.made["mask"] = visible[:, None]
        return self.made["mask"]

    def ends(self) -> Tensor:
        """(B, T) in int32, the position after the last token of each one's document, in rows from position 0 on."""
        if "ends" not in self.made:
            # as many tokens as have an origin up to here, since origins never decrease
            here = self.positions.contiguous()
            self.made["ends"] = torch.searchsorted(self.origins, here, right=True, out_int32=True)
        return self.made["ends"]


class Sight:
    """What tokens of a forward pass see, from where they stand; `Call` says what these fields are."""

    positions: Tensor
    shown: Tensor | None
    end: int
    documents: Confined | None

    @property
    def restricted(self) -> bool:
        """Whether there is a mask, without making one: tokens do not simply see all those before them."""
        return self.shown is not None or self.documents is not None

    @property
    def mask(self) -> Tensor | None:
        """(B or 1, 1, T, end), True where a key is visible; None where `shown` is and there are no documents."""
        return self.shown if self.documents is None else self.documents.mask()

    @property
    def origins(self) -> Tensor | None:
        """(B, T), where each token's document begins, if documents do not see each other."""
        return None if self.documents is None else self.documents.origins

    def visible(self, begin: int = 0, end: int | None = None) -> Tensor:
        """True where a query, of those from `begin` to `end`, sees a key: (T, keys) or (B or 1, 1, T, keys)."""
        mask = self.mask
        if mask is not None:
            return mask[:, :, begin:end]
        keys = torch.arange(max(self.end, self.positions.shape[-1]), device=self.positions.device)
        return keys <= self.positions[begin:end, None]

    def distances(self) -> Tensor:
        """i - j of each query i and key j, (T, keys) or (B, T, keys); negative where the key stands behind it."""
        keys = torch.arange(max(self.end, self.positions.shape[-1]), device=self.positions.device)
        return self.positions[..., None] - keys

    def counts(self) -> Tensor:
        """How many tokens each token sees, itself included: (T,) or (B, T)."""
        origins = self.origins
        return self.positions + 1 if origins is None else self.positions - origins + 1
