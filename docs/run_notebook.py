"""Runs the code cells of a notebook in order and keeps in it what they show: text, tables, pictures.

    python docs/run_notebook.py docs/tour.ipynb

This is Jupyter's "Run all" without Jupyter, in a new folder that is gone afterwards. tests/cli/test_notebook.py runs
the cells by it and compares what they show.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepformer.base.files import write_text


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """Of the code that the outputs belong to."""
    return hashlib.sha256("\n\n".join("".join(cell["source"]) for cell in code_cells(notebook)).encode()).hexdigest()


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs that its cells have now, in one namespace; an exception of a cell ends it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names) if last else None  # type: ignore[attr-defined]
        cell["execution_count"], cell["outputs"] = number, []
        if text := printed.getvalue():
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
        if value is not None:
            shown = {"data": displayed(value), "execution_count": number, "metadata": {}}
            cell["outputs"].append({"output_type": "execute_result", **shown})
    notebook["metadata"]["stepformer"] = {"code_sha256": digest(notebook)}
    return notebook


def displayed(value: Any) -> dict[str, Any]:
    """A value as Jupyter shows it: a figure as a picture, a table as HTML, anything else as text."""
    found: dict[str, Any] = {"text/plain": [repr(value)]}
    if hasattr(value, "savefig"):
        found["text/plain"] = ["<Figure>"]
        value.savefig(picture := io.BytesIO(), format="png", dpi=60, metadata={"Software": None})
        found["image/png"] = base64.b64encode(picture.getvalue()).decode()
    elif hasattr(value, "_repr_html_"):
        found = {"text/html": value._repr_html_().splitlines(keepends=True), "text/plain": [f"{value}"]}
    return found


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ.pop("STEPFORMER_HOME", None)
        run(notebook)
    write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
