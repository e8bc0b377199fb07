"""Pages from Jinja's templates, in which every value is escaped unless it is HTML already."""

from __future__ import annotations

import functools
import html
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")  # characters that no page may hold


@functools.cache
def template(package: str, name: str) -> Template:
    """A template in the folder of a package. Of those in `parts/` the lines are joined, so that they may be indented
    without a blank where HTML would show it.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def load(name: str) -> str:
        text = (resources.files(package) / name).read_text(encoding="utf-8")
        return "".join(map(str.strip, text.splitlines())) if "parts/" in name else text

    def escaped(value: Any) -> Any:
        return value if isinstance(value, Markup) else Markup(html.escape(FORBIDDEN.sub("", str(value))))

    return Environment(
        loader=FunctionLoader(load),
        autoescape=True,
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template(name)
