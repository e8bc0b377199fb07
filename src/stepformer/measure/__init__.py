"""Measurements of a model or a run."""
