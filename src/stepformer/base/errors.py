"""Errors a user can act on: every one is a sentence that says what was wrong and what would be right."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class StepformerError(Exception):
    """Base of all errors meant for users; the command line prints it without a traceback."""

    told: bool | None = None  # on one of several ranks: whether another one prints it; None: not known


class InputError(StepformerError, ValueError):
    """Tokens, prompts or arguments that a built model cannot take."""


class ComponentError(StepformerError):
    """A rule, attention, MLP or extra that does not give what it should."""


def given(value: T | None, component: object, method: str, kind: type = object) -> T:
    """What a method of a component returned; a sentence if its return statement is missing, or it is no `kind`."""
    if value is None:
        raise ComponentError(f"{type(component).__name__}.{method}() returns None: is its return statement missing?")
    if not isinstance(value, kind):
        found = type(value).__name__
        raise ComponentError(
            f"{type(component).__name__}.{method}() returns a {found}; it should be a {kind.__name__}."
        )
    return value


class ChangedRuleError(InputError):
    """A rule of the user's own that is not what it was when a run was made, or when this process first used it."""


class DivergedError(StepformerError):
    """Training that cannot go on because its numbers are not finite, or its loss is out of bounds."""


class ConfigError(StepformerError, ValueError):
    """A configuration that cannot be built; `problems` lists every fault found, not only the first."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def independent(problems: Iterable[str], wrong: Collection[str]) -> list[str]:
    """Problems that name none of these keys: while those are wrong, what names them may be a consequence only."""
    names = re.compile(rf"\b({'|'.join(map(re.escape, wrong))})\b", re.IGNORECASE) if wrong else None
    # what is suggested does not count
    return [p for p in problems if names is None or not names.search(re.split(" Known keys: | Did you mean ", p)[0])]


class UnknownNameError(StepformerError, KeyError):
    """A name that no registry entry answers to."""

    def __str__(self) -> str:  # KeyError would print the repr of the sentence
        return str(self.args[0])


class StepformerWarning(UserWarning):
    """Something a user should know that does not keep the work from going on; the command line prints it as a note."""


def named(names: Sequence[object], most: int = 3) -> str:
    """The first of several names for a sentence, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


def suggestion(word: object, known: Iterable[str], likeness: float = 0.6) -> str:
    """The nearest known name as a question, or an empty string when nothing is near. A file is never a name's typo."""
    by_lower = {name.lower(): name for name in known if _is_file(name) or not _is_file(str(word))}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=likeness)
    return f" Did you mean '{by_lower[near[0]]}'?" if near else ""


def neighbour(path: Path, holds: str = "") -> str:
    """The same question about what stands beside a path that is not there; with `holds` only folders with that file."""
    beside = {p.name.partition(".")[0].lower(): p for p in path.parent.glob("[!.]*") if os.path.exists(p / holds)}
    name = path.name.partition(".")[0].lower()
    near = difflib.get_close_matches(name, beside, n=1, cutoff=0.8)
    near += [other for other in sorted(beside) if other.startswith(f"{name}-")]
    return f" Did you mean '{beside[near[0]]}'?" if near else ""


def _is_file(word: str) -> bool:
    return "/" in word or Path(word).suffix != ""


def command_line(*words: object) -> str:
    """A command of ours to be copied from a message: a shell takes every word for what it is, blanks and all."""
    return shlex.join(["stepformer", *map(str, words)])
