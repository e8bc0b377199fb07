"""Comparing finished runs: paired statistics, tables and a plot."""

from __future__ import annotations

from stepformer.study.comparison import Comparison, Facts, Row, compare, time_ratio
from stepformer.study.plots import plot_comparison, plot_differences
from stepformer.study.records import RunRecord, load_records
from stepformer.study.statistics import (
    PairedDifference,
    Summary,
    mean_ratio,
    paired,
    summarise,
    t_quantile,
    tokens_to_reach,
)

__all__ = ["Comparison", "Facts", "PairedDifference", "Row", "RunRecord", "Summary"]
__all__ += ["compare", "load_records", "mean_ratio", "paired", "plot_comparison", "plot_differences"]
__all__ += ["summarise", "t_quantile", "time_ratio", "tokens_to_reach"]
