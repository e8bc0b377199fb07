"""Gradient oracles: attention, MLP, their norms and the caches of incremental decoding."""

# Importing a module registers its attentions.
from stepformer.ops.slots import TokenSlot
from stepformer.oracles import constrained, hamiltonian, linear, softmax  # noqa: F401
from stepformer.oracles.attention import Attention, attentions, register_attention
from stepformer.oracles.caches import Call, fresh_call
from stepformer.oracles.mlp import MLP, mlps, register_mlp
from stepformer.oracles.norms import make_norm

__all__ = ["MLP", "Attention", "Call", "TokenSlot"]
__all__ += ["attentions", "fresh_call", "make_norm", "mlps", "register_attention", "register_mlp"]
