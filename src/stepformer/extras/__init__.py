"""The fourth axis: what a model may have beside its rule, its splitting and its oracles."""

# Importing a module registers its extra.
from stepformer.extras import documents, embedding_skip, softcap, value_residual  # noqa: F401
from stepformer.extras.extra import Extra, chosen, extras, register_extra

__all__ = ["Extra", "chosen", "extras", "register_extra"]
