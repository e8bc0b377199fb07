"""Reports on runs: one self-contained page to show, and Markdown, pictures and tables for a paper."""

from __future__ import annotations

from stepformer.pages.reports.collect import Curve, RunData, gather
from stepformer.pages.reports.contents import Report, build
from stepformer.pages.reports.page import page_html
from stepformer.pages.reports.paper import write_paper

__all__ = ["Curve", "Report", "RunData", "build", "gather", "page_html", "write_paper"]
