"""A headless Chromium for the tests of pages: opened once, watched for errors and for requests to the network."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LOCAL_SCHEMES = {"file", "data", "blob", "about", "chrome"}
LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser for a block; the test is skipped where there is none, or fails if STEPFORMER_NEED_BROWSER=1."""
    executable = next((found for name in NAMES if (found := shutil.which(name))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("needs playwright: pip install 'stepformer[dev]'")
    if executable is None:
        _missing(f"needs a browser: one of {', '.join(NAMES)} on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def watched(page: Page) -> list[str]:
    """What goes wrong on a page from now on: console errors, uncaught exceptions, requests that leave the machine."""
    problems: list[str] = []

    def console(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(f"console: {message.text}")

    def requested(request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in LOCAL_SCHEMES and address.hostname not in LOCAL_HOSTS:
            problems.append(f"request: {request.url}")

    page.on("console", console)
    page.on("pageerror", lambda error: problems.append(f"page: {error}"))
    page.on("request", requested)
    return problems


def _missing(reason: str) -> None:
    if os.environ.get("STEPFORMER_NEED_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
