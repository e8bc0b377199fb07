"""The page of `stepformer serve` in a browser."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import open_browser, watched
from served import ask, metric, serving, value
from stepformer.pages.serving import PageServer, ServedRun

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


def percent(p: float) -> str:
    """A probability as the page writes it."""
    if p >= 0.9995:
        return "100 %"
    return f"{100 * p:.1f} %" if p >= 0.1 else f"{100 * p:#.2g} %" if p >= 1e-4 else ""


def nats(value: float) -> str:
    return f"{value:.4f}" if 0 < value < 0.01 else f"{value:.3f}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong."""
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    opened.set_default_timeout(20_000)
    problems = watched(opened)
    yield opened
    opened.close()
    assert problems == []


@contextlib.contextmanager
def shown(page: Any, *runs: ServedRun) -> Iterator[PageServer]:
    """A server for this page alone; the page leaves it before it ends, or its next question would find nobody."""
    with serving(*runs) as found:
        yield found
        page.goto("about:blank")


def test_page_generates(server: PageServer, page: Any) -> None:
    page.goto(server.url)
    page.fill("#prompt", "One")
    page.fill("#seed", "5")
    page.fill("#max", "12")
    page.keyboard.press("Control+Enter")
    page.get_by_text("12 tokens: as many tokens as asked for").nth(1).wait_for()
    boxes = page.locator("#outputs .tokens")
    assert boxes.count() == 2
    for side in (0, 1):
        assert boxes.nth(side).inner_text().startswith("One")
        events = ask(server, "/api/generate", {"side": side, "prompt": "One", "seed": 5, "tokens": 12})[1]
        first = boxes.nth(side).locator(".token").first
        first.hover()
        about = page.locator("#generate aside").inner_text()
        side_view = events[0]["token"]["side"]
        for view in (side_view, *side_view["alternatives"]):
            assert percent(view["probability"]) in about
    first.click()
    before = page.locator("#generate aside").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".token:focus").count() == 1
    assert page.locator("#generate aside").inner_text() != before


def test_the_link_lets_a_browser_in_and_leaves_the_token_in_no_address(server: PageServer, browser: Any) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{server.address}#compare")
        page.get_by_text("This needs the token of the server").wait_for()
        page.goto(f"{server.url}#compare")
        page.locator("#ask:enabled").wait_for()
        assert page.url == f"{server.address}#compare"
        (cookie,) = context.cookies()
        assert (cookie["value"], cookie["httpOnly"], cookie["sameSite"]) == (server.token, True, "Strict")
        assert page.evaluate("() => document.cookie") == ""
        page.reload()
        page.locator("#ask:enabled").wait_for()
    with browser.new_context() as context:  # as a link on another site
        page = context.new_page()
        page.goto("data:text/html,<a href='" + server.url_for_one_visit() + "'>a</a>")
        page.click("a")
        page.locator("#start:enabled").wait_for()


def test_page_stops(server: PageServer, page: Any) -> None:
    page.goto(server.url)
    page.fill("#max", "4096")
    page.fill("#temperature", "0")  # random text may end before anybody can stop it
    page.click("#start")
    page.locator("#outputs .token").nth(3).wait_for()
    page.click("#stop")
    page.get_by_text("stopped after").first.wait_for()
    assert page.locator("#start").is_enabled()
    for run in server.runs:
        assert run.lock.acquire(timeout=10)
        run.lock.release()


def test_hostile_text_is_text(server: PageServer, page: Any) -> None:
    page.goto(server.url)
    page.fill("#prompt", HOSTILE)
    page.fill("#max", "1")
    page.click("#start")
    page.get_by_text("1 tokens").nth(1).wait_for()
    assert page.locator("#outputs .given").first.inner_text() == HOSTILE
    page.click("#tab-compare")
    page.fill("#text", HOSTILE)
    page.click("#ask")
    page.locator("#read .tokens .token").nth(len(HOSTILE) - 1).wait_for()
    assert page.locator("#read .tokens").inner_text() == HOSTILE
    page.locator("#read .tokens .token").first.hover()
    assert page.locator("#compare aside .named").inner_text() == "<"
    assert page.locator("img").count() == 0
    assert page.title() == "stepformer: yurii, vanilla"


def test_page_compares(server: PageServer, page: Any) -> None:
    page.goto(f"{server.url}#compare")
    page.click("#sample")
    page.locator("#read .tokens .token").first.wait_for()
    text = page.input_value("#text")
    found = value(ask(server, "/api/compare", {"text": text}))
    assert page.locator("#read .tokens .token").count() == len(found["tokens"])
    summary = page.locator("#summary").inner_text()
    for i, side in enumerate(found["summary"]["sides"]):
        assert f"{side['nats_per_token']:.4f}" in summary
        assert f"{side['bits_per_byte']:.4f}" in summary
        assert str(found["summary"]["surer"][i]) in summary
    for place_, token in list(enumerate(found["tokens"]))[:6]:
        element = page.locator("#read .tokens .token").nth(place_)
        assert ("a" if token["difference"] > 0 else "b") in element.get_attribute("class").split()
        element.hover()
        about = page.locator("#compare aside").inner_text()
        surer = "yurii" if token["difference"] > 0 else "vanilla"
        assert f"{surer} is more certain, by {nats(abs(token['difference']))} nats." in about
        for side in token["sides"]:
            assert nats(-side["logprob"]) in about
            assert nats(side["entropy"]) in about
            for view in (side, *side["alternatives"]):
                assert percent(view["probability"]) in about
        assert page.locator("#compare aside .piece").count() == 10, "five alternatives of each"


def test_page_says_why_runs_cannot_be_compared(folder: Path, page: Any) -> None:
    with shown(page, ServedRun(folder / "yurii"), ServedRun(folder / "bpe")) as found:
        page.goto(f"{found.url}#compare")
        page.get_by_text("cannot be compared token by token").wait_for()
        assert page.locator("#ask").is_disabled()


@pytest.mark.slow
def test_page_watches_a_run_that_grows(folder: Path, tmp_path: Path, page: Any) -> None:
    """From an empty folder on: metrics appear, then a first checkpoint, which is taken without being asked."""
    shutil.copytree(folder / "begun", tmp_path / "run")
    with shown(page, ServedRun(tmp_path / "run")) as found:
        page.goto(found.url)
        page.get_by_text("Nothing measured yet.").wait_for()
        assert page.locator("#tab-watch").get_attribute("aria-selected") == "true"
        with (tmp_path / "run" / "metrics.jsonl").open("w") as file:
            file.write(metric(0, "eval") + metric(1) + metric(2))
            file.flush()
            page.get_by_text("2 of 12, 1,024 tokens").wait_for()
            page.get_by_text("4.0000 at step 0").first.wait_for()
            file.write(metric(3) + metric(4) + metric(4, "eval"))
        page.get_by_text("4 of 12, 2,048 tokens").wait_for()
        page.get_by_text("3.9600 at step 4").first.wait_for()
        page.get_by_text("256 tokens/s").wait_for()
        page.get_by_text("about 4 s of training").wait_for()
        assert page.locator("#curves polyline:not(.eval)").get_attribute("points").count(",") == 4
        page.click("#tab-generate")
        assert page.locator("#start").is_disabled()
        page.get_by_text("no checkpoint yet; the first one is taken").wait_for()
        shutil.copytree(folder / "yurii" / "checkpoints", tmp_path / "run" / "checkpoints")
        page.locator("#start:enabled").wait_for()
        page.fill("#max", "3")
        page.click("#start")
        page.get_by_text("3 tokens: as many").wait_for()


def test_page_fits_a_narrow_screen_and_shows_errors(server: PageServer, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 700})
    page.goto(server.url)
    page.fill("#prompt", "x" * 100)
    page.click("#start")
    page.get_by_text("The prompt has 101 tokens, but the model's context is 64: its last 64 are read.").wait_for()
    page.fill("#top_p", "0")
    page.locator("#start:enabled").wait_for()
    page.click("#start")
    page.get_by_text("top_p = 0 should lie in (0, 1].").first.wait_for()
    for tab in ("generate", "compare", "watch"):
        page.click(f"#tab-{tab}")
        page.locator(f"#{tab}").wait_for()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 360, tab
    unnamed = "() => [...document.querySelectorAll('input, textarea')].filter((e) => !e.labels.length).length"
    assert page.evaluate(unnamed) == 0
    page.close()
