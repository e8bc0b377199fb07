"""Small experiments on the particle systems behind attention: `stepformer flow`."""

from collections.abc import Callable

from stepformer.flows.convergence import ellipse, order
from stepformer.flows.derivatives import hamiltonian
from stepformer.flows.energies import energy
from stepformer.flows.filters import filter_
from stepformer.flows.integrators import SCHEMES, Friction, accelerated, standard
from stepformer.flows.results import Result, Tell
from stepformer.flows.systems import Flow, LinearFlow, Moments, SoftmaxFlow

EXPERIMENTS: dict[str, Callable[[int, int, Tell], Result]] = {
    "energy": energy,
    "order": order,
    "ellipse": ellipse,
    "hamiltonian": hamiltonian,
    "filter": filter_,
}

__all__ = [
    "EXPERIMENTS",
    "SCHEMES",
    "Flow",
    "Friction",
    "LinearFlow",
    "Moments",
    "Result",
    "SoftmaxFlow",
    "accelerated",
    "standard",
]
