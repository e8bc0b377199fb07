"""Recipes: the runs of the papers as TOML files, with the figures they correspond to.

A recipe has the sections of any run, and `[recipe]`: which paper and figure it reproduces, `base` (another recipe whose
keys it changes), and `[recipe.runs]`: for each architecture its parameter count and the published value, and
`[recipe.measured]`: what else was published about the trained models (downstream accuracy, curvature, forgetting, ...),
`[recipe.measured_errors]`: their standard errors, where they are published, and `[recipe.recomputed]`: what we computed
from the authors' files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepformer.base.errors import ConfigError, UnknownNameError, suggestion
from stepformer.base.words import read_toml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """A recipe file, its base merged in."""

    name: str
    about: dict[str, Any]
    document: dict[str, Any]

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Architectures of the recipe: preset -> {parameters, published, ...}."""
        return dict(self.about.get("runs", {}))

    @property
    def measured(self) -> dict[str, dict[str, float]]:
        """What was published about trained models besides their loss: preset -> {hellaswag, ood, ...}."""
        return dict(self.about.get("measured", {}))

    @property
    def recomputed(self) -> dict[str, dict[str, float]]:
        """What we computed from the authors' files, where they published another quantity under its name."""
        return dict(self.about.get("recomputed", {}))

    def error(self, quantity: str) -> float | None:
        """The standard error that was published with a quantity."""
        return self.about.get("measured_errors", {}).get(quantity)

    def published_tokens(self, run: str) -> int | None:
        """How many validation tokens, from the first on, the published losses of an architecture are of."""
        return self.runs[run].get("published_tokens", self.about.get("published_tokens"))


@lru_cache
def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@lru_cache
def load_recipe(name: str) -> Recipe:
    """A recipe by name."""
    if name not in recipe_names():
        raise UnknownNameError(
            f"There is no recipe '{name}'.{suggestion(name, recipe_names())} `stepformer recipes` lists them."
        )
    return read_recipe(FOLDER / f"{name}.toml")


def read_recipe(path: Path) -> Recipe:
    """A recipe or any run's TOML file; `base` under `[recipe]` names a shipped recipe whose keys it changes."""
    own = read_toml(path)
    about = own.pop("recipe", {})
    if not isinstance(about, dict):
        raise ConfigError([f"'recipe' in {path} should be a section, [recipe]."])
    document: dict[str, Any] = {}
    if "base" in about:
        if about["base"] == path.stem and path.parent == FOLDER:
            raise ConfigError([f"The recipe '{path.stem}' has itself as base."])
        document = {key: dict(value) for key, value in load_recipe(str(about["base"])).document.items()}
    for section, values in own.items():
        mergeable = isinstance(values, dict)
        document[section] = {**document.get(section, {}), **values} if mergeable else values
    return Recipe(path.stem, about, document)
