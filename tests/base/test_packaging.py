"""What a release consists of: its files, one version, whom to cite. `make dist` builds one and tries it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import released
from stepformer import __version__
from stepformer.catalogue.references import BIBTEX

ROOT = released.ROOT
DOCUMENTS = (
    *("zimin2026yuriiformer", "gai2026momentum", "stein2026sympformer"),
    *("constrained-transformers", "shortcuts"),
)


def tracked() -> list[str]:
    try:
        return released.tracked()
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("not a git checkout")


def test_data_of_the_package_is_declared() -> None:
    assert released.undeclared(tracked()) == []
    assert released.undeclared(["rules/template.py", "catalogue/new.csv"]) == ["catalogue/new.csv"]


def test_two_set_ups_of_one_environment(tmp_path: Path) -> None:
    """The demo installs less than the tests; what is there is not installed again, in either order."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    log = tmp_path / "log"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "stepformer", "ruff", "mypy"):
        program = tmp_path / ".venv/bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n')
        program.chmod(0o755)

    def installed(*targets: str) -> list[str]:
        log.write_text("")
        subprocess.run(["make", *targets], cwd=tmp_path, check=True, capture_output=True)
        assert "pytest" in log.read_text() or "stepformer demo" in log.read_text()
        return re.findall(r"pip install .*\.\[(\w+)\]", log.read_text())

    assert [installed(target) for target in ("demo", "demo", "test", "demo", "test")] == [["plot"], [], ["dev"], [], []]
    (tmp_path / "constraints.txt").touch()
    assert [installed(target) for target in ("test", "demo")] == [["dev"], []]
    (tmp_path / "constraints.txt").touch()
    assert installed("-j2", "demo", "test") == ["plot", "dev"]


def test_one_version() -> None:
    """The package says it; who cannot read it there repeats it."""
    assert "\nversion = {" in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(
        r"^## (.*) - (?:unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert headings[0] == __version__
    assert headings == sorted(headings, reverse=True)


def test_archives_that_lack_something(tmp_path: Path) -> None:
    names = [f"stepformer/{name}" for name in tracked()]
    with zipfile.ZipFile(tmp_path / f"stepformer-{__version__}-py3-none-any.whl", "w") as wheel:
        for name in [*names[1:], "stepformer/left.over", "tests/loose.py"]:
            wheel.writestr(name, "")
        wheel.writestr(f"stepformer-{__version__}.dist-info/METADATA", f"Version: {__version__}.dev1\n")
    with tarfile.open(tmp_path / f"stepformer-{__version__}.tar.gz", "w:gz") as archive:
        for name in (*released.BESIDE[1:], "src"):
            archive.add(ROOT / name, f"stepformer-{__version__}/{name}")
    assert released.problems(tmp_path, __version__) == [
        f"The wheel lacks {names[0]}.",
        "The wheel has stepformer/left.over, which git does not know.",
        "The wheel installs tests/loose.py.",
        f"The archive lacks {released.BESIDE[0]}.",
        f"The wheel calls itself {__version__}.dev1.",
    ]
    assert "should hold one wheel and one archive" in released.problems(tmp_path, "9.9")[0]


def test_whom_to_cite() -> None:
    """Keys that version 1.2.0 of the Citation File Format asks for, and the documents as the catalogue has them."""
    yaml: Any = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["authors"] == [{"name": "The stepformer developers"}]
    for key, found in zip(DOCUMENTS, citation["references"], strict=True):
        fields = dict(re.findall(r"^  (\w+) = \{(.*)\},$", BIBTEX[key], re.MULTILINE))
        assert found["type"] in ("article", "blog", "unpublished")
        assert found["title"] == fields["title"].replace("{", "").replace("}", "")
        people = [f"{p['family-names']}, {p['given-names']}" for p in found["authors"] if "name" not in p]
        assert " and ".join(people) == fields.get("author", "")
        assert str(found.get("year", "")) == fields.get("year", "")
        numbers = [f"arXiv:{fields['eprint']}"] if "eprint" in fields else []
        assert [known["value"] for known in found.get("identifiers", [])] == numbers
        assert found.get("notes") == fields.get("note")


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.md")), ids=lambda path: path.stem)
def test_forms_of_issues(form: Path) -> None:
    yaml: Any = pytest.importorskip("yaml")
    _, about, text = form.read_text().split("---\n", 2)
    assert yaml.safe_load(about).keys() == {"name", "about", "labels"}
    for page in re.findall(r"(?:docs/)?[\w-]+\.md", text):
        assert (ROOT / page).is_file(), page
