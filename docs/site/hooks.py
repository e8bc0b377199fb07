"""What the site needs besides the pages of docs/: equations as MathML, pages from elsewhere, a look at the result.

mkdocs calls the functions by their names (mkdocs.yml). A warning ends a build with `--strict`, which `make docs` uses.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Files of the repository that pages link to, and where they are on the site; all others are those of docs/.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CITATION.cff": "CITATION.cff",
    "benchmarks/README.md": "benchmarks/README.md",
    "benchmarks/TARGETS.md": "benchmarks/TARGETS.md",
}
OUTSIDE |= {(path := str(f.relative_to(ROOT))): path for f in sorted((ROOT / "benchmarks/results").glob("*.json"))}
INSIDE = {there: here for here, there in OUTSIDE.items()}
log = logging.getLogger("mkdocs.hooks.stepformer")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/, and a list of the files in every folder of raw outputs without a README."""
    for here, there in OUTSIDE.items():
        files.append(File.generated(config, there, abs_src_path=str(ROOT / here)))
    raw = ROOT / "docs/raw"
    for folder in (raw, *(path for path in raw.rglob("*") if path.is_dir())):
        if not (folder / "README.md").exists():
            uri = f"{folder.relative_to(ROOT / 'docs').as_posix()}/index.md"
            files.append(File.generated(config, uri, content=listing(folder)))
    return files


def listing(folder: Path) -> str:
    """A page with links to everything in a folder."""
    title = "Raw outputs" if folder.name == "raw" else f"Raw outputs: {folder.name}"
    links = [f"- [{path.name}]({path.name})" for path in sorted(folder.iterdir())]
    return "\n".join([f"# {title}", "", *links])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they work in the repository become links as they work on the site."""
    here = page.file.src_uri
    source = INSIDE.get(here, f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        path, anchor = match.group(1), match.group(2) or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if "://" in path or not (ROOT / target).exists():
            return match.group()
        there = OUTSIDE.get(target, target.removeprefix("docs/"))
        if (ROOT / target).is_dir():
            there += "/README.md" if (ROOT / target / "README.md").exists() else "/index.md"
        return f"]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Equations, which arithmatex has found, as MathML: a browser shows it without JavaScript."""
    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
        lambda found: mathml(found.group(2), "block" if found.group(1) == "div" else "inline", page.file.src_uri),
        html,
        flags=re.DOTALL,
    )


def mathml(escaped: str, display: str, where: str) -> str:
    tex = html.unescape(escaped).strip()
    try:
        made = convert(tex, display=display)
    except Exception as error:
        log.warning("%s: the equation %s does not convert: %r", where, tex, error)
        return escaped
    if "\\" in html.unescape(re.sub("<[^>]*>", "", made)):
        log.warning("%s: the equation %s has a command that MathML does not know.", where, tex)
    return made


def on_post_build(config: MkDocsConfig) -> None:
    """No page or stylesheet of the finished site loads anything from elsewhere."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            for address in loads(path.read_text(encoding="utf-8"), path.suffix):
                log.warning("%s loads %s.", path.relative_to(config.site_dir), address)


def loads(text: str, suffix: str) -> list[str]:
    """Addresses of other machines from which a browser would fetch something; links that a reader follows are none."""
    addresses = re.findall(r"""(?:@import\s*|url\()\s*["']?((?:https?:)?//[^"')\s]+)""", text)
    if suffix == ".html":
        for tag in re.findall(r"<(?!a\b)\w+\b[^>]*>", text):
            addresses += re.findall(r"""\b(?:src|href|srcset|data|poster)=["']?((?:https?:)?//[^"'\s>]+)""", tag)
    return addresses
