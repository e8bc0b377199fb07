"""Whom `stepformer serve` answers: bad requests, the token, clients that take what they can."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from pathlib import Path
from typing import Any

import pytest

from served import ask, connected, post, serving, value
from stepformer.base.errors import InputError
from stepformer.pages.serving import PageServer, ServedRun
from stepformer.pages.serving import server as serving_module
from stepformer.pages.serving.server import LARGEST_BODY


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b"[]", 400, "JSON object"),
        ({"prompt": 3}, 400, "'prompt' should be text"),
        ({"prompt": "", "tokens": 0}, 400, "'tokens' should lie between 1 and 4096"),
        ({"prompt": "", "tokens": 1.5}, 400, "'tokens' should be a whole number"),
        ({"prompt": "", "tokens": True}, 400, "whole number"),
        ({"prompt": "", "temperature": "hot"}, 400, "'temperature' should be a number"),
        (b'{"prompt": "", "temperature": NaN}', 400, "'temperature' should lie between"),
        ({"prompt": "", "top_p": 0}, 400, "top_p = 0 should lie in (0, 1]"),
        ({"prompt": "", "seed": 2**64}, 400, "'seed' should lie between"),
        ({"prompt": "", "side": 2}, 400, "'side' should lie between 0 and 1"),
        ({"prompt": "", "path": "/etc/passwd"}, 400, "no setting 'path'"),
        (b" " * (LARGEST_BODY + 1), 413, "at most 1,048,576"),
    ],
)
def test_bad_requests_are_sentences(server: PageServer, body: Any, status: int, sentence: str) -> None:
    found, lines = ask(server, "/api/generate", body)
    assert (found, len(lines)) == (status, 1)
    assert sentence in lines[0]["error"]


def test_bad_texts_are_sentences(server: PageServer) -> None:
    for text, sentence in (("", "There is no text"), ("x" * 49, "49 tokens, but there is room for 48")):
        status, (answer,) = ask(server, "/api/compare", {"text": text})
        assert status == 400
        assert sentence in answer["error"]
    lone = value(ask(server, "/api/compare", b'{"text": "a\\ud800"}'))
    assert lone["summary"]["bytes"] == 4, "a lone surrogate is U+FFFD"


def test_others_are_refused(server: PageServer) -> None:
    port, body = server.server_port, {"prompt": "", "tokens": 1}
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost@evil.example", "[::", ""):
        assert ask(server, "/api/state", Host=host)[0] == 403, host
        assert ask(server, "/", Host=host)[0] == 403, host
        assert ask(server, "/api/generate", body, Host=host)[0] == 403, host
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", "http://127.0.0.1:1"):
        assert ask(server, "/api/generate", body, Origin=origin)[0] == 403, origin
    assert ask(server, "/api/generate", body, Sec_Fetch_Site="cross-site")[0] == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert ask(server, "/api/generate", body, Content_Type=kind)[0] == 415, kind
    own = {"Host": "localhost:9000", "Origin": "http://localhost:9000"}  # through a tunnel
    assert ask(server, "/api/generate", body, **own)[0] == 200
    assert ask(server, "/api/generate", body, Origin=f"http://127.0.0.1:{port}")[0] == 200


# the token, and clients that take what they can


def visited(server: PageServer, path: str, **headers: str) -> tuple[int, str | None]:
    """Status and cookie of a GET without any token but the one given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.headers["Set-Cookie"]


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/state", "/api/watch", "/nothing"])
@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer x", "Basic {}", "Bearer {}x", "Bearer \xe9", "bearer"])
def test_without_the_token_nothing_is_answered(server: PageServer, path: str, given: str) -> None:
    status, lines = ask(server, path, Authorization=given.format(server.token))
    sentence = "This needs the token of the server: open the link that `stepformer serve` printed."
    assert (status, lines) == (401, [{"error": sentence}])


@pytest.mark.parametrize("action", ["generate", "compare", "sample", "load"])
def test_without_the_token_no_model_works(server: PageServer, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in server.runs:
        monkeypatch.setattr(run, "ready", lambda: pytest.fail("asked"))
    for path in (f"/api/{action}", f"/api/{action}?token=wrong"):
        assert ask(server, path, {}, Authorization="")[0] == 401


def test_the_token_is_taken_in_three_places(server: PageServer) -> None:
    path, port = f"/?token={server.token}", server.server_port
    assert server.url == f"http://127.0.0.1:{port}{path}"
    status, cookie = visited(server, path)
    assert status == 200
    assert cookie == f"stepformer-{port}={server.token}; Path=/; HttpOnly; SameSite=Strict"
    assert visited(server, "/page.js", Cookie=f"other=1; stepformer-{port}={server.token}") == (200, None)
    assert visited(server, "/page.js", Cookie=f"stepformer-{port + 1}={server.token}")[0] == 401, "of another server"
    assert visited(server, "/page.js", Authorization=f"Bearer {server.token}") == (200, None)
    status, cookie = visited(server, path, Host="localhost:9000")  # through a tunnel
    assert (status, cookie is not None and cookie.startswith("stepformer-9000=")) == (200, True)
    assert visited(server, path, Host="evil.example")[0] == 403, "whoever has it, by another name"
    assert visited(server, "/?token=&token=x&x=%ff")[0] == 401
    sentence = ask(server, "/", Host="evil.example")[1][0]["error"]
    assert server.token not in sentence


def test_a_token_for_one_visit(server: PageServer) -> None:
    """Its address stands in a command line that others can read, and so it is worth nothing afterwards."""
    address = server.url_for_one_visit()
    path = address.removeprefix(f"http://127.0.0.1:{server.server_port}")
    assert server.token not in address
    status, cookie = visited(server, path)
    assert (status, cookie is not None and f"={server.token};" in cookie) == (200, True)
    assert visited(server, path) == (401, None)


def test_tokens_differ_and_may_be_chosen_or_left_out(folder: Path) -> None:
    runs = [ServedRun(folder / "begun")]
    servers = [
        PageServer(runs),
        PageServer(runs),
        PageServer(runs, token="0123456789abcdef"),
        PageServer(runs, token=""),
    ]
    assert len({found.token for found in servers}) == 4
    assert servers[2].url.endswith("/?token=0123456789abcdef")
    assert servers[3].url == servers[3].url_for_one_visit() == servers[3].address
    for found in servers:
        found.server_close()
    for bad in ("short", "0123456789 abcdef", "0123456789;abcdef", "0123456789\r\nabcdef"):
        with pytest.raises(InputError, match="16 characters or more"):
            PageServer(runs, token=bad)


def test_without_tokens_everybody_here_is_answered(folder: Path) -> None:
    with serving(ServedRun(folder / "begun"), token="") as found:
        assert visited(found, "/") == (200, None)
        assert visited(found, "/", Host="evil.example")[0] == 403


def test_clients_that_are_too_many_are_told_so(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "MOST_CLIENTS", 2)
    with connected(server), connected(server), connected(server) as third:
        head, _, content = b"".join(iter(lambda: third.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 503 ")
        assert json.loads(content) == {"error": "2 others are being answered: try again in a moment."}
    for thread in server.answering:
        thread.join(20)
    assert ask(server, "/api/state")[0] == 200


def test_a_byte_now_and_then_does_not_keep_a_place(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, the request never does: of its head, or of a body that was announced."""
    monkeypatch.setattr(serving_module, "SENDING", 0.5)
    head = f"POST /api/sample HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}\r\n"
    for begin in (head, f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"):
        with connected(server) as client:
            client.sendall(begin.encode())
            end = time.monotonic() + 20  # of patience with a busy machine
            with contextlib.suppress(OSError):  # nobody is there any more
                while time.monotonic() < end:
                    client.sendall(b"x")
                    client.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        if client.recv(1) == b"":
                            break
            assert time.monotonic() < end


def test_a_slow_reader_does_not_hold_the_model(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a little often enough that no single piece waits long; all of them together do."""
    monkeypatch.setattr(serving_module, "READING", 1.0)
    run = server.runs[0]
    monkeypatch.setattr(run, "generate", lambda prompt, **settings: ({"token": "x" * 10**6} for _ in range(10**6)))
    end = time.monotonic() + 20  # of patience with a busy machine
    with connected(server) as client:
        post(client, server, {"prompt": "One"})
        client.recv(1)
        assert run.lock.locked()
        while run.lock.locked() and time.monotonic() < end:
            client.recv(20_000)
            time.sleep(0.02)
    assert time.monotonic() < end


def test_unknown_paths_and_methods(server: PageServer) -> None:
    for path in ("/x", "/page.py", "/../server.py", "/page/../../server.py", "/%2e%2e/runs.py", "//etc/passwd", "//["):
        assert ask(server, path)[0] == 404, path
    assert ask(server, "/api/unknown", {})[0] == 404
    assert ask(server, "/api/state", {})[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("DELETE", "/api/state")
    answer = connection.getresponse()
    assert (answer.status, "error" in json.loads(answer.read())) == (501, True)


def test_only_this_machine_is_listened_to(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
