"""A Hamiltonian attention that reads the future: its force is the exact gradient of the causally masked energy.

With E_ij = exp(S_ij) for j <= i and 0 above the diagonal, z_i = (1/n_i) sum_j E_ij and a_i = y_i.B y_i / d, the energy

    H = sum_i a_i / (2 z_i) - (kappa / 2) sum_i z_i

has, with omega_i = a_i / z_i^2 + kappa, the negative gradient

    -dH/du_m = (omega_m / 2 n_m) sum_{j<=m} E_mj A u_j  +  sum_{i>=m} (omega_i / 2 n_i) E_im A^T u_i.

In the first sum token m is the query, in the second it is a key, and the queries that look at it come later. The
package does not have this force (docs/reading-the-future.md); the audit must catch it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import stepformer as sf
from stepformer.ops.scores import rotate
from stepformer.oracles.caches import Call
from stepformer.oracles.hamiltonian import HamiltonianAttention, SoftmaxFields
from stepformer.rules.hamiltonian import SYMP


@sf.register_attention(
    "published-force",
    equation="F_i = B y_i / z_i;  G_m = -dH/du_m, H = sum_i a_i/(2 z_i) - (kappa/2) sum_i z_i on the masked kernel",
    cite=SYMP,
)
class PublishedForce(HamiltonianAttention):
    """The package's Hamiltonian attention with the whole gradient of its masked energy as the force."""

    options = {name: option for name, option in HamiltonianAttention.options.items() if name != "force"}

    @classmethod
    def refusals(cls, config: sf.ModelConfig) -> list[str]:
        return []

    def fields(self, u: Tensor, y: Tensor, call: Call) -> WholeGradient:
        return WholeGradient(self, u, y, call)


class WholeGradient(SoftmaxFields):
    """F as in the package, G = -dH/du."""

    def force(self) -> Tensor:
        as_query, as_key = self.parts()
        return as_query + as_key

    def parts(self) -> tuple[Tensor, Tensor]:
        """What a token receives as a query, from keys up to it, and as a key, from queries at and after it."""
        attention = self.attention
        kappa = attention.coefficients.value("kappa") if attention.coefficients.specs else attention.kappa
        visible = self.call.visible()
        with torch.autocast(self.q.device.type, enabled=False):
            scores = attention.scores(self.q, self.k, visible)
            omega = self.a * torch.exp(-2 * self.log_z) + kappa
            weights = 0.5 * omega * torch.exp(scores - self.log_n)
            if attention.score_bound:  # dS/d(raw score) of the soft bound
                weights = weights * (1 - (scores.masked_fill(~visible, 0.0) / attention.score_bound).square())
            as_query, as_key = weights @ self.k, weights.mT @ self.q
        # with a cache there are older keys than tokens in this call
        rows = self.call.positions.expand(as_key.shape[0], -1)[:, None, :, None]
        as_key = as_key.take_along_dim(rows, dim=2)
        maps = attention.query, attention.query if attention.key is None else attention.key
        return self.back(as_query, maps[0]), self.back(as_key, maps[1])

    def back(self, total: Tensor, linear: torch.nn.Linear) -> Tensor:
        """tau W^T applied to sums of rotated queries or keys, the mean over kernels."""
        if self.attention.rotary:
            total = rotate(total, -self.call.positions)
        total = (self.attention.tau / self.attention.kernels) * total.transpose(1, 2).flatten(-2)
        return F.linear(total, linear.weight.mT).to(self.dtype)
