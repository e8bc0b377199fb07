"""What every parameter is for. Optimizers, weight decay and counts route by declared role, never by shape or name."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from torch import nn

from stepformer.base.errors import StepformerError
from stepformer.rules.coefficients import ArrayBank, CoefficientBank


class Role(StrEnum):
    """What a parameter is for, by which an optimizer chooses its rule, rate and decay."""

    MATRIX = "matrix"  # weights of linear maps
    EMBEDDING = "embedding"  # tables of tokens and positions
    HEAD = "head"  # an output head that is not the token table
    NORM = "norm"  # gains of the norms, and biases where an option adds them
    COEFFICIENT = "coefficient"  # learned scalars
    ARRAY = "array"  # vectors and matrices of a depth rule; trained as tables are


def declare(module: nn.Module, **roles: Role) -> None:
    """State the role of a module's own parameters: `declare(self, prior=Role.COEFFICIENT)`."""
    module.parameter_roles = roles  # type: ignore[assignment]


def _roles_of(module: nn.Module) -> dict[str, Role]:
    declared = getattr(module, "parameter_roles", None)
    if declared is not None:
        return {name: Role(role) for name, role in declared.items()}
    if isinstance(module, ArrayBank):
        return dict.fromkeys(module.specs, Role.ARRAY)
    if isinstance(module, CoefficientBank):
        return {k: Role.NORM if spec.kind == "gain" else Role.COEFFICIENT for k, spec in module.specs.items()}
    if isinstance(module, nn.Linear):
        return {"weight": Role.MATRIX, "bias": Role.NORM}
    if isinstance(module, nn.Embedding):
        return {"weight": Role.EMBEDDING}
    if isinstance(module, nn.LayerNorm):
        return {"weight": Role.NORM, "bias": Role.NORM}
    return {}


def named_roles(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Role]]:
    """Every parameter with its role; a parameter nobody declared is an error, not a guess."""
    for prefix, module in model.named_modules():
        roles = _roles_of(module)
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            own = name.rpartition(".")[2]
            role = roles.get(own)
            if role is None:
                raise StepformerError(
                    f"Parameter '{name}' has no role: say what it is for in the class {type(module).__name__} by "
                    f"parameter_roles = {{'{own}': 'coefficient'}}, for example. Roles: {', '.join(Role)}."
                )
            yield name, parameter, role
