"""Named components. A component is a class with a name, aliases, one equation, a citation and its options."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stepformer.base.errors import StepformerError, StepformerWarning, UnknownNameError, suggestion
from stepformer.base.options import Option
from stepformer.base.plugins import is_ours, remember
from stepformer.base.words import translated


class Selection:
    """What a component may ask of the config that selects it."""

    template: str
    splitting: str
    attention: str
    n_layer: int
    positions: str
    bias: bool
    aux_init: str

    def get(self, key: str) -> Any:
        """The value of any key of the config."""

    def option(self, name: str) -> Any:
        """The value of a component option, set or default."""

    def component(self, kind: str) -> Any:
        """The class selected as 'template', 'splitting', 'attention' or 'mlp'."""


class Component:
    """Anything a config selects by name: a template, a splitting, an attention, an MLP, an extra."""

    name: str = ""  # under which it was registered
    options: Mapping[str, Option] = {}  # its settings: keys of a config that selects it, attributes of the object
    exact_gradient: Mapping[str, Any] = {}  # options under which no gradient is stopped on purpose, for the audit
    all_active: Mapping[str, Any] = {}  # options under which every part acts and none is held constant, for the audit

    def set_options(self, given: Mapping[str, Any]) -> None:
        """Every declared option as an attribute: what is given, or its default."""
        unknown = given.keys() - self.options.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option '{min(unknown)}'.")
        for key, option in self.options.items():
            setattr(self, key, given.get(key, option.default))

    @classmethod
    def fault(cls) -> str | None:
        """What is wrong with the class itself, in a sentence; it is not registered then."""
        return None

    @classmethod
    def refusal(cls, config: Selection) -> str | None:
        """Why a config that selects this component has no meaning, in a sentence that says what would; or None."""
        return None

    @classmethod
    def refusals(cls, config: Selection) -> list[str]:
        """All such reasons, for a component that knows of several. Each names the keys that it comes from."""
        found = cls.refusal(config)
        return [found] if found else []

    @classmethod
    def reasons(cls, config: Selection) -> list[str]:
        """`refusals`, or what a class's own `refusal` says instead of all that it inherits."""
        own = next(part for part in cls.__mro__ if not {"refusal", "refusals"}.isdisjoint(vars(part)))
        if "refusals" in vars(own):
            return cls.refusals(config)
        found = cls.refusal(config)
        return [found] if found else []


T = TypeVar("T", bound=Component)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What is known about one registered name."""

    name: str
    component: type[T]
    equation: str
    cite: tuple[str, ...]
    aliases: tuple[str, ...]


class Registry(Generic[T]):
    """Maps names (and aliases) to component classes of one kind: templates, splittings, attentions, MLPs, extras."""

    def __init__(self, kind: str, base: type[T], page: str = "") -> None:
        self.kind = kind
        self.base = base
        self.own = f"One of your own: name its file with --plugin, or import it (docs/{page}.md)." if page else ""
        self._entries: dict[str, Entry[T]] = {}
        self._aliases: dict[str, str] = {}
        self.reserved: dict[str, str] = {}  # words that no later component may have, with what they are

    def register(
        self, name: str, *, equation: str = "", cite: str | tuple[str, ...] = (), aliases: str | tuple[str, ...] = ()
    ) -> Callable[[type[T]], type[T]]:
        """Class decorator that makes a component available under a name.

        Args:
            name: What a config calls it.
            equation: What it does, in one line; `stepformer show` prints it.
            cite: Keys of its references.
            aliases: Other names.

        Examples:
            `@stepformer.register_template("my-rule", equation="x' = x + gamma g")` above a subclass of `Template`.
        """
        cite = (cite,) if isinstance(cite, str) else tuple(cite)
        aliases = (aliases,) if isinstance(aliases, str) else tuple(aliases)

        def add(component: type[T]) -> type[T]:
            if not (isinstance(component, type) and issubclass(component, self.base)):
                raise StepformerError(f"A {self.kind} is a subclass of {self.base.__name__}; '{name}' is not.")
            for key, option in component.options.items():
                if not isinstance(option, Option):
                    raise StepformerError(
                        f"Option '{key}' of {self.kind} '{name}' should be a stepformer.Option, e.g. "
                        f"Option({option!r}, help='...')."
                    )
                if fault := option.fault(key):
                    raise StepformerError(f"Option '{key}' of {self.kind} '{name}' has a bad default: {fault}")
                if hasattr(self.base, key) or key in inspect.signature(self.base.__init__).parameters:
                    raise StepformerError(
                        f"Option '{key}' of {self.kind} '{name}' would hide what every {self.kind} has by that name: "
                        "give it another one."
                    )
            self._check_signatures(component)
            self._tell_near_names(component)
            for word in (name, *aliases):
                taken = self._aliases.get(word)
                # A module that is imported again (a notebook cell run twice) may register the same class again.
                if taken is not None and _origin(self._entries[taken].component) != _origin(component):
                    whose = f"a {self.kind}" if word == taken else f"an alias of the {self.kind} '{taken}'"
                elif taken is None and word in self.reserved:
                    whose = self.reserved[word]
                else:
                    continue
                raise StepformerError(f"The {self.kind} name '{word}' is already taken: it is {whose}.")
            if found := component.fault():
                raise StepformerError(found)
            self._entries[name] = Entry(name, component, equation, cite, aliases)
            self._aliases.update(dict.fromkeys((name, *aliases), name))
            component.name = name
            remember(component)
            return component

        return add

    def _check_signatures(self, component: type[T]) -> None:
        """Methods must take what they are called with: found here, the mistake is named where it was made."""
        for key, method in {**vars(Component), **vars(self.base)}.items():
            own = inspect.getattr_static(component, key)
            if own is method or (key.startswith("_") and key != "__init__"):
                continue
            if isinstance(method, classmethod) and inspect.isfunction(own):
                raise StepformerError(
                    f"{component.__name__}.{key} should be a class method: put @classmethod above it."
                )
            if inspect.isfunction(method) and not (callable(own) or hasattr(own, "__get__")):
                raise StepformerError(
                    f"{component.__name__}.{key} should be a method: "
                    f"def {key}({', '.join(inspect.signature(method).parameters)})."
                )
            method, own = (getattr(found, "__func__", found) for found in (method, own))
            if not (inspect.isfunction(method) and inspect.isfunction(own)):
                continue
            called = list(inspect.signature(method).parameters.values())
            ordered = [found.name for found in called if found.kind is found.POSITIONAL_OR_KEYWORD]
            named = [found.name for found in called if found.kind is found.KEYWORD_ONLY]
            if any(found.kind is found.VAR_KEYWORD for found in called):
                named += component.options
            takes = inspect.signature(own)
            try:
                takes.bind(*ordered, **dict.fromkeys(named))
            except TypeError:
                here, there = ", ".join(list(takes.parameters)[1:]), ", ".join([*ordered[1:], *named])
                raise StepformerError(
                    f"{component.__name__}.{key}({here}) cannot be called as {key}({there}), as every {self.kind} is."
                ) from None

    def _tell_near_names(self, component: type[T]) -> None:
        """A note where a class of one's own has a name that nothing asks for, and almost one that is asked for."""
        known = {name for cls in component.__mro__ if is_ours(cls) for name in vars(cls)}
        own = {name for cls in component.__mro__ if issubclass(cls, self.base) for name in vars(cls)}
        for name in sorted(own - known):
            if not name.startswith("_") and (near := suggestion(name, known, 0.8)):
                said = f"stepformer does not ask for {component.__name__}.{name}.{near}"
                warnings.warn(said, StepformerWarning, stacklevel=3)

    def canonical(self, word: str) -> str:
        """The registered name behind a name or alias."""
        if word not in self:
            said = f"Unknown {self.kind} '{word}'.{suggestion(word, self._aliases)}"
            raise UnknownNameError(f"{said} Known: {', '.join(self._entries)}. {self.own}".rstrip())
        return self._aliases[word]

    def __getitem__(self, word: str) -> Entry[T]:
        return self._entries[self.canonical(word)]

    def __contains__(self, word: Any) -> bool:
        return isinstance(word, str) and word in self._aliases

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def names(self) -> list[str]:
        """All registered names, without aliases."""
        return list(self._entries)


def _origin(component: type) -> tuple[str, str]:
    return component.__module__, component.__qualname__


Parts = Iterable[tuple[str, str, type[Component]]]
"""Kind, name and class of the components that a config names."""


def clashes(parts: Parts, keys: Collection[str]) -> list[str]:
    """Options that a component calls like a config key, or like an option of another component."""
    owners: dict[str, str] = {}
    problems = []
    for kind, name, part in parts:
        for key in part.options:
            if key in keys:
                whose = f"The {kind} '{name}' names an option '{key}'"
                problems.append(f"{whose}, which is a config key: give it another name.")
            elif key in owners:
                problems.append(
                    f"The {owners[key]} and the {kind} '{name}' both name an option '{key}': the options of one model "
                    "share their names with each other, so call yours something else."
                )
            owners.setdefault(key, f"{kind} '{name}'")
    return problems


def option_problems(
    given: Mapping[str, Any], parts: Parts, registries: Mapping[str, Registry[Any]], settings: Mapping[str, Any]
) -> dict[str, str]:
    """What is wrong with options given to these components, by name; `settings` are the config's other keys."""
    declared = {key: option for _, _, part in parts for key, option in part.options.items()}
    problems = {}
    for key, value in given.items():
        if key in declared:
            problem = declared[key].problem(key, value)
            if problem:
                problems[key] = problem
            continue
        owners = [
            (kind, entry.name)
            for kind, registry in registries.items()
            for entry in registry
            if key in entry.component.options
        ]
        if owners:
            where = " or ".join(f"{kind} = '{name}'" for kind, name in owners)
            here = " and ".join(f"{kind} = {settings[kind]!r}" for kind in sorted({kind for kind, _ in owners}))
            problems[key] = f"{key} = {value!r} has no meaning here: it is an option of {where}; this model has {here}."
        elif key == "preset":
            problems[key] = f"A preset is named itself: give {value!r} in the place of the name."
        elif "dropout" in key:
            problems[key] = f"There is no dropout: leave out {key}."
        else:
            known = [*settings, *declared]
            hint = translated(key, known) or suggestion(key, [*known, "preset", "size"])
            everything = f" Known keys: {', '.join(known)}; those of a training: `stepformer train --help`."
            problems[key] = f"Unknown key '{key}'." + (hint or everything)
    return problems
