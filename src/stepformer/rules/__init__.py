"""The mathematics of depth: state, coefficients, templates and splittings."""

# Importing a module registers its rules.
from stepformer.rules import (  # noqa: F401
    adaptive,
    attention_residuals,
    first_order,
    hamiltonian,
    hyper,
    kronecker,
    spectral,
)
from stepformer.rules.coefficients import Array, Coefficient, Values, free, positive, unit
from stepformer.rules.hamiltonian import HamiltonianStep
from stepformer.rules.splittings import Splitting, Substep, register_splitting, splittings
from stepformer.rules.state import State
from stepformer.rules.template import Stream, Template, register_template, templates

# fmt: off
__all__ = [
    "Array", "Coefficient", "HamiltonianStep", "Splitting", "State", "Stream", "Substep", "Template", "Values", "free",
    "positive", "register_splitting", "register_template", "splittings", "templates", "unit",
]
