"""The mathematics of depth: state, coefficients, templates and splittings."""

# Importing a module registers its rules.
from stepformer.schemes import adaptive, first_order, hamiltonian, kronecker, spectral  # noqa: F401
from stepformer.schemes.coefficients import Coefficient, Values, free, positive, unit
from stepformer.schemes.hamiltonian import HamiltonianStep
from stepformer.schemes.splittings import Splitting, Substep, register_splitting, splittings
from stepformer.schemes.state import State
from stepformer.schemes.template import Stream, Template, register_template, templates

__all__ = [
    "Coefficient",
    "HamiltonianStep",
    "Splitting",
    "State",
    "Stream",
    "Substep",
    "Template",
    "Values",
    "free",
    "positive",
    "register_splitting",
    "register_template",
    "splittings",
    "templates",
    "unit",
]
