"""The fourth axis: what a model may have beside its rule, its splitting and its oracles."""

from stepformer.extras.extra import Extra, chosen, extras, register_extra

# Importing a module registers its extra, in the order in which a layer has their coefficients.
# isort: off
from stepformer.extras import value_residual, value_tables, embedding_skip, softcap, documents  # noqa: F401
from stepformer.extras import output_norm, scaled, denseformer, unet  # noqa: F401
# isort: on

__all__ = ["Extra", "chosen", "extras", "register_extra"]
