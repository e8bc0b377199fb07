"""Recipes: the runs of the papers as TOML files, with the figures they correspond to.

A recipe has the sections of any run, and `[recipe]`: which paper and figure it reproduces, `base` (another recipe whose
keys it changes), and `[recipe.runs]`: for each architecture its parameter count and the published value, and
`[recipe.measured]`: what else was published about the trained models (downstream accuracy, curvature, forgetting, ...).
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


@lru_cache
def recipe_names() -> tuple[str, ...]:
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
