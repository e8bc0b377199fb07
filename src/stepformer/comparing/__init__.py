"""Comparing finished runs: paired statistics, tables and a plot."""

from __future__ import annotations

from stepformer.comparing.plots import plot_comparison, plot_differences
from stepformer.comparing.statistics import (
    Comparison,
    PairedDifference,
    Row,
    RunRecord,
    Summary,
    compare,
    load_records,
    mean_ratio,
    paired,
    summarise,
    t_quantile,
    time_ratio,
    tokens_to_reach,
)
from stepformer.comparing.tables import csv_text, markdown_text, rich_table

__all__ = [
    "Comparison",
    "PairedDifference",
    "Row",
    "RunRecord",
    "Summary",
    "compare",
    "csv_text",
    "load_records",
    "markdown_text",
    "mean_ratio",
    "paired",
    "plot_comparison",
    "plot_differences",
    "rich_table",
    "summarise",
    "t_quantile",
    "time_ratio",
    "tokens_to_reach",
]
