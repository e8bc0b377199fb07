"""The page over HTTP, for this machine alone, and on it for who has the token.

Only 127.0.0.1 is listened to. A page elsewhere on the web must not reach it through the visitor's browser either: the
Host header has to name this machine (a foreign name that was pointed here does not), a POST has to come from the page
itself and to be JSON, and no answer may be read, framed or extended by others. Nothing a client sends names a file.

Others with an account on this machine reach the port too: every request has to bring the token, in its address, as
`Authorization: Bearer` or in the cookie that the first page comes with. So many are answered at once, and who sends or
reads too slowly is left, so that nobody holds a place or a model for ever.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import io
import json
import re
import secrets
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from stepformer.base.errors import InputError, StepformerError
from stepformer.data.tokenizers import valid
from stepformer.pages.serving.inspect import comparison
from stepformer.pages.serving.runs import ServedRun, number_of, settings_of, text_of, why_apart

HOST = "127.0.0.1"
OWN_NAME = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)  # any port: a tunnel has its own
LARGEST_BODY = 1 << 20
PATIENCE = 1.0  # seconds that a stop waits for requests that are being answered
MOST_CLIENTS = 64  # answered at once: a page of two runs asks for less than ten
SENDING = 30.0  # seconds that a client has to send its whole request
READING = 30.0  # seconds that an answer waits for a client that does not read, all its pieces together
NOTHING_THERE = "There is nothing at this address."
TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,}")  # what addresses, headers and cookies hold as it is

SCRIPTS = ("page", "dom", "tokens", "generate", "compare", "watch")
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
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


class Hurried(io.RawIOBase):
    """What a client sends, within a time for all of it: a byte now and then does not keep a connection."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._until = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class PageServer(ThreadingHTTPServer):
    """The server of one or two runs; `serve_forever` answers until `stop`.

    Without a token of the caller's one is drawn; with an empty one nobody is asked for it.
    """

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, runs: list[ServedRun], port: int = 0, token: str | None = None) -> None:
        if token and not TOKEN.fullmatch(token):
            raise InputError("The token should have 16 characters or more, of letters, digits, '.', '_', '~' and '-'.")
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.once: list[str] = []  # tokens that are good for one visit
        self.runs, self.apart = runs, why_apart(runs)
        self.stopping = threading.Event()
        self.answering: dict[threading.Thread, socket.socket] = {}
        if not 0 <= port < 1 << 16:
            raise InputError(f"--port {port} should lie between 0 (any free one) and {(1 << 16) - 1}.")
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise StepformerError(
                f"Port {port} {why}: choose another with --port, or --port 0 for any free one."
            ) from None

    def server_bind(self) -> None:
        """Without the look-up of this machine's name that HTTPServer makes, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    @property
    def url(self) -> str:
        """The address with the token: whoever has it may ask."""
        return f"{self.address}?token={self.token}" if self.token else self.address

    def url_for_one_visit(self) -> str:
        """For the command line of a browser, which everybody on this machine can read: it is good once."""
        if not self.token:
            return self.address
        self.once.append(secrets.token_urlsafe(24))
        return f"{self.address}?token={self.once[-1]}"

    def admits(self, given: str) -> bool:
        """Is this the token, or one for a first visit? That is used up then."""
        word = given.encode(errors="replace")
        for known in list(self.once):
            if hmac.compare_digest(word, known.encode()):
                with contextlib.suppress(ValueError):  # another thread was faster
                    self.once.remove(known)
                    return True
        return hmac.compare_digest(word, self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error; anything else is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"stepformer: a request failed: {type(error).__name__}: {error}", file=sys.stderr)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, which is remembered; whoever is one too many is told so."""
        self.answering = {known: asked for known, asked in self.answering.items() if known.is_alive()}
        if len(self.answering) >= MOST_CLIENTS:
            self._turn_away(request)
            return
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self.answering[thread] = request
        thread.start()

    def _turn_away(self, request: socket.socket) -> None:
        """A sentence without reading the request: new clients must not wait for one that sends nothing."""
        content = json.dumps({"error": f"{MOST_CLIENTS} others are being answered: try again in a moment."}).encode()
        head = "HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            request.shutdown(socket.SHUT_WR)
            request.recv(1 << 16)  # what is left unread would reset the connection before the answer is read
        self.shutdown_request(request)

    def stop(self, patience: float = PATIENCE) -> bool:
        """End what runs, with a moment's patience for answers on their way.

        False if a request is still being answered: its thread may be inside torch, where the end of the interpreter
        would abort the process.
        """
        self.stopping.set()
        self.server_close()
        until = time.monotonic() + patience
        for request in self.answering.values():
            with contextlib.suppress(OSError):  # it is closed already
                request.shutdown(socket.SHUT_RD)  # browsers open connections before they have anything to ask
        for thread in self.answering:
            thread.join(max(0.0, until - time.monotonic()))
        calls = [run.lock.acquire(timeout=max(0.0, until - time.monotonic())) for run in self.runs]
        return all(calls) and not any(thread.is_alive() for thread in self.answering)


class Handler(BaseHTTPRequestHandler):
    """One request: who asks is checked first, then the small functions below answer with values or lines."""

    server: PageServer
    disable_nagle_algorithm = True  # tokens are small and should not wait for each other
    server_version = "stepformer"
    sys_version = ""
    query = ""
    begun = False
    by_address = False  # the token is in the address: the answer brings a cookie

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(Hurried(self.connection, SENDING))
        self.left = READING

    def do_GET(self) -> None:
        """Every failure is a sentence."""
        path, _, self.query = self.path.partition("?")
        try:
            (self._post if self.command == "POST" else self._get)(path)
        except (GoneError, OSError):  # nobody reads what would be said
            self.close_connection = True
        except (RefusedError, StepformerError) as error:
            self._fail(getattr(error, "status", 400), str(error))
        except Exception as error:
            print(f"stepformer: {path} failed: {type(error).__name__}: {error}", file=sys.stderr)
            self._fail(500, f"The server could not do this: {type(error).__name__}: {error}")

    do_POST = do_GET  # noqa: N815

    def _fail(self, status: int, sentence: str) -> None:
        with contextlib.suppress(OSError):
            if self.begun:
                self._line({"error": sentence})
            else:
                self._json({"error": sentence}, status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses: a sentence here too."""
        self.begun, self.close_connection = False, True
        self._fail(code, message or "The request is not understood.")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""

    # who asks, and what

    @property
    def _cookie(self) -> str:
        """The name of our cookie. Cookies are a host's, whatever the port: servers side by side must not share one."""
        return f"stepformer-{self.headers.get('Host', '').partition(':')[2] or '80'}"

    def _check(self, *, own_page: bool = True) -> None:
        """Refuse who asks for another machine, has no token or, where that matters, is another page."""
        if not OWN_NAME.fullmatch(self.headers.get("Host", "")):
            raise RefusedError(403, f"This page is served to this machine alone: ask for {self.server.address}.")
        scheme, _, word = self.headers.get("Authorization", "").partition(" ")
        cookies = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        given = [word.strip()] if scheme.lower() == "bearer" else []
        given += [value for name, _, value in cookies if name == self._cookie]
        if self.server.token and not any(map(self.server.admits, given)):
            self.by_address = any(map(self.server.admits, parse_qs(self.query).get("token", [])))
            if not self.by_address:
                where = "open the link that `stepformer serve` printed."
                raise RefusedError(401, f"This needs the token of the server: {where}")
        foreign = self.headers.get("Origin", own := f"http://{self.headers['Host']}") != own
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        if own_page and (foreign or site not in ("same-origin", "none")):
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
        self._check()
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
        self._check(own_page=path not in FILES)
        if path in FILES:
            name, kind = FILES[path]
            content = resources.files(__package__).joinpath("page", name).read_bytes()
            self._send(200, f"{kind}; charset=utf-8", content)
        elif path == "/api/state":
            self._json({"runs": [run.facts() for run in self.server.runs], "apart": self.server.apart})
        elif path == "/api/watch":  # best and last of one run are one training
            runs = {run.folder.path.resolve(): run for run in self.server.runs}
            self._json({"runs": [run.progress() for run in runs.values()]})
        else:
            raise RefusedError(404, NOTHING_THERE)

    def _post(self, path: str) -> None:
        body = self._body()
        if path not in ("/api/generate", "/api/compare", "/api/sample", "/api/load"):
            raise RefusedError(404, NOTHING_THERE)
        getattr(self, path.replace("/api/", "_"))(body)

    def _generate(self, body: dict[str, Any]) -> None:
        """Tokens as they are made, one JSON object a line; the work ends when the client hangs up."""
        asked, run = settings_of(body), self._run(body)
        with self._turn(run), contextlib.closing(run.generate(text_of(body, "prompt"), **asked)) as events:
            for event in events:
                if not self.begun:  # bad settings have shown by now, and are answered with a status
                    self._start(200, "application/x-ndjson; charset=utf-8")
                self._stay()
                self._line(event)

    def _compare(self, body: dict[str, Any]) -> None:
        runs = self.server.runs
        if self.server.apart:
            raise InputError(self.server.apart)
        text = text_of(body, "text")
        ids = runs[0].text_ids(text, min(run.context for run in runs))
        readings, steps = [], []
        for run in runs:
            with self._turn(run):
                readings.append(run.read(ids))
                steps.append(run.ready().step)
        self._json({**comparison(runs[0].tokenizer, ids, readings, len(valid(text).encode())), "steps": steps})

    def _sample(self, body: dict[str, Any]) -> None:
        room = min(run.context for run in self.server.runs)
        self._json({"text": self.server.runs[0].sample(number_of(body, "number") or 0, room)})

    def _load(self, body: dict[str, Any]) -> None:
        run = self._run(body)
        with self._turn(run):
            run.load()
        self._json(run.facts())

    def _run(self, body: dict[str, Any]) -> ServedRun:
        return self.server.runs[number_of(body, "side", most=len(self.server.runs) - 1) or 0]

    @contextlib.contextmanager
    def _turn(self, run: ServedRun) -> Iterator[None]:
        """Hold a run's model; whoever hangs up while waiting loses the turn."""
        while not run.lock.acquire(timeout=0.1):
            self._stay()
        try:
            self._stay()
            yield
        finally:
            run.lock.release()

    def _stay(self) -> None:
        """Go on only while the client is there and the server is not to stop."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if self.server.stopping.is_set() or (poll.poll(0) and self.connection.recv(1, socket.MSG_PEEK) == b""):
            raise GoneError

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, "application/json; charset=utf-8", json.dumps(value, allow_nan=False).encode())

    def _line(self, value: Any) -> None:
        self._write(json.dumps(value, allow_nan=False).encode() + b"\n")

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self._start(status, kind, len(content))
        if self.command != "HEAD":
            self._write(content)

    def _write(self, content: bytes) -> None:
        """Send a piece; a client that lets all pieces wait for longer than an answer may is left."""
        begin = time.monotonic()
        self.connection.settimeout(max(0.01, self.left))
        self.wfile.write(content)
        self.left -= time.monotonic() - begin

    def _start(self, status: int, kind: str, length: int | None = None) -> None:
        self.begun = True
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS}.items():
            self.send_header(name, value)
        if self.by_address:
            self.send_header("Set-Cookie", f"{self._cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
