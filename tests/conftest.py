"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton: kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):
        import interpreting

        interpreting.install()


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`: commands under test would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# the list of trusted plug-ins is not the user's; processes under test have it too
os.environ["STEPFORMER_TRUSTED"] = str(Path(OWN := tempfile.mkdtemp(prefix="stepformer-")) / "trusted.json")

from stepformer.base.plugins import loading, trusting
from stepformer.ops import kernels

# helpers that assert: their failures, and what make test-shaken hears of their tolerances, as for a test's own
pytest.register_assert_rewrite("reported", "row_cases", "served", "texts")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-combinations", action="store_true", help="audit every combination of components (hours)")


def pytest_collection_finish() -> None:
    """Python's collector leaves alone what was imported: going through torch again and again took 7 % of the time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    shutil.rmtree(OWN, ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_global_changes() -> Iterator[None]:
    """Tests must not leak a default dtype, a grad mode or the memory of plug-ins into each other."""
    loading._LOADED.clear()
    trusting._NAMED.clear()
    Path(os.environ["STEPFORMER_TRUSTED"]).unlink(missing_ok=True)
    yield
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    if torch.cuda.is_initialized():  # what a failed capture of a CUDA graph leaves behind
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.rand(1, device="cuda")


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study that the tests of reports read, trained once; they change copies of it."""
    from reported import make_study

    return make_study(tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tales as bytes, which nobody changes."""
    from runs import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"), count=4).folder


@pytest.fixture(scope="session")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the small run that nothing disturbs."""
    from runs import go

    return go(corpus, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def few_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty chart in the place of a report's dozens, for tests that do not look at them: they take seconds."""
    from stepformer.pages.reports import paper
    from stepformer.present.style import new_figure, save_figure

    monkeypatch.setattr(paper, "plot_charts", lambda charts, labels, paths: save_figure(new_figure((1, 1)), paths))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What torch.empty gives is NaN, so whatever is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def interpreted(poisoned: None) -> Iterator[None]:
    """Kernels take CPU tensors, and memory that nobody has written is NaN."""
    with kernels.interpreted():
        yield


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a test registers are gone after it."""
    from stepformer.extras import extras
    from stepformer.oracles import attentions, mlps
    from stepformer.rules import templates

    for registry in (templates, extras, attentions, mlps):
        for table in ("_entries", "_aliases"):
            monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
