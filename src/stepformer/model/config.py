"""Typed configuration: from Python, TOML files and `key=value` words, with every problem reported at once.

`ModelConfig` holds the settings every model has. Options that belong to a chosen component (`k` of the IMEX
splitting, `attention_backend` of softmax attention) are ordinary keys next to them; they are refused, with a
sentence, when that component is not the one selected.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from stepformer.base.errors import ConfigError, InputError, UnknownNameError, independent
from stepformer.base.options import Option
from stepformer.base.registry import Component, Registry, Selection, clashes, option_problems
from stepformer.base.settings import field_problems, make_plain, setting
from stepformer.extras import Extra, extras
from stepformer.oracles import attentions, mlps
from stepformer.rules import splittings, templates

REGISTRIES: dict[str, Registry[Any]] = {
    "template": templates,
    "splitting": splittings,
    "attention": attentions,
    "mlp": mlps,
}

LARGEST = 1 << 24  # of every size: what is larger is a slip of the keyboard, or damage


@dataclass(frozen=True)
class ModelConfig(Selection):
    """Everything that defines an architecture. Validated on construction; immutable; hashable."""

    template: str = setting("gd", "the optimizer whose step a layer takes")
    splitting: str = setting("lie-trotter", "how attention and MLP take turns inside a layer")
    attention: str = setting("softmax", "the attention oracle")
    mlp: str = setting("gelu", "the MLP oracle")
    n_layer: int = setting(12, "number of layers", least=1, most=LARGEST)
    n_head: int = setting(12, "number of attention heads", least=1, most=LARGEST)
    d_model: int = setting(768, "width of the token streams", least=1, most=LARGEST)
    context: int = setting(1024, "longest sequence", least=1, most=LARGEST)
    vocab_size: int = setting(50_304, "rows of the token table", least=1, most=LARGEST)
    real_vocab: int | None = setting(None, "ids from here on are padding and never sampled (default: none are)")
    mlp_hidden: int | None = setting(
        None, "hidden width of the MLP (default: 4 d_model; gated: 8/3 d_model)", least=1, most=LARGEST
    )
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "pre-norms and final norm; rmsnorm is gainless")
    norm_eps: float = setting(1e-5, "epsilon of every norm", above=0)
    positions: Literal["learned", "rotary"] = setting("learned", "position table, or rotation of queries and keys")
    bias: bool = setting(False, "biases in linear maps and norms (imported GPT-2 weights need them)")
    head: Literal["tied", "untied"] = setting("tied", "the output head: the token table itself, or weights of its own")
    output_init: Literal["scaled", "zero"] = setting(
        "scaled", "output layers of attention and MLP start smaller the deeper the model, or at zero; so an untied head"
    )
    aux_init: Literal["embed", "zero"] = setting("embed", "auxiliary streams start from own tables, or at zero")
    aux_norm_gain: float = setting(1.0, "initial gain of the auxiliary norms LN_v and LN_u", above=0)
    value_residual: Literal["off", "fixed", "free", "unit"] = setting(
        "off", "values mix with those of the first layer: half and half, or by a learned lambda (unit: in (0, 1))"
    )
    value_tables: bool = setting(
        False, "values gain a learned share of a token and a position table, one pair for all layers"
    )
    embedding_skip: bool = setting(False, "before each layer x becomes a learned mix of itself and the embedding")
    embedding_skip_start: float = setting(0.0, "initial share of the embedding in that mix")
    scale: Literal["off", "rezero", "layerscale", "scalar"] = setting(
        "off", "learned factors on the oracles' answers: a number from 0, a vector, or numbers on them and on x from 1"
    )
    output_norm: bool = setting(False, "the rule has the oracles' answers behind a norm with a learned gain")
    output_norm_gain: float = setting(1.0, "initial gain of that norm", above=0)
    denseformer: bool = setting(False, "after a layer x becomes a learned average of all earlier layers' outputs")
    dilation: int = setting(1, "of that average: every so many of the earlier outputs enter", least=1, most=LARGEST)
    period: int = setting(1, "of that average: it is taken after every so many layers", least=1, most=LARGEST)
    unet: bool = setting(False, "layers of the second half begin with a learned share of an output of the first half")
    unet_start: float = setting(1.0, "initial share of those outputs")
    logit_softcap: float | None = setting(None, "logits become c tanh(logits / c) with this c (default: none)", above=0)
    document_separator: int | None = setting(
        None, "token id that begins a document; attention stays inside documents (default: they see each other)"
    )
    weight_sharing: Literal["off", "attention", "oracles"] = setting(
        "off", "one attention for all layers, or one attention and one MLP; norms and coefficients are each layer's own"
    )
    extras: tuple[str, ...] = setting((), "extras of your own, by name (docs/write-your-own-extra.md)")
    activation_checkpointing: bool = setting(False, "recompute each block in the backward pass to save memory")
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make_plain(self)
        problems = _problems(self)
        if problems:
            raise ConfigError(problems)
        _canonicalise(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """From flat keys, component options among them; unknown keys are errors with a suggestion."""
        if not isinstance(values, Mapping):
            raise InputError(f"An architecture is a table of keys, not {values!r}.")
        given = values.get("options", {})
        problems: tuple[str, ...] = ()
        if not isinstance(given, Mapping):
            problems = (f"options = {given!r} should be a table; options are also accepted as plain keys.",)
            given = {}
        own = {key: value for key, value in values.items() if key in cls.__dataclass_fields__ and key != "options"}
        others = {key: value for key, value in values.items() if key not in cls.__dataclass_fields__}
        try:
            config = cls(**own, options={**given, **others})
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return config

    def replace(self, **changes: Any) -> ModelConfig:
        """The same config with some keys (or options) changed; options of components left behind are dropped."""
        merged = self.to_dict()
        for kind, registry in REGISTRIES.items():
            new = str(changes.get(kind, ""))
            if new in registry and registry.canonical(new) != merged[kind]:
                kept = registry[new].component.options
                for key in registry[merged[kind]].component.options:
                    if key not in kept:
                        merged.pop(key, None)
        if changes.get("vocab_size", self.vocab_size) != self.vocab_size:
            merged.pop("real_vocab", None)  # it described the other vocabulary
        return ModelConfig.from_dict({**merged, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Flat keys that differ from their defaults, options included, plus the components by name."""
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name != "options" and (f.name in REGISTRIES or f.name in _SIZE_KEYS or value != f.default):
                out[f.name] = value
        return {**out, **self.options}

    def option(self, name: str) -> Any:
        """The value of a component option, set or default."""
        return self.options[name] if name in self.options else declared_options(self)[name][1].default

    def options_of(self, kind: str) -> dict[str, Any]:
        """The options of one component, defaults filled in."""
        return {name: self.option(name) for name, (owner, _) in declared_options(self).items() if owner == kind}

    def get(self, key: str) -> Any:
        """The value of any key: one that every model has, or a component's option."""
        return getattr(self, key) if key in self.__dataclass_fields__ else self.option(key)

    def component(self, kind: str) -> Any:
        """The class selected as 'template', 'splitting', 'attention' or 'mlp'."""
        return REGISTRIES[kind][getattr(self, kind)].component

    def components(self) -> dict[str, type]:
        """The classes behind the names: `template 'gd'` and so on, listed extras too."""
        return {f"{kind} '{name}'": part for kind, name, part in selected(self)}

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_head

    @property
    def hash(self) -> str:
        """Twelve hex digits that identify the function this architecture computes, size included.

        Sizes and components always enter, other keys when they differ from their default, so that an option added to
        the library later leaves old hashes alone. What does not change the function does not enter: how it is
        computed, which ids are sampled, and settings of streams and norms that the template does not have.
        """
        left_out = NOT_THE_FUNCTION | self.idle.keys()
        values = {k: v for k, v in self.to_dict().items() if k not in left_out}
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def idle(self) -> dict[str, str]:
        """Settings that change nothing in this architecture, each with the reason."""
        found = {key: f"{extra} is off" for key, extra in OF_EXTRAS.items() if not getattr(self, extra)}
        template = templates[self.template].component(self.n_head, self.head_dim, **self.options_of("template"))
        if not any(stream.start == "embed" for stream in template.streams.values()):
            found["aux_init"] = f"no stream of template '{self.template}' starts from a table"
        if template.normalises is None and not template.integrates:
            found["aux_norm_gain"] = f"template '{self.template}' has no normalised stream"
        return found

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))


NOT_THE_FUNCTION = {"activation_checkpointing", "attention_backend", "real_vocab", "chunk", "query_chunk"}
"""Keys that say how an architecture is computed or sampled, not what it computes."""
OF_EXTRAS = {
    "embedding_skip_start": "embedding_skip",
    "output_norm_gain": "output_norm",
    "dilation": "denseformer",
    "period": "denseformer",
    "unet_start": "unet",
}
"""Settings of an extra that has a key of its own."""
_SIZE_KEYS = ("n_layer", "n_head", "d_model", "context", "vocab_size")


def _canonicalise(config: ModelConfig) -> None:
    """One spelling for every architecture: floats as floats, no options that equal their default."""
    settle = partial(object.__setattr__, config)
    for f in dataclasses.fields(config):
        if isinstance(f.default, float):
            settle(f.name, float(getattr(config, f.name)))
    if config.mlp_hidden == mlps[config.mlp].component.default_hidden(config.d_model):
        settle("mlp_hidden", None)
    kept = {}
    for key, (_, option) in sorted(declared_options(config).items()):
        value = config.options.get(key, option.default)
        value = float(value) if isinstance(option.default, float) else value
        if value != option.default:
            kept[key] = value
    settle("options", kept)


def selected(config: ModelConfig | Mapping[str, Any]) -> Iterator[tuple[str, str, type[Component]]]:
    """Kind, name and class of every component that a config names; unknown names are left out."""
    own = config.get if isinstance(config, ModelConfig) else lambda key: config.get(key, getattr(ModelConfig, key))
    for kind, registry in REGISTRIES.items():
        if str(own(kind)) in registry:
            yield kind, str(own(kind)), registry[str(own(kind))].component
    for name in own("extras"):
        if name in extras:
            yield "extra", name, extras[name].component


def declared_options(config: ModelConfig | Mapping[str, Any]) -> dict[str, tuple[str, Option]]:
    """Options that the selected components declare: name -> (component kind, option)."""
    return {key: (kind, option) for kind, _, part in selected(config) for key, option in part.options.items()}


def _problems(config: ModelConfig) -> list[str]:
    """Every reason why this config cannot be built, all at once."""
    problems = []
    wrong: set[str] = set()  # keys of the wrong type: arithmetic with them would only add noise
    for kind, registry in REGISTRIES.items():
        object.__setattr__(config, kind, str(getattr(config, kind)))
        try:
            object.__setattr__(config, kind, registry.canonical(getattr(config, kind)))
        except UnknownNameError as error:
            problems.append(str(error))
            wrong.add(kind)
    problems += _extras_problems(config)

    of_fields = field_problems(config, but=("options", "extras", *REGISTRIES))
    problems += of_fields.values()
    wrong |= of_fields.keys()
    problems += _value_problems(config, wrong)
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "options"}
    clashing = clashes(selected(config), {*settings, "options", "preset", "size"})
    of_options = option_problems(config.options, selected(config), {**REGISTRIES, "extras": extras}, settings)
    problems += [*clashing, *of_options.values()]
    if clashing:  # of a component itself: no setting would help
        return problems
    if not (wrong or of_options):
        problems += _pair_problems(config)
        for kind in REGISTRIES:
            problems += config.component(kind).reasons(config)
        return problems + [p for e in extras if e.component.chosen(config) for p in e.component.reasons(config)]
    wrong |= of_options.keys()
    try:
        ModelConfig.from_dict({key: value for key, value in {**settings, **config.options}.items() if key not in wrong})
    except ConfigError as error:
        problems += [p for p in independent(error.problems, wrong) if p not in problems]
    return problems


def _extras_problems(config: ModelConfig) -> list[str]:
    """What is wrong with the list of extras, which is settled as a tuple of registered names."""
    given, problems, names = config.extras, [], []
    if isinstance(given, str) or not isinstance(given, Iterable):
        problems.append(f"extras = {given!r} should be a list of names; in a shell: 'extras=[\"name\"]'.")
        given = ()
    for word in given:
        try:
            entry = extras[word]
        except UnknownNameError as error:
            problems.append(str(error))
            continue
        names.append(entry.name)
        if entry.component.chosen.__func__ is not Extra.chosen.__func__:  # type: ignore[attr-defined]
            problems.append(f"The extra '{entry.name}' has a key of its own: {(entry.component.__doc__ or '').strip()}")
    if len(set(names)) < len(names):
        problems.append(f"extras = {names} names one of them twice.")
    object.__setattr__(config, "extras", tuple(names))
    return problems


def _pair_problems(config: ModelConfig) -> list[str]:
    """What two of the chosen components demand of one another."""
    template, splitting, attention = map(config.component, ("template", "splitting", "attention"))
    problems = []
    if template.integrates and not attention.has_fields:
        able = " or ".join(repr(e.name) for e in attentions if e.component.has_fields)
        problems.append(
            f"Template '{config.template}' integrates the two fields of a Hamiltonian attention, and attention "
            f"'{config.attention}' has none: use attention = {able}."
        )
    if attention.has_fields and not template.integrates:
        able = ", ".join(repr(e.name) for e in templates if e.component.integrates)
        problems.append(
            f"Attention '{config.attention}' moves x and a momentum by its own two fields, and template "
            f"'{config.template}' does not integrate them: use template = {able}."
        )
    if splitting.needs_velocity and not template.has_velocity() and not template.integrates:
        usable = ", ".join(e.name for e in templates if e.component.has_velocity())
        others = ", ".join(e.name for e in splittings if not e.component.needs_velocity)
        problems.append(
            f"Splitting '{config.splitting}' works on a velocity stream, and template '{config.template}' has none. "
            f"Use a velocity template ({usable}), or a splitting that needs none ({others})."
        )
    for entry in extras if template.reads_out else ():
        own = entry.component
        if own.chosen(config) and any(map(own.changes, ("enter", "leave", "drifting"))):
            problems.append(
                f"The extra '{entry.name}' acts on x, and template '{config.template}' carries its tokens in streams "
                "of its own, from which x is read after the last layer: leave one of them out."
            )
    return problems


def _value_problems(config: ModelConfig, wrong: set[str]) -> list[str]:
    """Numbers that do not fit each other, among the keys that are right by themselves."""
    problems = []
    real = config.real_vocab
    if not wrong & {"real_vocab", "vocab_size"} and real is not None and not 1 <= real <= config.vocab_size:
        problems.append(f"real_vocab = {real} should lie between 1 and vocab_size = {config.vocab_size}.")
    if wrong & {"n_head", "d_model"}:
        return problems
    if config.d_model % config.n_head:
        # rotary positions turn pairs of coordinates: there a head's width is even
        least = 2 if config.positions == "rotary" and config.d_model % 2 == 0 else 1
        fewer = next(n for n in range(min(config.n_head, config.d_model), 0, -1) if config.d_model % (least * n) == 0)
        width = config.n_head * least * max(1, round(config.d_model / (least * config.n_head)))
        problems.append(
            f"n_head = {config.n_head} does not divide d_model = {config.d_model}: every head needs the same width. "
            f"n_head = {fewer} would, or d_model = {width}."
        )
    elif config.positions == "rotary" and config.head_dim % 2:
        problems.append(
            f"positions = 'rotary' turns pairs of coordinates, but d_model / n_head = {config.head_dim} is odd. "
            "Choose an even head width or positions = 'learned'."
        )
    return problems
