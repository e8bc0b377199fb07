"""Runs to serve, a server of them, and requests to it, for the tests of `stepformer serve`."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs import make_corpus, small_run
from stepformer.pages.serving import PageServer, ServedRun
from stepformer.training import train


def make_runs(base: Path) -> Path:
    """Two finished runs on one tokenizer, one on another, and one that has only just begun."""
    data = make_corpus(base / "data").folder
    other = make_corpus(base / "other", tokenizer="bpe:300").folder
    train(small_run(data, "yurii", context=64), base / "yurii", quiet=True)
    train(small_run(data, "vanilla", context=48, n_layer=1), base / "vanilla", quiet=True)
    train(small_run(other, "vanilla", steps=2, eval_every=1), base / "bpe", quiet=True)
    shutil.copytree(base / "yurii", base / "begun")
    shutil.rmtree(base / "begun" / "checkpoints")
    for name in ("result.json", "metrics.jsonl"):
        (base / "begun" / name).unlink()
    return base


@contextlib.contextmanager
def serving(*runs: ServedRun, token: str | None = None) -> Iterator[PageServer]:
    """A server of these runs in a thread, with all weights that there are."""
    for run in runs:
        if run.newest():
            run.load()
    server = PageServer(list(runs), token=token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        assert server.stop(patience=20), "a request is still being answered"
        thread.join()


@contextlib.contextmanager
def serving_two(folder: Path) -> Iterator[PageServer]:
    """Two architectures with different contexts, the best weights of one and the last of the other."""
    runs = [ServedRun(folder / "yurii", device="cpu"), ServedRun(folder / "vanilla", "last", device="cpu")]
    with serving(*runs) as found:
        yield found


def ask(server: PageServer, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of a GET, or of a POST when there is a body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {server.token}"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        if body is None:
            connection.request("GET", path, headers=sent)
        else:
            connection.request("POST", path, content, sent)
        answer = connection.getresponse()
        return answer.status, [json.loads(line) for line in answer.read().splitlines()]
    finally:
        connection.close()


def connected(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def post(client: socket.socket, server: PageServer, body: Any) -> None:
    """Ask for text without waiting for it."""
    content = json.dumps(body).encode()
    head = "POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {server.token}\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)


def value(answer: tuple[int, list[Any]]) -> Any:
    status, lines = answer
    assert status == 200, lines
    return lines[0]


def metric(step: int, kind: str = "train", **more: Any) -> str:
    values = {"loss": 5.0 - step / 100} if kind == "train" else {"val_loss": 4.0 - step / 100}
    line = {"kind": kind, "step": step, "seconds": 0.5 * step, "tokens_per_second": 256.0, **values, **more}
    return json.dumps(line) + "\n"
