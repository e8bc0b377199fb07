"""Optimizers of the parameters, routed by declared role: Muon, AdamW, Scion, PolarGrad; schedules, clipping, SAM."""

from stepformer.optim.build import Optimizers, global_norm, scion_init
from stepformer.optim.config import OptimConfig, Schedule
from stepformer.optim.lmo import LmoOptimizer
from stepformer.optim.polar import polar

__all__ = ["LmoOptimizer", "OptimConfig", "Optimizers", "Schedule", "global_norm", "polar", "scion_init"]
