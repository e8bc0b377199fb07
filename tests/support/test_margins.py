"""What `make test-shaken` hears of tolerances."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import margins
import shaken


@pytest.mark.parametrize(
    ("explanation", "found"),
    [
        ("2e-06 < 1e-05\n +  where 2e-06 = off_by(...)", [(2e-6, 1e-5)]),
        ("tensor(3.0e-06, dtype=torch.float64) <= (1e-05 * tensor(2.))", [(3e-6, 2e-5)]),
        ("(np.float64(0.5) < 1 and -0.25 < 0.5)", [(0.5, 1.0), (-0.25, 0.5)]),
        ("0.1 > 0.02", [(0.02, 0.1)]),
        ("(0.1 < 0.2) == True", []),  # what a comparison equals is not a bound
        ("<object at 0x7f> < 3", []),
        ("[1, 2] == [1, 2]", []),
    ],
)
def test_comparisons_in_an_explanation(explanation: str, found: list[tuple[float, float]]) -> None:
    assert list(margins.comparisons(explanation)) == found


@pytest.mark.slow
def test_every_kind_of_tolerance_is_heard(tmp_path: Path) -> None:
    """In a process of its own, as tests/support/shaken.py does it."""
    file = tmp_path / "tests" / "test_it.py"
    file.parent.mkdir()
    file.write_text(
        "import numpy as np\nimport pytest\nimport torch\n\n\n"
        "def test_it():\n"
        "    assert 5e-7 < 1e-6\n"
        "    assert 1.0 == pytest.approx(1.25, abs=1.0)\n"
        "    torch.testing.assert_close(torch.tensor(1.0), torch.tensor(1.2), atol=1.0, rtol=0)\n"
        "    np.testing.assert_allclose([1.0], [1.1], atol=1.0, rtol=0)\n"
        "    assert torch.allclose(torch.tensor(2.0), torch.tensor(2.0))\n"
    )
    words = ["-p", "margins", "-p", "shaken", "-o", "enable_assertion_pass_hook=true", "--order", "1"]
    command = [sys.executable, "-m", "pytest", *words, "--rootdir", str(tmp_path), "--margins", str(tmp_path / "m")]
    environment = {**shaken.environment(shaken.Variation()), "PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    done = subprocess.run(
        [*command, str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["line"]: row for row in shaken.read_margins(tmp_path.glob("m.*"))}
    expected = {
        7: ("<", 0.5),
        8: ("approx", 0.25),
        9: ("assert_close", 0.2),
        10: ("assert_allclose", 0.1),
        11: ("allclose", 0),
    }
    assert {line: row["how"] for line, row in rows.items()} == {line: how for line, (how, _) in expected.items()}
    for line, (_, share) in expected.items():
        assert rows[line]["share"] == pytest.approx(share, abs=1e-6)
    assert {row["file"] for row in rows.values()} == {file.name}


def test_every_variation_is_told_apart() -> None:
    cells = [tuple(variation.cells()) for variation in shaken.VARIATIONS.values()]
    assert len(set(cells)) == len(cells)
    for variation in shaken.VARIATIONS.values():
        found = shaken.environment(variation)
        assert found["OMP_NUM_THREADS"] == str(variation.threads)
        assert (found.get("ATEN_CPU_CAPABILITY") == "default") == (variation.simd == "default")
