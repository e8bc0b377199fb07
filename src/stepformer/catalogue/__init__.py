"""What has a name: presets and sizes here, recipes and references beside. It drives commands, docs, audit and tests."""

from __future__ import annotations

import fnmatch
import functools
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepformer.base.errors import ConfigError, InputError, StepformerError, UnknownNameError, independent, suggestion
from stepformer.base.plugins import is_ours, loaded
from stepformer.base.words import parse_overrides, read_toml
from stepformer.catalogue.recipes import load_recipe
from stepformer.catalogue.references import TRAINING
from stepformer.extras import chosen, extras
from stepformer.model.config import NOT_THE_FUNCTION, REGISTRIES, ModelConfig, declared_options
from stepformer.oracles import attentions, mlps
from stepformer.rules import splittings, templates

if TYPE_CHECKING:
    import torch

    from stepformer.model import Model

_TABLE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
SIZES: dict[str, dict[str, Any]] = _TABLE["sizes"]


@dataclass(frozen=True)
class Preset:
    """One row of the catalogue: a named point in template x splitting x attention x options."""

    name: str
    settings: Mapping[str, Any]
    cite: str
    aliases: tuple[str, ...] = ()
    written: str = ""  # its equation, of a preset that brings its own

    @functools.cached_property
    def config(self) -> ModelConfig:
        """Its config at size small."""
        return ModelConfig.from_dict({**SIZES["small"], **self.settings})

    @property
    def equation(self) -> str:
        """What a layer does, composed from the components unless it was given."""
        return self.written or layer_equation(self.config)

    @property
    def published(self) -> str:
        """Its loss at size small in the paper, if there is one."""
        where = _TABLE["published"].get(self.cite)
        runs = load_recipe(where["recipe"]).runs if where else {}
        losses = [runs[word]["published"] for word in (self.name, *self.aliases) if word in runs]
        return f"{where['what']} {losses[0]:.3f}" if losses else ""


def layer_equation(config: ModelConfig) -> str:
    """A layer in one line: the rule, the turns it takes, and what is not as usual. A is attention, M the MLP."""
    rule = templates[config.template].component(config.n_head, config.head_dim, **config.options_of("template"))
    turns = splittings[config.splitting].component(**config.options_of("splitting"))
    layer = rule.describe() if rule.integrates else turns.in_turns(rule.describe())
    starts = [name for name, stream in rule.streams.items() if stream.start == "embed" and config.aux_init == "zero"]
    layer += "".join(f";  {name}_0 = 0" for name in starts)
    beside = ["rotary positions"] * (config.positions == "rotary") + ["RMSNorm"] * (config.norm == "rmsnorm")
    beside += ["QK-norm"] * bool(config.options.get("qk_norm"))
    beside += [part.name.replace("-", " ") for part in chosen(config)]
    layer += f";  {', '.join(beside)}" * bool(beside)
    layer += f";  M: {mlps[config.mlp].equation}" * (config.mlp != "gelu")
    if config.attention == "softmax":
        return layer
    given = [f"{k} = {v}" for k, v in config.options.items() if declared_options(config)[k][0] == "attention"]
    return f"{layer};  A: {attentions[config.attention].equation}{';  ' * bool(given)}{', '.join(given)}"


OTHER_SECTIONS = ("data", "optim", "train", "recipe")  # of a run's file; a model alone does not read them
_PRESETS: dict[str, Preset] = {}
_ALIASES: dict[str, str] = {}


def register_preset(
    name: str, *, cite: str, equation: str = "", aliases: tuple[str, ...] = (), **settings: Any
) -> None:
    """Add a named architecture.

    Args:
        name: What `build` and the commands call it.
        cite: The key of its reference; "" if there is none.
        equation: What a layer does, in one line; composed from the components if not given.
        aliases: Other names for it.
        settings: Config keys that differ from the defaults.
    """
    for word in (name, *aliases):
        if word in _ALIASES:
            raise StepformerError(f"The preset name '{word}' is already taken.")
    _PRESETS[name] = Preset(name, settings, cite, aliases, equation)
    _ALIASES.update(dict.fromkeys((name, *aliases), name))


for _paper, _rows in _TABLE["presets"].items():
    for _name, _row in _rows.items():
        register_preset(_name, cite=_paper, aliases=tuple(_row.pop("aliases", ())), **_row)
templates.reserved = {
    w: "a preset" if w == name else f"an alias of the preset '{name}'" for w, name in _ALIASES.items()
}
register_template = templates.register
"""Class decorator: `@register_template("my-rule", equation="...")`; no preset may have the name."""


def presets(pattern: str = "*") -> list[str]:
    """Names of all presets whose name or alias matches a shell pattern, in the order of the catalogue.

    Examples:
        >>> import stepformer as sf
        >>> sf.presets("verlet*")
        ['verlet-ama', 'verlet-mam']
    """
    if not any(mark in pattern for mark in "*?["):
        pattern = f"*{pattern}*"
    return [p.name for p in _PRESETS.values() if any(fnmatch.fnmatch(w, pattern) for w in (p.name, *p.aliases))]


def is_preset(name: str) -> bool:
    """Whether `preset` knows this name."""
    return name in _ALIASES or name in templates


def preset(name: str) -> Preset:
    """A preset by name or alias; the bare name of a registered template means that template with Lie-Trotter."""
    if name in _ALIASES:
        found = _PRESETS[_ALIASES[name]]
        if name in templates and not is_ours(templates[name].component) and found.settings.get("template") != name:
            raise StepformerError(f"'{name}' is a preset, and a template of yours too: give yours another name.")
        return found
    if name in templates:
        entry = templates[name]
        return Preset(entry.name, {"template": entry.name, **entry.component.goes_with}, "", written=entry.equation)
    for kind, registry in REGISTRIES.items():
        if name in registry:
            raise UnknownNameError(f"'{name}' is no whole architecture: write `PRESET {kind}={name}`.")
    if "=" in name:
        raise UnknownNameError(f"'{name}' is a setting: the name of an architecture comes first, e.g. vanilla {name}.")
    if name.endswith(".py"):
        raise UnknownNameError(f"'{name}' is a file: write the name that it registers, and --plugin {name}.")
    own = [entry.name for entry in templates if not is_ours(entry.component)]
    yours = f" Of your own there are the templates {', '.join(own)}." if own else ""
    yours = yours or (" The plug-ins that were loaded register no template." if loaded() else "")
    near = suggestion(name, known_names())
    raise UnknownNameError(
        f"Unknown preset '{name}'.{near} `stepformer list` shows all of them. {templates.own}{yours}"
    )


def known_names() -> list[str]:
    """Every word that `preset` takes."""
    return [*_ALIASES, *(entry.name for entry in templates)]


def unlisted_templates() -> list[str]:
    """Templates that no preset uses, such as rules of your own."""
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


def closest_preset(config: ModelConfig, apart: Collection[str] = ()) -> tuple[Preset | None, dict[str, Any]]:
    """The preset with the same components from which a config differs least, and the settings that differ; components
    of the kinds `apart` may be others.
    """
    mine, kinds = _at_small(config).to_dict(), REGISTRIES.keys() - {*apart}
    found: list[tuple[Preset | None, dict[str, Any]]] = []
    bare = [preset(name) for name in unlisted_templates() if name == config.template]
    for row in (*_PRESETS.values(), *bare):
        if all(getattr(row.config, kind) == getattr(config, kind) for kind in kinds):
            base = row.config.to_dict()
            changed = {key for key in {*mine, *base} - NOT_THE_FUNCTION if mine.get(key) != base.get(key)}
            found.append((row, {key: config.get(key) for key in changed}))
    return min(found, key=lambda pair: (len(pair[1]), len({*apart} & {*pair[1]})), default=(None, {}))


def size_settings(name: str) -> dict[str, Any]:
    """Config keys of a named size."""
    if str(name) not in SIZES:
        raise UnknownNameError(f"Unknown size '{name}'.{suggestion(name, SIZES)} Known: {', '.join(SIZES)}.")
    return SIZES[str(name)]


def model_config(name: str, /, *, size: str = "small", **overrides: Any) -> ModelConfig:
    """The config of a preset at a size, without building the model.

    Args:
        name: A preset or a template.
        size: The name of a size.
        overrides: Config keys and options of the chosen components.

    Examples:
        >>> import stepformer as sf
        >>> sf.model_config("yurii", size="tiny", n_layer=2).d_model
        128
    """
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
        unknown |= REGISTRIES.keys()
    try:
        config = ModelConfig.from_dict(settings).replace(**overrides)
    except ConfigError as error:
        problems += independent(error.problems, unknown)
    if problems:
        raise ConfigError(problems)
    return config


def before_size(model: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """What a file says of a model, without its measures if a size is among the words that are given after it."""
    measures = {"n_layer", "n_head", "d_model", "context"} if "size" in {*words} else set[str]()
    return {key: value for key, value in model.items() if key not in measures}


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> ModelConfig:
    """Read the `[model]` table of a TOML file, then apply `key=value` words (`model.key=value` works too).

    `preset` and `size` choose the starting point (vanilla, small), all other keys override it.

    Args:
        path: The file.
        overrides: Words that win over the file, such as `["n_layer=2", "size=tiny"]`.
    """
    if is_preset(str(path)) and not Path(path).exists():
        raise InputError(f"'{path}' is no file but the name of an architecture: `model_config` takes it.")
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
    words = parse_overrides(overrides, problems)
    said = {key.removeprefix("model."): value for key, value in words}
    values = before_size(given if isinstance(given, dict) else {}, said) | said
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

    Args:
        what: A preset or a template (`stepformer list` shows them), the path of a TOML file, or a config.
        size: tiny, small, medium, ...; by default small for a name, else what the file or config says.
        seed: Equal seeds give equal initial weights to every parameter that two architectures have in common, so that
            a comparison is paired from the first step. Without one it is drawn from torch's global generator.
        device: Where the weights are; torch's default device if not given.
        dtype: Of the weights; torch.float32 if not given.
        overrides: Config keys and options of the chosen components, such as `n_layer=2` or `splitting="strang"`.

    Returns:
        The model with its initial weights, in training mode.

    Raises:
        ConfigError: With a sentence for everything that cannot be built.

    Examples:
        >>> import stepformer as sf
        >>> model = sf.build("yurii", size="tiny", n_layer=2)
        >>> model.config.template
        'nesterov'
    """
    from stepformer.model import Model

    if not isinstance(what, str | Path | ModelConfig):
        made = " (ModelConfig.from_dict makes one of a dict)" if isinstance(what, dict) else ""
        raise InputError(f"`build` takes a name, a TOML file or a ModelConfig{made}, not {type(what).__name__}.")
    if isinstance(what, ModelConfig):
        config = what.replace(**{**(size_settings(size) if size else {}), **overrides})
    elif str(what).endswith(".toml"):
        config = load_config(what, [f"size={size}"] if size else []).replace(**overrides)
    elif Path(what, "run.json").is_file():
        raise InputError(f"'{what}' is a run, not the name of an architecture: `load_run` opens it.")
    else:
        config = model_config(str(what), size=size or "small", **overrides)
    return Model(config, seed=seed, device=device, dtype=dtype)


def citations(config: ModelConfig, optimizer: str = "") -> list[str]:
    """Keys of every reference that a model uses: the paper of its preset, or of the one with its rule, template,
    splitting, oracles, norm, and what trains it.
    """
    row = preset_of(config)
    if row is None and config.template != "gd":  # of residual layers no paper has the rule
        row, _ = closest_preset(config)
    keys = [row.cite] if row and row.cite else []
    for kind, registry in REGISTRIES.items():
        keys += registry[getattr(config, kind)].cite
    keys.append("ba2016layer" if config.norm == "layernorm" else "zhang2019root")
    keys += ["su2024roformer"] if config.positions == "rotary" else []
    keys += [key for part in chosen(config) for key in extras[part.name].cite]
    keys += ["lan2020albert"] if config.weight_sharing != "off" else []
    keys += ["henry2020query"] if config.options.get("qk_norm", False) else []
    keys += TRAINING.get(optimizer, ())
    return list(dict.fromkeys(keys))
