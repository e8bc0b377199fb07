"""The page over HTTP, for this machine alone.

Only 127.0.0.1 is listened to. A page elsewhere on the web must not reach it through the visitor's browser either: the
Host header has to name this machine (a foreign name that was pointed here does not), a POST has to come from the page
itself and to be JSON, and no answer may be read, framed or extended by others. Nothing a client sends names a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from stepformer.data.tokenizers import valid
from stepformer.errors import InputError, StepformerError
from stepformer.serving.inspect import comparison
from stepformer.serving.runs import ServedRun, why_apart

HOST = "127.0.0.1"
OWN_NAME = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)  # any port: a tunnel has its own
LARGEST_BODY = 1 << 20
MOST_TOKENS = 4096  # in one request
PATIENCE = 1.0  # seconds that a stop waits for a running call of a model

FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("page", "dom", "tokens", "generate", "compare")},
    "/watch.js": ("watch.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class GoneError(Exception):
    """Nobody waits for the answer any more."""


class RefusedError(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        self.status = status
        super().__init__(sentence)


class PageServer(ThreadingHTTPServer):
    """The server of one or two runs; `serve_forever` answers until `stop`."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, runs: list[ServedRun], port: int = 0) -> None:
        self.runs = runs
        self.apart = why_apart(runs)
        self.stopping = threading.Event()
        self.answering: list[threading.Thread] = []
        if not 0 <= port < 1 << 16:
            raise InputError(f"--port {port} should lie between 0 (any free one) and {(1 << 16) - 1}.")
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = f"Port {port} is taken"
            else:
                why = f"Port {port} cannot be used ({error.strerror})"
            raise StepformerError(f"{why}: choose another with --port, or --port 0 for any free one.") from None

    def server_bind(self) -> None:
        """Without the look-up of this machine's name that HTTPServer makes, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error; anything else is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"stepformer: a request failed: {type(error).__name__}: {error}", file=sys.stderr)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, which is remembered."""
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self.answering = [known for known in self.answering if known.is_alive()] + [thread]
        thread.start()

    def stop(self) -> bool:
        """End what runs, with a moment's patience for calls of a model. False if a request is still being answered: its
        thread may be inside torch, where the end of the interpreter would abort the process.
        """
        self.stopping.set()
        self.server_close()
        until = time.monotonic() + PATIENCE
        calls = [run.lock.acquire(timeout=max(0.0, until - time.monotonic())) for run in self.runs]
        return all(calls) and not any(thread.is_alive() for thread in self.answering)


class Handler(BaseHTTPRequestHandler):
    """One request: who asks is checked first, then the small functions below answer with values or lines."""

    server: PageServer
    timeout = 30  # seconds for a client to send its request or to take its answer
    disable_nagle_algorithm = True  # tokens are small and should not wait for each other
    server_version = "stepformer"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, answer: Callable[[str], None]) -> None:
        """Every failure is a sentence."""
        self.begun = False
        try:
            answer(self.path.partition("?")[0])
        except (GoneError, OSError):  # nobody reads what would be said
            self.close_connection = True
        except RefusedError as error:
            self._fail(error.status, str(error))
        except StepformerError as error:
            self._fail(400, str(error))
        except Exception as error:
            print(f"stepformer: {self.path} failed: {type(error).__name__}: {error}", file=sys.stderr)
            self._fail(500, f"The server could not do this: {type(error).__name__}: {error}")

    def _fail(self, status: int, sentence: str) -> None:
        with contextlib.suppress(OSError):
            if self.begun:
                self._line({"error": sentence})
            else:
                self._json({"error": sentence}, status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses: a sentence here too."""
        self._fail_early(code, message or "The request is not understood.")

    def _fail_early(self, code: int, sentence: str) -> None:
        self.begun = False
        self.close_connection = True
        self._fail(code, sentence)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""

    # who asks, and what

    def _check_host(self) -> None:
        if not OWN_NAME.fullmatch(self.headers.get("Host", "")):
            raise RefusedError(403, f"This page is served to this machine alone: ask for {self.server.url}.")

    def _check_origin(self) -> None:
        origin = self.headers.get("Origin")
        foreign = origin is not None and origin != f"http://{self.headers['Host']}"
        if foreign or self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise RefusedError(403, "Another page may not ask this server.")

    def _body(self) -> dict[str, Any]:
        """The JSON object that was sent. What is refused is read all the same, so that the client sees the answer."""
        given = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,15}", given):
            raise RefusedError(411, "The request should say its length in Content-Length.")
        length = int(given)
        content = self.rfile.read(min(length, LARGEST_BODY))
        left = min(length - len(content), 16 * LARGEST_BODY)
        while left > 0 and (ignored := self.rfile.read(min(left, LARGEST_BODY))):
            left -= len(ignored)
        self._check_host()
        self._check_origin()
        if self.headers.get_content_type() != "application/json":
            raise RefusedError(415, "The request should be JSON, with Content-Type: application/json.")
        if length > LARGEST_BODY:
            raise RefusedError(413, f"The request has {length:,} bytes; at most {LARGEST_BODY:,} are taken.")
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            raise RefusedError(400, "The request is not valid JSON.") from None
        if not isinstance(value, dict):
            raise RefusedError(400, "The request should be a JSON object.")
        return value

    # answers

    def _get(self, path: str) -> None:
        self._check_host()
        if path in FILES:
            name, kind = FILES[path]
            content = resources.files("stepformer.serving").joinpath("page", name).read_bytes()
            self._send(200, f"{kind}; charset=utf-8", content)
        elif path == "/api/state":
            self._json({"runs": [run.facts() for run in self.server.runs], "apart": self.server.apart})
        elif path == "/api/watch":
            self._json({"runs": [run.progress() for run in _distinct(self.server.runs)]})
        else:
            raise RefusedError(404, "There is nothing at this address.")

    def _post(self, path: str) -> None:
        actions = {"generate": self._generate, "compare": self._compare, "sample": self._sample, "load": self._load}
        action = actions.get(path.removeprefix("/api/")) if path.startswith("/api/") else None
        body = self._body()
        if action is None:
            raise RefusedError(404, "There is nothing at this address.")
        action(body)

    def _generate(self, body: dict[str, Any]) -> None:
        """Tokens as they are made, one JSON object a line; the work ends when the client hangs up."""
        asked = _settings(body)
        run = self._run(body)
        with self._turn(run), contextlib.closing(run.generate(_text(body, "prompt"), **asked)) as events:
            for event in events:
                if not self.begun:  # bad settings have shown by now, and are answered with a status
                    self._start(200, "application/x-ndjson; charset=utf-8")
                if self._gone():
                    raise GoneError
                self._line(event)

    def _compare(self, body: dict[str, Any]) -> None:
        runs = self.server.runs
        if self.server.apart:
            raise InputError(self.server.apart)
        text = _text(body, "text")
        ids = runs[0].text_ids(text, min(run.context for run in runs))
        readings, steps = [], []
        for run in runs:
            with self._turn(run):
                readings.append(run.read(ids))
                steps.append(run.ready().step)
        size = len(valid(text).encode())
        self._json({**comparison(runs[0].tokenizer, ids, readings, size), "steps": steps})

    def _sample(self, body: dict[str, Any]) -> None:
        number = _number(body, "number", whole=True, least=0, most=1 << 40)
        runs = self.server.runs
        self._json({"text": runs[0].sample(int(number or 0), min(run.context for run in runs))})

    def _load(self, body: dict[str, Any]) -> None:
        run = self._run(body)
        with self._turn(run):
            run.load()
        self._json(run.facts())

    def _run(self, body: dict[str, Any]) -> ServedRun:
        side = _number(body, "side", whole=True, least=0, most=len(self.server.runs) - 1)
        return self.server.runs[int(side or 0)]

    @contextlib.contextmanager
    def _turn(self, run: ServedRun) -> Iterator[None]:
        """Hold a run's model; whoever hangs up while waiting loses the turn."""
        while not run.lock.acquire(timeout=0.1):
            if self._gone():
                raise GoneError
        try:
            if self._gone():
                raise GoneError
            yield
        finally:
            run.lock.release()

    def _gone(self) -> bool:
        """Has the client hung up, or is the server to stop?"""
        if self.server.stopping.is_set():
            return True
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, "application/json; charset=utf-8", json.dumps(value, allow_nan=False).encode())

    def _line(self, value: Any) -> None:
        self.wfile.write(json.dumps(value, allow_nan=False).encode() + b"\n")

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self._start(status, kind, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _start(self, status: int, kind: str, length: int | None = None) -> None:
        self.begun = True
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS}.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()


def _distinct(runs: list[ServedRun]) -> list[ServedRun]:
    """Best and last of one run are one training."""
    return list({run.folder.path.resolve(): run for run in runs}.values())


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str):
        raise InputError(f"'{name}' should be text.")
    return value


def _number(body: dict[str, Any], name: str, *, whole: bool, least: float, most: float) -> float | None:
    """A number of the request, in its limits; None when it is left out."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise InputError(f"'{name}' should be a {'whole ' if whole else ''}number.")
    if not least <= value <= most:
        raise InputError(f"'{name}' should lie between {least:g} and {most:g}.")
    return value


def _settings(body: dict[str, Any]) -> dict[str, Any]:
    """The settings of `generation.stream` that a request asks for."""
    known = {"side", "prompt", "tokens", "temperature", "top_k", "top_p", "seed"}
    if unknown := sorted(body.keys() - known):
        raise InputError(f"There is no setting '{unknown[0]}': there are {', '.join(sorted(known))}.")
    temperature = _number(body, "temperature", whole=False, least=0, most=100)
    return {
        "max_new_tokens": _number(body, "tokens", whole=True, least=1, most=MOST_TOKENS) or 200,
        "temperature": 0.8 if temperature is None else temperature,
        "top_k": _number(body, "top_k", whole=True, least=1, most=1 << 30),
        "top_p": _number(body, "top_p", whole=False, least=0, most=1),
        "seed": _number(body, "seed", whole=True, least=-(2**63), most=2**63 - 1),
    }
