"""The order of the house is kept, and whoever breaks it is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import house
import stepformer

PACKAGE = Path(stepformer.__file__).parent


def test_the_house_is_in_order() -> None:
    assert house.problems(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line", "sentence"),
    [
        ("rules/state.py", "from stepformer.model import Model", "rules/ imports model/, which stands after it"),
        (
            "oracles/mlp.py",
            "if TYPE_CHECKING:\n    from stepformer.training.config import RunConfig",
            "oracles/ imports training/",
        ),
        ("optim/polar.py", "def f() -> None:\n    import stepformer.study.plots", "optim/ imports study/"),
        ("base/files.py", "import_module('stepformer.rules.state')", "base/ imports rules/"),
        ("base/errors.py", "import stepformer.base.files", "An import circle: "),
        ("rules/adaptive.py", "import triton.language as tl", "names triton, which is for ops/ alone"),
        ("training/loop.py", "graph = torch.cuda.CUDAGraph()", "names CUDAGraph"),
        ("model/block.py", "from torch.distributed.tensor import DTensor", "names distributed.tensor"),
        ("cli/show.py", "from stepformer import build", "imports the root"),
        ("loose.py", "", "at the root of the package there are only"),
    ],
)
def test_who_breaks_it_is_told(file: str, line: str, sentence: str, tmp_path: Path) -> None:
    package = tmp_path / "stepformer"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / file).open("a") as out:
        out.write(f"\n{line}\n")
    found = house.problems(package)
    assert found
    assert any(sentence in problem for problem in found), found


def test_what_python_compiled_is_no_folder_of_ours(tmp_path: Path) -> None:
    """After a pull that moved a folder, git leaves its compiled files where it was."""
    package = tmp_path / "stepformer"
    (package / "kernels/__pycache__").mkdir(parents=True)
    (package / "kernels/__pycache__/loss.cpython-311.pyc").touch()
    assert house.problems(package) == []
    (package / "kernels/loss.py").touch()
    assert any(problem.startswith("kernels: at the root") for problem in house.problems(package))


def test_make_lint_asks() -> None:
    makefile = Path(__file__).parents[2] / "Makefile"
    lint = makefile.read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert "tests/support/house.py" in lint


def test_the_largest_file_and_the_mathematics() -> None:
    """Of the mathematics 3,500 lines when the house was built, and 187 for tables as controls, untied heads, learned
    priors and the options of SympFormer, 70 for rules with a history, arrays and a read-out, 108 for attention
    residuals, 264 for extras around layers and turns, 208 for hyper-connections, 96 for docstrings of the
    reference and the types of a call, 44 for faults of a class and names that hide each other, 17 for streams that
    start from tables, 51 for normalised answers, 14 for settings that change
    nothing and for what extras remember, 3 for numbers of numpy and what is no dtype, 9 for layers that are not there
    and for advice on roles and heads, 9 for coefficients that a layer never reads and for caches that are none, 4
    for splittings with a drift of their own and for architectures that are no table.
    """
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert max(lines.values()) <= 420, max(lines, key=lambda path: lines[path])
    above = [path for path in lines if path.relative_to(PACKAGE).parts[0] in ("rules", "oracles", "extras", "model")]
    assert sum(lines[path] for path in above if "engines" not in path.parts) <= 4584
