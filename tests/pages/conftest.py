"""Runs that are served, trained once, and a server of two of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from served import make_runs, serving_two
from stepformer.pages.serving import PageServer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    with serving_two(folder) as found:
        yield found
