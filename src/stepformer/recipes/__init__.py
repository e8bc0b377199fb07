"""Recipes: the runs of the papers as TOML files, with the figures they correspond to.

A recipe has the sections of any run, and `[recipe]`: which paper and figure it reproduces, `base` (another recipe whose
keys it changes), and `[recipe.runs]`: for each architecture its parameter count and the published value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepformer.config import read_toml
from stepformer.errors import UnknownNameError, suggestion

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
    own = read_toml(FOLDER / f"{name}.toml")
    about = own.pop("recipe", {})
    document: dict[str, Any] = {}
    if "base" in about:
        document = {key: dict(value) for key, value in load_recipe(about["base"]).document.items()}
    for section, values in own.items():
        document[section] = {**document.get(section, {}), **values}
    return Recipe(name, about, document)
