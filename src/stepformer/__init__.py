"""stepformer: transformers whose layers are steps of an optimizer, chosen by a word in the config.

Names are imported when they are first asked for: `import stepformer` alone does not wait for torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from stepformer.base import aliases
from stepformer.base.version import __version__

# Before torch starts its threads: waiting threads should sleep, not spin. On two cores shared with other programs a
# training step was up to eight times slower with spinning threads (docs/lab-notebook.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
aliases.install()

if TYPE_CHECKING:
    from stepformer.base.errors import ConfigError, InputError, StepformerError, UnknownNameError
    from stepformer.base.options import Option
    from stepformer.catalogue import (
        build,
        load_config,
        model_config,
        preset,
        presets,
        register_preset,
        register_template,
    )
    from stepformer.exchange.importing import save_run
    from stepformer.extras import Extra, register_extra
    from stepformer.measure.diagnostics.audit import audit
    from stepformer.model import Model, ModelConfig, Output, Role
    from stepformer.model.engines.recording import record
    from stepformer.oracles import MLP, Attention, Call, TokenSlot, register_attention, register_mlp
    from stepformer.rules import (
        HamiltonianStep,
        Splitting,
        State,
        Stream,
        Template,
        Values,
        free,
        positive,
        register_splitting,
        unit,
    )
    from stepformer.study.studies import compare, sweep
    from stepformer.training import evaluate_run, load_run, resume, run_config, train

_find = aliases.lazy(__name__)
# fmt: off
__all__ = [
    "MLP", "Attention", "Call", "ConfigError", "Extra", "HamiltonianStep", "InputError", "Model", "ModelConfig",
    "Option", "Output", "Role", "Splitting", "State", "StepformerError", "Stream", "Template", "TokenSlot",
    "UnknownNameError", "Values", "__version__", "audit", "build", "compare", "evaluate_run", "free", "load_config",
    "load_run", "model_config", "positive", "preset", "presets", "record", "register_attention", "register_extra",
    "register_mlp", "register_preset", "register_splitting", "register_template", "resume", "run_config", "save_run",
    "sweep", "train", "unit",
]
# fmt: on


def __getattr__(name: str) -> Any:
    """A public name from where it lives, or a folder of the package as it is called now or was called before."""
    if name not in __all__ and not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    return globals().setdefault(name, _find(name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
