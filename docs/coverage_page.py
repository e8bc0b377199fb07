"""Makes docs/coverage.md: every item of the documents and of other papers, the command that shows it, and its tests.

    python docs/coverage_page.py

Presets and recipes come from the catalogue, all else from coverage.toml. tests/cli/test_coverage.py checks that the
page is this file's, that every command is one, and that every test exists.
"""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path
from typing import Any

import stepformer as sf
from stepformer.base.files import write_text
from stepformer.catalogue.recipes import load_recipe, recipe_names

HERE = Path(__file__).resolve().parent
INTRODUCTION = """# What of the five documents, and of other papers, is here

Made by `python docs/coverage_page.py` from the catalogue and from `docs/coverage.toml`. The state names the tests that
fail if the row stops being true, or says what differs from the document. Sections are those of the documents.
"""


def rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of the page, by document; each has item, section, command, tests, and perhaps what differs."""
    known = tomllib.loads((HERE / "coverage.toml").read_text())
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in known["documents"]}
    by_paper = {paper: title for title, entry in known["documents"].items() for paper in entry.get("papers", [])}
    for name in sf.presets():
        short = sf.preset(name)
        sections = [where for pattern, where in known["presets"].items() if fnmatch.fnmatch(name, pattern)]
        if not sections:
            raise SystemExit(f"coverage.toml: [presets] has no pattern for '{name}': say where it is described.")
        aliases = "".join(f", `{alias}`" for alias in short.aliases)
        row = {"item": f"`{name}`{aliases}", "section": sections[0], "command": f"stepformer audit {name}"}
        found[by_paper[short.cite]].append({**row, "tests": known["of_presets"]})
    for name in recipe_names():
        about = load_recipe(name).about
        row = {"item": f"recipe `{name}`", "section": about["figure"], "command": f"stepformer train {name} --dry-run"}
        found[by_paper[about["paper"]]].append({**row, "tests": known["of_recipes"]})
    for title, entry in known["documents"].items():
        found[title] += entry.get("rows", [])
    return found


def page() -> str:
    parts = [INTRODUCTION]
    for title, members in rows().items():
        parts.append(f"\n## {title}\n\n| item | section | command | state |\n|---|---|---|---|\n")
        for row in members:
            held = ", ".join(f"`{test}`" for test in row["tests"])
            state = row.get("differs", "done") + (f": {held}" if held else "")
            cells = (row["item"], row["section"], f"`{row['command']}`", state)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


if __name__ == "__main__":
    write_text(HERE / "coverage.md", page())
    print(f"written: {HERE / 'coverage.md'}")
