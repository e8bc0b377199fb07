"""The documentation site: whole, offline, and with everything that the package exports in its reference."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import stepformer as sf
from browser import open_browser, watched
from scripts import script

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = [
    name
    for page in (ROOT / "docs/reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
]
PUBLIC = [name for name in sf.__all__ if not name.startswith("_")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` has built before the tests, or a site of this module's own."""
    if os.environ.get("STEPFORMER_SITE"):
        return (ROOT / os.environ["STEPFORMER_SITE"]).resolve()
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr
    return out


class Parts(HTMLParser):
    """The anchors of a page and where its links and resources are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        self.links += [value for key in ("href", "src") if (value := given.get(key))]


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    # a server shows 404.html for addresses at any depth, so its links begin at the root
    pages = {path: Parts(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > len(PAGES)
    for path, parts in pages.items():
        for link in parts.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            assert target.is_file(), f"{path.name}: {link}"
            if address.fragment and target.suffix == ".html":
                assert unquote(address.fragment) in pages[target].anchors | {"__top"}, f"{path.name}: {link}"


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = script("docs/site/hooks.py").loads
    read = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert {path.suffix for path in read} == {".html", ".css"}
    for path in read:
        assert loads(path.read_text(), path.suffix) == [], path
    for text in (
        '<script src="https://cdn.example/x.js"></script>',
        "<link rel=stylesheet href=//fonts.example/css>",
        '<img alt="a" src="http://example/a.png">',
        "<style>@import 'https://example/x.css'</style>",
        '<p style="background: url(https://example/a.png)">',
    ):
        assert len(loads(text, ".html")) == 1, text
    assert loads('<a href="https://arxiv.org">paper</a> <img src="figures/a.png">', ".html") == []


def test_the_site_from_the_file_system(site: Path) -> None:
    """Equations have a size, search finds, pictures are there; no errors and no requests but for files."""
    with open_browser() as browser:
        page = browser.new_page()
        problems = watched(page)
        page.goto(f"file://{site}/flows.html")
        height = "all => all.filter(m => m.getBoundingClientRect().height < 5 || m.querySelector('merror')).length"
        assert page.locator("math").count() > 80
        assert page.locator("math").evaluate_all(height) == 0
        assert page.locator("article img").evaluate_all("all => all.filter(i => !i.naturalWidth).length") == 0
        page.goto(f"file://{site}/index.html")
        for words, where in (("register_template", "reference/rules.html"), ("bits per byte", "evaluate.html")):
            page.fill(".md-search__input", "")
            page.locator(".md-search__input").press_sequentially(words)
            page.locator(f".md-search-result__link[href*='{where}']").first.wait_for()
        assert problems == []


def test_without_scripts_the_text_and_the_equations_are_there(site: Path) -> None:
    text = (site / "train.html").read_text()
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">' in text
    assert "arithmatex" not in text
    assert "$$" not in text


def test_an_equation_that_does_not_convert_is_told(caplog: pytest.LogCaptureFixture) -> None:
    mathml = script("docs/site/hooks.py").mathml
    assert "<mfrac>" in mathml(r"\frac{a}{b} &lt; 1", "inline", "page.md")
    assert caplog.text == ""
    mathml(r"\nosuchcommand x", "inline", "page.md")
    mathml("a_b_c", "block", "page.md")
    assert len(re.findall("page.md: the equation", caplog.text)) == 2


def test_the_reference_has_every_public_name() -> None:
    assert {f"stepformer.{name}" for name in PUBLIC} <= {*REFERENCE}
    assert len(REFERENCE) == len({*REFERENCE})


def test_the_reference_has_what_the_pages_import() -> None:
    found = {name.rpartition(".")[2] for name in REFERENCE}
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stepformer."):
                    names = {alias.name for alias in node.names if not alias.name.isupper()} - {"tales"}  # a module
                    assert names <= found, f"{page.name}: {names - found}"


@pytest.mark.parametrize("name", REFERENCE)
def test_names_of_the_reference_are_documented_and_their_examples_run(name: str) -> None:
    module, _, own = name.rpartition(".")
    what = getattr(importlib.import_module(module), own)
    if inspect.isclass(what) or inspect.isfunction(what):
        assert inspect.getdoc(what), name
        for test in doctest.DocTestFinder(recurse=False).find(what, name, globs={}):
            assert doctest.DocTestRunner().run(test).failed == 0, name
    exported = name.removeprefix("stepformer.") in PUBLIC
    if exported and inspect.isfunction(what) and len(inspect.signature(what).parameters) > 2:
        assert "Args:" in (what.__doc__ or ""), name
