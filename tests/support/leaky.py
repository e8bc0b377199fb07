"""Two templates that read the future, each in its own way; the audit must catch both."""

from __future__ import annotations

import torch
from torch import Tensor

import stepformer as sf
from stepformer.rules.first_order import Nesterov


@sf.register_template("leak-shift", equation="v' mixes in the next token's velocity")
class LeakShift(Nesterov):
    """Mixes tokens across time in a stream: every velocity takes a little of the one after it."""

    def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
        s = super().kick(s, c, g, scale)
        later = torch.cat([s.v[:, 1:], s.v[:, -1:]], dim=1)
        return s.replace(v=s.v + 0.5 * later)


@sf.register_template("leak-statistic", equation="v' = v / rms over the whole sequence")
class LeakStatistic(Nesterov):
    """Divides by a statistic of the whole sequence, later tokens included."""

    def kick(self, s: sf.State, c: sf.Values, g: Tensor, scale: float = 1.0) -> sf.State:
        s = super().kick(s, c, g, scale)
        return s.replace(v=s.v / (s.v.square().mean(dim=(1, 2), keepdim=True).sqrt() + 1e-3))
