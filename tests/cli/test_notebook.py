"""docs/tour.ipynb runs, and what is stored in it is what its cells show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import forked
from stepformer.base.plugins import import_file

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs/tour.ipynb"
RUNNER = import_file(ROOT / "docs/run_notebook.py")
EXACT = (0, 1)  # cells whose text is the same on every machine


def shown(cell: dict[str, Any]) -> list[Any]:
    """What kind of things a cell shows: the words of its lines without their numbers, or the forms of its value."""
    return [
        re.sub(r"[-+]?\d[\d.,e+-]*", "#", "".join(output["text"])).split()
        if output["output_type"] == "stream"
        else sorted(output["data"])
        for output in cell["outputs"]
    ]


LONG, SHORT = '"steps": 80, "batch": 8, "eval_every": 20', '"steps": 12, "batch": 8, "eval_every": 4'


@pytest.mark.parametrize("steps", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "whole"])
def test_the_cells_run_and_show_what_is_stored(steps: str, tmp_path: Path) -> None:
    stored = json.loads(NOTEBOOK.read_text())
    text = NOTEBOOK.read_text().replace(json.dumps(LONG)[1:-1], json.dumps(steps)[1:-1])
    assert (text == NOTEBOOK.read_text()) == (steps == LONG)
    (tmp_path / "tour.ipynb").write_text(text)
    code = "import json; from pathlib import Path; from stepformer.base.plugins import import_file"
    code += f"; runner = import_file(Path({str(ROOT / 'docs/run_notebook.py')!r}))"
    code += "; made = runner.run(json.loads(Path('tour.ipynb').read_text()))"
    done = forked.python(f"{code}; Path('made.json').write_text(json.dumps(made))", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "made.json").read_text())
    for number, (now, then) in enumerate(zip(*map(RUNNER.code_cells, (made, stored)), strict=True)):
        assert shown(now) == shown(then), f"cell {number + 1}: run `python docs/run_notebook.py docs/tour.ipynb`"
        if number in EXACT:
            assert now["outputs"] == then["outputs"]
    assert (tmp_path / "runs/tour/result.json").is_file()


def test_the_outputs_belong_to_the_code_and_are_small() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = RUNNER.code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, 11)]
    assert all(cell["outputs"] for cell in cells)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    pictures = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    how = "run `python docs/run_notebook.py docs/tour.ipynb`"
    assert notebook["metadata"]["stepformer"]["code_sha256"] == RUNNER.digest(notebook), how
    assert NOTEBOOK.stat().st_size < 200_000
    for link in re.findall(r"\]\(([^)#]+)", "".join("".join(cell["source"]) for cell in notebook["cells"])):
        assert (NOTEBOOK.parent / link).exists(), link


def test_the_runner_notices_a_cell_that_fails(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["x = 1\n", "x / 0"], "outputs": [], "execution_count": None}
    path = tmp_path / "bad.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    code = f"import sys; sys.argv[1:] = [{str(path)!r}]; from stepformer.base.plugins import import_file; "
    code += f"from pathlib import Path; import_file(Path({str(ROOT / 'docs/run_notebook.py')!r})).main()"
    done = forked.python(code, cwd=tmp_path)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert json.loads(path.read_text())["cells"][0]["outputs"] == []
