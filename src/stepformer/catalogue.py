"""Named presets and sizes: one table that drives the command line, the docs, the audit and the tests."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepformer.config import ModelConfig, merge, read_toml
from stepformer.errors import ConfigError, StepformerError, UnknownNameError, suggestion
from stepformer.oracles import attentions, mlps
from stepformer.schemes import splittings, templates

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

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict({**SIZES["small"], **self.settings})


OTHER_SECTIONS = ("data", "optim", "train", "recipe")  # of a run's file; a model alone does not read them
YURII, STREAMS = "zimin2026yuriiformer", "gai2026momentum"
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


def _catalogue() -> None:
    def yurii(name: str, best: str, equation: str, *, aliases: tuple[str, ...] = (), **settings: Any) -> None:
        published = f"TinyStories best validation loss {best}"
        register_preset(name, equation=equation, cite=YURII, aliases=aliases, published=published, **settings)

    def streams(name: str, equation: str, *, aliases: tuple[str, ...] = (), **settings: Any) -> None:
        register_preset(name, equation=equation, cite=STREAMS, aliases=aliases, **settings)

    # A = Attn(LN .), M = MLP(LN .); LN_v is the velocity norm, LN_u the update norm.
    yurii("gd-euler", "1.107", "x' = x + A(x) + M(x)", template="gd", splitting="parallel")
    yurii("gd-lie-trotter", "1.106", "x += A(x); x += M(x)", template="gd", aliases=("vanilla",))
    yurii(
        "polyak-euler",
        "1.099",
        "v' = LN_v(beta v + gamma (A(x) + M(x))); x' = x + v'",
        template="heavy-ball",
        splitting="parallel",
    )
    yurii(
        "polyak-lie-trotter",
        "1.083",
        "for O in A, M: v = LN_v(beta v + gamma O(x)); x += v",
        template="heavy-ball",
        aliases=("hb",),
    )
    yurii(
        "nesterov-euler",
        "1.101",
        "z = x + mu v; v' = LN_v(beta v + gamma (A(z) + M(z))); x' = x + v'",
        template="nesterov",
        splitting="parallel",
    )
    yurii(
        "nesterov-lie-trotter",
        "1.078",
        "for O in A, M: v = LN_v(beta v + gamma O(x + mu v)); x += v",
        template="nesterov",
        aliases=("yurii",),
    )
    yurii(
        "symplectic-euler",
        "1.080",
        "v = LN_v(beta v - gamma A(x + mu v)); x += delta v; v = LN_v(beta v - gamma' M(x + mu v))",
        template="nesterov",
        splitting="symplectic-euler",
    )
    best = {
        ("once", 1): ("1.086", "1.083"),
        ("every", 1): ("1.078", "1.112"),
        ("once", 2): ("1.078", "1.081"),
        ("every", 2): ("1.070", "1.097"),
    }
    for k in (1, 2):
        for norm in ("once", "every"):
            for order, value in zip(("ama", "mam"), best[norm, k], strict=True):
                a, m = ("A", "M") if order == "ama" else ("M", "A")
                n = "LN_v" if norm == "every" else ""
                end = "x' = x + V'" if norm == "every" else "V' = LN_v(V'); x' = x + V'"
                refine = f"{n}(beta V + gamma' {m}(x + mu' V))" if k == 1 else f"{n}(beta V + gamma' {m}(x + mu' V'))"
                refine = f"V' = {refine}" if k == 1 else f"V' = V; {k} times V' = {refine}"
                yurii(
                    f"imex{'-ln' if norm == 'every' else ''}-k{k}-{order}",
                    value,
                    f"V = {n}(beta v + gamma {a}(x + mu v)); {refine}; {end}",
                    template="nesterov",
                    splitting="imex",
                    order=order,
                    k=k,
                    velocity_norm=norm,
                )
    for order, value in (("ama", "1.074"), ("mam", "1.077")):
        turns = "A/2, M, A/2" if order == "ama" else "M/2, A, M/2"
        yurii(
            f"verlet-{order}",
            value,
            f"for O in {turns}: v = LN_v(beta v + gamma O(x + mu v)); x += v",
            template="nesterov",
            splitting="strang",
            order=order,
        )

    tmm = "for O in A, M: v = LN_v(beta v + gamma O(x + mu v)); x += nu v"
    streams("tmm", tmm, template="triple-momentum", aliases=("tmm-lie-trotter",))
    streams("tmm-zero", f"{tmm}; v_0 = 0", template="triple-momentum", aux_init="zero")
    moments = "m = beta1 m + (1-beta1) g; s = beta2 s + (1-beta2) g g"
    streams("adam", f"g = O(x); {moments}; x += gamma LN_u(m / (sqrt s + eps))", template="adam")
    streams("adamw", f"g = O(x); {moments}; x = (1-lambda) x + gamma LN_u(m / (sqrt s + eps))", template="adamw")
    streams(
        "rmsprop",
        "g = O(x); s = beta2 s + (1-beta2) g g; x += gamma LN_u(g / (sqrt s + eps))",
        template="rmsprop",
    )
    streams("muon", "m = beta m + (1-beta) O(x); x += gamma LN_u(NS5(m))", template="muon")
    streams("ortho", "x += gamma LN_u(NS5(O(x)))", template="ortho")
    covariance = "G = O(x); R = betaR R + (1-betaR) G^T G"
    streams("soap", f"{covariance}; m = beta1 m + (1-beta1) G; x += gamma LN_u(m R^(-1/2))", template="soap")
    streams("shampoo", f"{covariance}; x += gamma LN_u(G R^(-1/2))", template="shampoo")


_catalogue()


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
        return Preset(entry.name, {"template": entry.name}, entry.equation, "")
    known = [*_ALIASES, *(e.name for e in templates)]
    raise UnknownNameError(f"Unknown preset '{name}'.{suggestion(name, known)} `stepformer list` shows all of them.")


def unlisted_templates() -> list[str]:
    """Templates that no preset uses: rules of your own."""
    used = {p.config.template for p in _PRESETS.values()}
    return [entry.name for entry in templates if entry.name not in used]


def preset_of(config: ModelConfig) -> Preset | None:
    """The preset that this architecture is, whatever its size; None if it has no name."""
    at_small = config.replace(**SIZES["small"])
    return next((row for row in _PRESETS.values() if row.config.hash == at_small.hash), None)


def size_settings(name: str) -> dict[str, Any]:
    """Config keys of a named size."""
    if name not in SIZES:
        raise UnknownNameError(f"Unknown size '{name}'.{suggestion(name, SIZES)} Known: {', '.join(SIZES)}.")
    return SIZES[name]


def model_config(name: str, /, *, size: str = "small", **overrides: Any) -> ModelConfig:
    """The config of a preset at a size, with overrides: `model_config("yurii", size="tiny", n_layer=2)`."""
    problems: list[str] = []
    settings: dict[str, Any] = {}
    try:
        settings.update(size_settings(size))
    except UnknownNameError as error:
        problems.append(str(error))
    try:
        settings.update(preset(name).settings)
    except UnknownNameError as error:
        raise ConfigError([*problems, str(error)]) from None  # without it, other complaints would mislead
    try:
        config = ModelConfig.from_dict(settings).replace(**overrides)
    except ConfigError as error:
        problems += error.problems
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
    if not problems and not (isinstance(document.get("model"), dict) and document["model"]):
        problems = [f"{path} has no [model] table, or an empty one; a line such as preset = 'yurii' belongs there."]
    if problems:
        raise ConfigError(problems)
    values = merge(document["model"], overrides, "model")
    return model_config(values.pop("preset", "vanilla"), size=values.pop("size", "small"), **values)


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
    if config.positions == "rotary":
        keys.append("su2024roformer")
    return keys
