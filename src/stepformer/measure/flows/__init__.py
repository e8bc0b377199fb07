"""Small experiments on the particle systems behind attention: `stepformer flow`."""

from collections.abc import Callable

from stepformer.measure.flows.convergence import ellipse, order
from stepformer.measure.flows.depths import best, threshold
from stepformer.measure.flows.energies import energy, hamiltonian
from stepformer.measure.flows.filters import filter_
from stepformer.measure.flows.integrators import SCHEMES, Friction, accelerated, standard
from stepformer.measure.flows.results import Result, Tell
from stepformer.measure.flows.systems import Flow, LinearFlow, Moments, SoftmaxFlow

EXPERIMENTS: dict[str, Callable[[int, int, Tell], Result]] = {
    "energy": energy,
    "order": order,
    "ellipse": ellipse,
    "hamiltonian": hamiltonian,
    "filter": filter_,
    "threshold": threshold,
    "best": best,
}

__all__ = ["EXPERIMENTS", "SCHEMES", "Flow", "Friction", "LinearFlow", "Moments", "Result", "SoftmaxFlow"]
__all__ += ["accelerated", "standard"]
