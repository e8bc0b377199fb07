"""A model's config in the form that `transformers` saves as config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from stepformer.model.config import ModelConfig, declared_options

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
CODE_FILE = "modeling_stepformer.py"
# What `trust_remote_code=True` runs: two names from the installed package, nothing else.
CODE = '''"""Finds this model's classes in the installed package, stepformer."""

from stepformer.exchange.huggingface import StepformerConfig, StepformerForCausalLM

__all__ = ["StepformerConfig", "StepformerForCausalLM"]
'''
AUTO_MAP = {
    "AutoConfig": "modeling_stepformer.StepformerConfig",
    "AutoModelForCausalLM": "modeling_stepformer.StepformerForCausalLM",
}


class StepformerConfig(PretrainedConfig):
    """All keys of `ModelConfig`, checked as there; options of the components may stand among them or in `options`."""

    model_type = "stepformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "context",
    }

    def __init__(self, **kwargs: Any) -> None:
        for theirs, ours in self.attribute_map.items():
            if theirs in kwargs:
                kwargs[ours] = kwargs.pop(theirs)
        given = {key: kwargs.pop(key) for key in FIELDS if key in kwargs}
        options = dict(given.pop("options", {}))
        for key in declared_options(given):
            if key in kwargs:
                options[key] = kwargs.pop(key)
        config = ModelConfig(**given, options=options)
        for key in FIELDS:
            value = getattr(config, key)
            setattr(self, key, dict(value) if key == "options" else value)
        kwargs.pop("auto_map", None)
        kwargs["tie_word_embeddings"] = config.head == "tied"  # the head is the token table
        super().__init__(**kwargs)
        self.auto_map = dict(AUTO_MAP)

    @classmethod
    def of(cls, config: ModelConfig, **kwargs: Any) -> StepformerConfig:
        """The same architecture; `kwargs` are keys that only `transformers` knows, such as `eos_token_id`."""
        return cls(**{key: getattr(config, key) for key in FIELDS}, **kwargs)

    def model_config(self) -> ModelConfig:
        """The architecture as stepformer has it."""
        return ModelConfig(**{key: getattr(self, key) for key in FIELDS})

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: what is saved refers to the installed package and needs no copy of its source."""
