"""Optimizers of the parameters, routed by declared role: Muon, AdamW, Scion, PolarGrad; schedules, clipping, SAM."""

from stepformer.optim.build import Optimizers, global_norm, scion_init
from stepformer.optim.config import OptimConfig
from stepformer.optim.lmo import LmoOptimizer
from stepformer.optim.polar import polar
from stepformer.optim.schedules import Schedule

__all__ = ["LmoOptimizer", "OptimConfig", "Optimizers", "Schedule", "global_norm", "polar", "scion_init"]
