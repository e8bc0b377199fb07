"""Stepformer models as Hugging Face ones: importing this module teaches `AutoModelForCausalLM` to load them.

    import stepformer.exchange.huggingface
    model = transformers.AutoModelForCausalLM.from_pretrained("folder")

`export_run` writes such a folder from a run (docs/share.md). Needs the extra `hub`.
"""

from stepformer.base.errors import StepformerError

try:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError:
    raise StepformerError(
        "Sharing with Hugging Face needs the package transformers: pip install 'stepformer[hub]'."
    ) from None

from stepformer.exchange.huggingface.configuration import StepformerConfig
from stepformer.exchange.huggingface.export import as_transformers_tokenizer, export_run
from stepformer.exchange.huggingface.modeling import StepformerCache, StepformerForCausalLM

AutoConfig.register(StepformerConfig.model_type, StepformerConfig, exist_ok=True)
AutoModelForCausalLM.register(StepformerConfig, StepformerForCausalLM, exist_ok=True)
# By this list, which `register` does not touch, Trainer decides whether it has to shift labels that it smooths.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[StepformerConfig.model_type] = StepformerForCausalLM.__name__

__all__ = ["StepformerCache", "StepformerConfig", "StepformerForCausalLM", "as_transformers_tokenizer", "export_run"]
