"""Checks and measurements of models."""
