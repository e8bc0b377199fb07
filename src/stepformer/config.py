"""Typed configuration: from Python, TOML files and `key=value` words, with every problem reported at once.

`ModelConfig` holds the settings every model has. Options that belong to a chosen component (`k` of the IMEX
splitting, `attention_backend` of softmax attention) are ordinary keys next to them; they are refused, with a
sentence, when that component is not the one selected.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stepformer.errors import ConfigError, InputError, UnknownNameError, suggestion
from stepformer.options import Option
from stepformer.oracles import attentions, mlps
from stepformer.registry import Registry
from stepformer.schemes import splittings, templates

_COMPONENTS: dict[str, Registry[Any]] = {
    "template": templates,
    "splitting": splittings,
    "attention": attentions,
    "mlp": mlps,
}


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelConfig:
    """Everything that defines an architecture. Validated on construction; immutable; hashable."""

    template: str = _setting("gd", "the optimizer whose step a layer takes")
    splitting: str = _setting("lie-trotter", "how attention and MLP take turns inside a layer")
    attention: str = _setting("softmax", "the attention oracle")
    mlp: str = _setting("gelu", "the MLP oracle")
    n_layer: int = _setting(12, "number of layers")
    n_head: int = _setting(12, "number of attention heads")
    d_model: int = _setting(768, "width of the token streams")
    context: int = _setting(1024, "longest sequence")
    vocab_size: int = _setting(50_304, "rows of the token table")
    real_vocab: int | None = _setting(None, "ids from here on are padding and never sampled (default: none are)")
    mlp_hidden: int | None = _setting(None, "hidden width of the MLP (default: 4 d_model; gated: 8/3 d_model)")
    norm: Literal["layernorm", "rmsnorm"] = _setting("layernorm", "pre-norms and final norm; rmsnorm is gainless")
    norm_eps: float = _setting(1e-5, "epsilon of every norm")
    positions: Literal["learned", "rotary"] = _setting("learned", "position table, or rotation of queries and keys")
    bias: bool = _setting(False, "biases in linear maps and norms (imported GPT-2 weights need them)")
    aux_init: Literal["embed", "zero"] = _setting("embed", "auxiliary streams start from own tables, or at zero")
    aux_norm_gain: float = _setting(1.0, "initial gain of the auxiliary norms LN_v and LN_u")
    activation_checkpointing: bool = _setting(False, "recompute each block in the backward pass to save memory")
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = _canonicalise(self) or _problems(self)
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """From flat keys, component options among them; unknown keys are errors with a suggestion."""
        values = dict(values)
        options = dict(values.pop("options", {}))
        own = {f.name for f in dataclasses.fields(cls)} - {"options"}
        for key in [k for k in values if k not in own]:
            options[key] = values.pop(key)
        return cls(**values, options=options)

    def replace(self, **changes: Any) -> ModelConfig:
        """The same config with some keys (or options) changed; options of components left behind are dropped."""
        merged = self.to_dict()
        for kind, registry in _COMPONENTS.items():
            new = changes.get(kind)
            if isinstance(new, str) and new in registry and registry.canonical(new) != merged[kind]:
                kept = registry[new].component.options
                for key in registry[merged[kind]].component.options:
                    if key not in kept:
                        merged.pop(key, None)
        if "vocab_size" in changes and "real_vocab" not in changes:
            merged.pop("real_vocab", None)
        return ModelConfig.from_dict({**merged, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Flat keys that differ from their defaults, options included, plus the components by name."""
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name != "options" and (f.name in _COMPONENTS or f.name in _SIZE_KEYS or value != f.default):
                out[f.name] = value
        return {**out, **self.options}

    def option(self, name: str) -> Any:
        """The value of a component option, set or default."""
        return self.options[name] if name in self.options else declared_options(self)[name][1].default

    def options_of(self, kind: str) -> dict[str, Any]:
        """The options of one component, defaults filled in."""
        return {name: self.option(name) for name, (owner, _) in declared_options(self).items() if owner == kind}

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_head

    @property
    def hash(self) -> str:
        """Twelve hex digits that identify the architecture.

        Only what differs from a default enters, so an option added to the library later leaves old hashes alone;
        `activation_checkpointing` and `attention_backend` do not enter: they do not change the function computed.
        """
        values = {k: v for k, v in self.to_dict().items() if k not in _SAME_FUNCTION}
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))


_SIZE_KEYS = ("n_layer", "n_head", "d_model", "context", "vocab_size")
_SAME_FUNCTION = ("activation_checkpointing", "attention_backend")


def _canonicalise(config: ModelConfig) -> list[str]:
    """Replace aliases by registered names and drop options that equal their defaults; report unknown names."""
    problems = []
    for kind, registry in _COMPONENTS.items():
        try:
            object.__setattr__(config, kind, registry.canonical(getattr(config, kind)))
        except UnknownNameError as error:
            problems.append(str(error))
    if not problems:
        declared = declared_options(config)
        kept = {k: v for k, v in sorted(config.options.items()) if k not in declared or v != declared[k][1].default}
        object.__setattr__(config, "options", kept)
    return problems


def declared_options(config: ModelConfig) -> dict[str, tuple[str, Option]]:
    """Options that the selected components declare: name -> (component kind, option)."""
    declared: dict[str, tuple[str, Option]] = {}
    for kind, registry in _COMPONENTS.items():
        name = getattr(config, kind)
        if name in registry:
            options = registry[name].component.options
            declared.update({key: (kind, option) for key, option in options.items()})
    return declared


def _problems(config: ModelConfig) -> list[str]:
    """Every reason why this config cannot be built."""
    problems = []
    hints = typing.get_type_hints(ModelConfig)
    for f in dataclasses.fields(config):
        if f.name != "options":
            problem = _type_problem(f.name, getattr(config, f.name), hints[f.name])
            problems += [problem] if problem else []
    if problems:  # arithmetic below needs the right types
        return problems + _option_problems(config)

    positive = ("n_layer", "n_head", "d_model", "context", "vocab_size")
    problems += [
        f"{key} = {getattr(config, key)} should be at least 1." for key in positive if getattr(config, key) < 1
    ]
    if config.mlp_hidden is not None and config.mlp_hidden < 1:
        problems.append(f"mlp_hidden = {config.mlp_hidden} should be at least 1.")
    for key in ("norm_eps", "aux_norm_gain"):
        if not 0 < getattr(config, key) < math.inf:
            problems.append(f"{key} = {getattr(config, key)} should be above 0 and finite.")
    if config.real_vocab is not None and not 1 <= config.real_vocab <= config.vocab_size:
        problems.append(f"real_vocab = {config.real_vocab} should lie between 1 and vocab_size = {config.vocab_size}.")
    if config.n_head >= 1 and config.d_model % config.n_head:
        divisors = [n for n in range(1, config.d_model + 1) if config.d_model % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - config.n_head))
        problems.append(
            f"n_head = {config.n_head} does not divide d_model = {config.d_model}: every head needs the same width. "
            f"{nearest} heads would."
        )
    elif config.positions == "rotary" and config.n_head >= 1 and config.head_dim % 2:
        problems.append(
            f"positions = 'rotary' turns pairs of coordinates, but d_model / n_head = {config.head_dim} is odd. "
            "Choose an even head width or positions = 'learned'."
        )
    option_problems = _option_problems(config)
    return problems + (option_problems or _pair_problems(config))


def _type_problem(name: str, value: Any, hint: Any) -> str | None:
    accepted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in accepted:
        if typing.get_origin(kind) is Literal:
            if value in typing.get_args(kind):
                return None
            return f"{name} = {value!r} is not one of {', '.join(map(repr, typing.get_args(kind)))}."
        numeric = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if numeric or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return None
    spelling = {type(None): "nothing", bool: "bool (true or false)"}
    wanted = " or ".join(spelling.get(k, k.__name__) for k in accepted)
    return f"{name} = {value!r} should be of type {wanted}."


def _option_problems(config: ModelConfig) -> list[str]:
    declared = declared_options(config)
    problems = []
    for key, value in config.options.items():
        if key in declared:
            problem = declared[key][1].problem(key, value)
            problems += [problem] if problem else []
            continue
        owners = [
            f"{kind} = '{entry.name}'"
            for kind, registry in _COMPONENTS.items()
            for entry in registry
            if key in entry.component.options
        ]
        if owners:
            problems.append(
                f"{key} = {value!r} has no meaning here: it is an option of {' or '.join(owners)}; "
                f"this model has splitting = '{config.splitting}' and template = '{config.template}'."
            )
        else:
            known = [f.name for f in dataclasses.fields(config) if f.name != "options"] + list(declared)
            hint = suggestion(key, [*known, "preset", "size"]) or f" Known keys: {', '.join(known)}."
            problems.append(f"Unknown key '{key}'.{hint}")
    return problems


def _pair_problems(config: ModelConfig) -> list[str]:
    """Template x splitting pairs without meaning."""
    template, splitting = templates[config.template].component, splittings[config.splitting].component
    if splitting.needs_velocity and not template.has_velocity():
        usable = ", ".join(e.name for e in templates if e.component.has_velocity())
        return [
            f"Splitting '{config.splitting}' works on a velocity stream, and template '{config.template}' has none. "
            f"Use a velocity template ({usable}), or splitting parallel, lie-trotter or strang."
        ]
    refusal = template.refusal(config.splitting, config.options)
    return [refusal] if refusal else []


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as nested dictionaries, with a sentence instead of a traceback when that fails."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise InputError(f"There is no config file '{path}'.") from None
    except IsADirectoryError:
        raise InputError(f"'{path}' is a folder, not a config file.") from None
    except PermissionError:
        raise InputError(f"The config file '{path}' may not be read.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"'{path}' is not valid TOML: {error}.") from None


def parse_override(word: str) -> tuple[str, Any]:
    """`key=value` with the value read as TOML; a bare word is a string (`template=nesterov`)."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise InputError(f"'{word}' is not of the form key=value.")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text


def merge(base: Mapping[str, Any], overrides: Iterable[str], section: str) -> dict[str, Any]:
    """Apply `key=value` or `section.key=value` words to one section's values."""
    merged = dict(base)
    for word in overrides:
        key, value = parse_override(word)
        merged[key.removeprefix(f"{section}.")] = value
    return merged
