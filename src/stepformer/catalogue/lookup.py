"""Named presets and sizes: what drives the command line, the docs, the audit and the tests."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepformer.base.errors import ConfigError, StepformerError, UnknownNameError, independent, suggestion
from stepformer.base.words import merge, read_toml
from stepformer.catalogue import architectures
from stepformer.model.config import NOT_THE_FUNCTION, ModelConfig, declared_options
from stepformer.oracles import attentions, mlps
from stepformer.rules import splittings, templates

if TYPE_CHECKING:
    import torch

    from stepformer.model import Model

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 4, "n_head": 4, "d_model": 128, "context": 128, "vocab_size": 256},
    "small": {
        "n_layer": 12,
        "n_head": 12,
        "d_model": 768,
        "context": 1024,
        "vocab_size": 50_304,
        "real_vocab": 50_257,
    },
    "medium": {
        "n_layer": 24,
        "n_head": 16,
        "d_model": 1024,
        "context": 1024,
        "vocab_size": 50_304,
        "real_vocab": 50_257,
    },
}


@dataclass(frozen=True)
class Preset:
    """One row of the catalogue: a named point in template x splitting x attention x options."""

    name: str
    settings: Mapping[str, Any]
    equation: str
    cite: str
    aliases: tuple[str, ...] = ()
    published: str = ""

    @functools.cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict({**SIZES["small"], **self.settings})


OTHER_SECTIONS = ("data", "optim", "train", "recipe")  # of a run's file; a model alone does not read them
_PRESETS: dict[str, Preset] = {}
_ALIASES: dict[str, str] = {}


def register_preset(
    name: str,
    *,
    equation: str,
    cite: str,
    aliases: tuple[str, ...] = (),
    published: str = "",
    **settings: Any,
) -> None:
    """Add a named architecture; `settings` are config keys that differ from the defaults."""
    for word in (name, *aliases):
        if word in _ALIASES:
            raise StepformerError(f"The preset name '{word}' is already taken.")
    _PRESETS[name] = Preset(name, settings, equation, cite, aliases, published)
    _ALIASES.update(dict.fromkeys((name, *aliases), name))


architectures.register_all(register_preset)


def presets(pattern: str = "*") -> list[str]:
    """Names of all presets whose name or alias matches a shell pattern, in the order of the catalogue."""
    if not any(mark in pattern for mark in "*?["):
        pattern = f"*{pattern}*"
    return [p.name for p in _PRESETS.values() if any(fnmatch.fnmatch(w, pattern) for w in (p.name, *p.aliases))]


def preset(name: str) -> Preset:
    """A preset by name or alias; the bare name of a registered template means that template with Lie-Trotter."""
    if name in _ALIASES:
        return _PRESETS[_ALIASES[name]]
    if name in templates:
        entry = templates[name]
        return Preset(entry.name, {"template": entry.name, **entry.component.goes_with}, entry.equation, "")
    known = [*_ALIASES, *(e.name for e in templates)]
    raise UnknownNameError(f"Unknown preset '{name}'.{suggestion(name, known)} `stepformer list` shows all of them.")


def unlisted_templates() -> list[str]:
    """Templates that no preset uses: rules of your own."""
    used = {p.config.template for p in _PRESETS.values()}
    return [entry.name for entry in templates if entry.name not in used]


def _at_small(config: ModelConfig) -> ModelConfig:
    """The same architecture at the small size; a separator beyond its vocabulary becomes another id."""
    separator = None if config.document_separator is None else min(config.document_separator, 1)
    return config.replace(**{**SIZES["small"], "document_separator": separator})


def preset_of(config: ModelConfig) -> Preset | None:
    """The preset that this architecture is, whatever its size; None if it has no name."""
    at_small = _at_small(config)
    return next((row for row in _PRESETS.values() if row.config.hash == at_small.hash), None)


def closest_preset(config: ModelConfig) -> tuple[Preset | None, dict[str, Any]]:
    """The preset with the same components from which a config differs least, and the settings that differ."""
    mine = _at_small(config).to_dict()
    best: tuple[Preset | None, dict[str, Any]] = (None, {})
    for row in _PRESETS.values():
        theirs = row.config
        if any(
            getattr(theirs, kind) != getattr(config, kind) for kind in ("template", "splitting", "attention", "mlp")
        ):
            continue
        base = theirs.to_dict()
        changed = {key for key in {*mine, *base} - NOT_THE_FUNCTION if mine.get(key) != base.get(key)}
        differing = {
            key: config.option(key) if key in declared_options(config) else getattr(config, key) for key in changed
        }
        if best[0] is None or len(differing) < len(best[1]):
            best = (row, differing)
    return best


def size_settings(name: str) -> dict[str, Any]:
    """Config keys of a named size."""
    if name not in SIZES:
        raise UnknownNameError(f"Unknown size '{name}'.{suggestion(name, SIZES)} Known: {', '.join(SIZES)}.")
    return SIZES[name]


def model_config(name: str, /, *, size: str = "small", **overrides: Any) -> ModelConfig:
    """The config of a preset at a size, with overrides: `model_config("yurii", size="tiny", n_layer=2)`."""
    problems: list[str] = []
    settings: dict[str, Any] = {}
    unknown: set[str] = set()  # complaints about these would mislead
    try:
        settings.update(size_settings(size))
    except UnknownNameError as error:
        problems.append(str(error))
        unknown |= SIZES["small"].keys() - overrides.keys()
    try:
        settings.update(preset(name).settings)
    except UnknownNameError as error:
        problems.append(str(error))
        unknown |= {"template", "splitting", "attention", "mlp"}
    try:
        config = ModelConfig.from_dict(settings).replace(**overrides)
    except ConfigError as error:
        problems += independent(error.problems, unknown)
    if problems:
        raise ConfigError(problems)
    return config


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> ModelConfig:
    """Read the `[model]` table of a TOML file, then apply `key=value` words (`model.key=value` works too).

    `preset` and `size` choose the starting point (vanilla, small), all other keys override it.
    """
    document = read_toml(path)
    problems = [
        f"'{key}' in {path} stands outside a section: put it under [model]."
        if not isinstance(value, dict)
        else f"Unknown section '[{key}]' in {path}.{suggestion(key, ['model'])} Known: [model]."
        for key, value in document.items()
        if key not in ("model", *OTHER_SECTIONS) or not isinstance(value, dict)
    ]
    given = document.get("model")
    if not problems and not (isinstance(given, dict) and given):
        problems = [f"{path} has no [model] table, or an empty one; a line such as preset = 'yurii' belongs there."]
    values = merge(given if isinstance(given, dict) else {}, overrides, "model", problems)
    try:
        config = model_config(str(values.pop("preset", "vanilla")), size=str(values.pop("size", "small")), **values)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def build(
    what: str | Path | ModelConfig,
    *,
    size: str | None = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> Model:
    """Build an architecture from a name, a TOML file or a config.

    >>> import stepformer as sf
    >>> model = sf.build("yurii", size="tiny", n_layer=2)
    >>> model.config.template
    'nesterov'

    `size` defaults to small for a name, and to what a file or config says. `overrides` are config keys and component
    options. Equal `seed` gives equal initial weights to every parameter
    that two architectures have in common, so that a comparison is paired from the first step.
    """
    from stepformer.model import Model

    if isinstance(what, ModelConfig):
        config = what.replace(**{**(size_settings(size) if size else {}), **overrides})
    elif str(what).endswith(".toml"):
        config = load_config(what, [f"size={size}"] if size else []).replace(**overrides)
    else:
        config = model_config(str(what), size=size or "small", **overrides)
    return Model(config, seed=seed, device=device, dtype=dtype)


def citations(config: ModelConfig) -> list[str]:
    """Keys of every reference that a model uses: its paper if it is a preset, template, splitting, oracles, norm."""
    row = preset_of(config)
    keys = [row.cite] if row else []
    for registry, name in (
        (templates, config.template),
        (splittings, config.splitting),
        (attentions, config.attention),
        (mlps, config.mlp),
    ):
        keys += [key for key in registry[name].cite if key not in keys]
    keys.append("ba2016layer" if config.norm == "layernorm" else "zhang2019root")
    extras = {
        "su2024roformer": config.positions == "rotary",
        "zhou2025value": config.value_residual != "off",
        "shortcuts": config.embedding_skip,
        "gemma2024gemma": config.logit_softcap is not None,
        "henry2020query": config.options.get("qk_norm", False),
    }
    return keys + [key for key, used in extras.items() if used and key not in keys]
