"""Finds this model's classes in the installed package: pip install 'stepformer[hub]'."""

from stepformer.huggingface import StepformerConfig, StepformerForCausalLM

__all__ = ["StepformerConfig", "StepformerForCausalLM"]
