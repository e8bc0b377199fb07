"""`stepformer serve`: what it computes, its HTTP and its defences; test_serve_page.py opens the page."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draws import seeded
from helpers import shake, tiny, tokens
from served import ask, make_runs, metric, serving, serving_two, value
from stepformer.base.errors import InputError, StepformerError
from stepformer.base.files import write_json
from stepformer.cli import main
from stepformer.cli.runs import prompt_ids, readable
from stepformer.data.tokenizers import ByteTokenizer
from stepformer.decoding.sampling import Generation, stream
from stepformer.pages.serving import PageServer, ServedRun
from stepformer.pages.serving import inspect as inspected
from stepformer.pages.serving import server as serving_module
from stepformer.pages.serving.runs import MOST_TOKENS, document, place
from stepformer.pages.serving.server import LARGEST_BODY
from stepformer.pages.serving.watching import Point, Tail, pace, thinned
from stepformer.rules import templates
from stepformer.training.metrics import Metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    with serving_two(folder) as found:
        yield found


def connected(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def post(client: socket.socket, server: PageServer, body: Any) -> None:
    """Ask for text without waiting for it."""
    content = json.dumps(body).encode()
    head = "POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {server.token}\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)


# what the page shows


def test_predictions_are_the_softmax_of_the_logits() -> None:
    model = shake(tiny("yurii", vocab_size=16, real_vocab=11))
    ids = tokens(1, 8, seed=3)[0]
    found = inspected.read(model, ids.tolist())
    with torch.no_grad():
        logp = model(ids[None, :-1]).logits[0].log_softmax(-1)
    assert len(found.predictions) == 7
    for t, prediction in enumerate(found.predictions):
        # the same fp64 operations: equal but for the order of sums, 1e-12 is far above that
        assert prediction.logprob == pytest.approx(logp[t, ids[t + 1]].item(), abs=1e-12)
        naive = -sum(math.exp(v) * v for v in logp[t].tolist())
        assert prediction.entropy == pytest.approx(naive, abs=1e-12)
        order = sorted(range(11), key=lambda i: -logp[t, i].item())
        assert [token for token, _ in prediction.alternatives] == order[:5]
        assert [p for _, p in prediction.alternatives] == pytest.approx([math.exp(logp[t, i]) for i in order[:5]])
        assert prediction.rank == order.index(int(ids[t + 1])) + 1


def test_long_texts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = shake(tiny()), tokens(1, 8)[0].tolist()
    whole = inspected.read(model, ids)
    monkeypatch.setattr(inspected, "ROWS", 3)
    assert inspected.read(model, ids) == whole


def test_a_prediction_of_a_model_that_has_diverged_is_refused() -> None:
    model = tiny()
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    with pytest.raises(StepformerError, match="not finite"):
        inspected.read(model, [1, 2, 3])


def test_differences_and_summary_add_up() -> None:
    first, second = shake(tiny("yurii"), seed=1), shake(tiny("adam", n_layer=1), seed=2)
    ids = tokens(1, 8, seed=1)
    readings = [inspected.read(model, ids[0].tolist()) for model in (first, second)]
    losses = [model(ids[:, :-1], ids[:, 1:]).loss.item() for model in (first, second)]
    found = inspected.summary(readings, size=20)
    for side, loss in zip(found["sides"], losses, strict=True):
        assert side["nats_per_token"] == pytest.approx(loss, abs=1e-12)
        assert side["bits_per_byte"] == pytest.approx(7 * loss / 20 / math.log(2), abs=1e-12)
    apart = inspected.differences(*readings)
    assert math.fsum(apart) == pytest.approx(7 * (losses[1] - losses[0]), abs=1e-11)
    assert found["surer"] == [sum(d > 0 for d in apart), sum(d < 0 for d in apart)]
    assert sum(found["surer"]) + found["even"] == 7
    assert min(found["surer"]) > 0, "a case in which one is always better shows nothing"
    assert inspected.differences(*reversed(readings)) == [-d for d in apart]
    assert inspected.summary([readings[0], readings[0]], 20)["even"] == 7
    assert "surer" not in inspected.summary(readings[:1], 20)


def test_attention_entropy_is_the_mean_over_calls_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    calls = [torch.rand(1, 3, 4, generator=seeded(i)) for i in range(2)]
    monkeypatch.setattr(type(model), "observe", lambda self, tokens: [{"entropy": calls}, {"beta": calls}])
    by_layer = inspected.attention_entropy(model, torch.zeros(1, 4, dtype=torch.long))
    assert by_layer[1] is None
    naive = [sum(float(call[0, head, t]) for call in calls for head in range(3)) / 6 for t in range(4)]
    assert by_layer[0] == pytest.approx(naive)


def test_tokens_for_the_eye() -> None:
    tokenizer = ByteTokenizer()
    assert inspected.token_view(tokenizer, ord("a")) == {"id": 97, "text": "a"}
    assert inspected.token_view(tokenizer, 10) == {"id": 10, "text": "\n"}
    assert inspected.token_view(tokenizer, 0xE2) == {"id": 0xE2, "text": "\\xe2", "escaped": True}
    assert inspected.token_view(tokenizer, 0) == {"id": 0, "text": "\\x00", "escaped": True}
    assert inspected.token_view(tokenizer, tokenizer.eot)["special"] == "end of text"
    assert inspected.token_view(tokenizer, 300)["special"] == "token 300"


def test_pieces_of_a_trained_tokenizer(folder: Path) -> None:
    tokenizer = ServedRun(folder / "bpe").tokenizer
    text = "One morning \N{LEFT DOUBLE QUOTATION MARK}he\N{ZERO WIDTH SPACE} said"
    views = [inspected.token_view(tokenizer, token) for token in tokenizer.encode(text)]
    shown = "".join(view["text"] for view in views)
    assert shown == "One morning \\xe2\\x80\\x9che\\xe2\\x80\\x8b said"
    with pytest.raises(InputError, match="no token -1"):
        tokenizer.piece(-1)


def test_samples_are_documents_of_the_validation_split(folder: Path) -> None:
    run = ServedRun(folder / "yurii")
    run.load()
    found = {run.sample(number, 64) for number in range(12)}
    assert len(found) > 3
    split = run._validation
    assert split is not None
    everything = run.tokenizer.decode(split.tokens(0, len(split)).tolist())
    documents = everything.split("<|endoftext|>")
    for text in found:
        assert len(run.tokenizer.encode(text)) <= 64
        assert any(whole.startswith(text) for whole in documents)
    assert document(split, run.tokenizer, 0, 10**6) == documents[1]


# a run in training


def test_a_growing_file_is_read_once_and_half_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.update() == ([], [])
    path.write_text(metric(0, "eval") + metric(1) + metric(2)[:20])
    train_points, evals = tail.update()
    assert [p.step for p in train_points] == [1]
    assert evals == [Point(0, 4.0, 0.0, 256.0)]
    before = tail._read
    with path.open("a") as file:
        file.write(metric(2)[20:] + metric(3))
    assert [p.step for p in tail.update()[0]] == [1, 2, 3]
    assert tail._read == path.stat().st_size > before
    assert tail.damaged == 0


def test_a_resumed_run_drops_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(metric(step) for step in range(1, 9)))
    tail = Tail(path)
    assert len(tail.update()[0]) == 8
    metrics = Metrics(path, 5)  # what a resumed run does
    assert [p.step for p in tail.update()[0]] == [1, 2, 3, 4, 5]
    metrics.write(**json.loads(metric(6, loss=9.0)))
    metrics.close()
    assert tail.update()[0][-1] == Point(6, 9.0, 3.0, 256.0)
    path.write_text(metric(1))  # cut in place
    assert [p.step for p in tail.update()[0]] == [1]
    path.write_text("".join(metric(step, loss=1.0) for step in range(1, 30)))  # overwritten, and longer than before
    assert {p.loss for p in tail.update()[0]} == {1.0}
    path.unlink()
    assert tail.update() == ([], [])


def test_lines_that_are_no_metrics_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metric(1) + "{nonsense\n" + "[]\n" + metric(2, loss=math.nan) + "\xff\n" + metric(3) + metric(3))
    tail = Tail(path)
    assert [p.step for p in tail.update()[0]] == [1, 3]
    assert tail.damaged == 4


def test_pace_and_thinning() -> None:
    points = [Point(step, float(step), 2.0 * step, 100.0 + step) for step in range(1, 1001)]
    assert pace([]) is None
    assert pace(points[:1]) == (101.0, 2.0)
    slower = [*points, *(Point(1000 + k, 0.0, 2000.0 + 6.0 * k, 50.0) for k in range(1, 31))]
    assert pace(slower) == (50.0, 6.0)
    thin = thinned(points, 100)
    assert len(thin) == 100
    assert thin[0] == (5.5, 5.5)
    assert thinned(points[:3], 100) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_watch_of_finished_begun_and_failed_runs(folder: Path, tmp_path: Path) -> None:
    done = ServedRun(folder / "yurii").progress()
    assert (done["status"], done["step"], done["steps"], done["seconds_left"]) == ("finished", 12, 12, None)
    assert done["last_eval"]["step"] == 12
    lines = [json.loads(line) for line in (folder / "yurii" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["val_loss"] for line in lines if line["kind"] == "eval"}
    assert done["best_eval"]["loss"] == min(loss for step, loss in losses.items() if step)
    assert {c["name"] for c in done["checkpoints"]} == {p.name for p in (folder / "yurii" / "checkpoints").iterdir()}
    assert next(c["loss"] for c in done["checkpoints"] if c["step"] == 12) == losses[12]
    assert ServedRun(folder / "begun").progress()["status"] == "waiting"

    shutil.copytree(folder / "begun", tmp_path / "run")
    run = ServedRun(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(metric(step) for step in range(1, 5)))
    training = run.progress()
    assert (training["status"], training["seconds_left"]) == ("training", pytest.approx(8 * 0.5))
    (tmp_path / "run" / "failed.txt").write_text("Training stopped: the loss is not finite.\n")
    failed = run.progress()
    assert (failed["status"], failed["sentence"]) == ("failed", "Training stopped: the loss is not finite.")


# over HTTP


def test_generate_streams_what_generation_makes(server: PageServer) -> None:
    body = {"side": 1, "prompt": "One", "tokens": 12, "seed": 5, "temperature": 1.5, "top_k": 40, "top_p": 0.9}
    status, events = ask(server, "/api/generate", body)
    assert status == 200
    run = server.runs[1].run
    assert run is not None
    made = Generation([], [])
    settings = {"max_new_tokens": 12, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 5}
    for _ in stream(run.model, [prompt_ids(run, "One")], stop=256, on_context_end="slide", result=made, **settings):
        pass
    assert [event["token"]["id"] for event in events[:-1]] == made.tokens[0]
    assert events[-1] == {"end": made.finish[0], "text": readable(run, made.tokens[0])}
    # each token's probability is what reading the same text gives; fp64, cached against whole: 1e-9
    read = inspected.read(run.model, [*prompt_ids(run, "One"), *made.tokens[0]])
    for event, prediction in zip(events[:-1], read.predictions[3:], strict=True):
        side = event["token"]["side"]
        assert side["logprob"] == pytest.approx(prediction.logprob, abs=1e-9)
        assert side["rank"] == prediction.rank
        assert [other["id"] for other in side["alternatives"]] == [token for token, _ in prediction.alternatives]


def test_compare_answers_with_tokens_of_both(server: PageServer) -> None:
    found = value(ask(server, "/api/compare", {"text": "It was caf\N{LATIN SMALL LETTER E WITH ACUTE}."}))
    assert [t["text"] for t in found["tokens"]] == [*"It was caf", "\\xc3", "\\xa9", "."]
    assert found["summary"]["bytes"] == found["summary"]["tokens"] == 13
    assert found["steps"] == [run.run.step for run in server.runs if run.run]
    for token in found["tokens"]:
        first, second = token["sides"]
        assert token["difference"] == first["logprob"] - second["logprob"]
        assert first["probability"] == math.exp(first["logprob"])
        assert (len(first["attention"]), len(second["attention"])) == (2, 1)
    total = -math.fsum(token["sides"][0]["logprob"] for token in found["tokens"])
    assert found["summary"]["sides"][0]["nats_per_token"] == pytest.approx(total / 13)


def test_state_watch_and_sample(server: PageServer) -> None:
    state = value(ask(server, "/api/state"))
    assert [run["name"] for run in state["runs"]] == ["yurii", "vanilla"]
    assert [run["loaded"]["kind"] for run in state["runs"]] == ["best", "last"]
    assert state["apart"] == ""
    assert [run["name"] for run in value(ask(server, "/api/watch"))["runs"]] == ["yurii", "vanilla"]
    text = value(ask(server, "/api/sample", {"number": 3}))["text"]
    assert 0 < len(text.encode()) <= 48, "the smaller context of the two"
    assert value(ask(server, "/api/compare", {"text": text}))["summary"]["bytes"] == len(text.encode())


def test_one_run_may_be_served_twice_or_alone(folder: Path) -> None:
    both = [ServedRun(*place(f"{folder / 'yurii'}{at}", "best")) for at in ("@best", "@last")]
    with serving(*both) as found:
        assert [run["loaded"]["kind"] for run in value(ask(found, "/api/state"))["runs"]] == ["best", "last"]
        assert len(value(ask(found, "/api/watch"))["runs"]) == 1
    with serving(both[0].__class__(folder / "yurii")) as found:
        answer = value(ask(found, "/api/compare", {"text": "One"}))
        assert "difference" not in answer["tokens"][0]
        assert len(answer["tokens"][0]["sides"]) == 1


def test_hanging_up_stops_the_work(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = server.runs[0]
    made: list[int] = []
    original = run.generate

    def counted(prompt: str, **settings: Any) -> Iterator[Any]:
        for event in original(prompt, **settings):
            made.append(1)
            yield event

    monkeypatch.setattr(run, "generate", counted)
    with connected(server) as client:
        post(client, server, {"prompt": "One", "tokens": 4000, "temperature": 3.0, "top_k": 5, "seed": 1})
        received = b""
        while received.count(b'{"token"') < 3:
            received += client.recv(4096)
    assert run.lock.acquire(timeout=10), "the model is free again"
    run.lock.release()
    assert 3 <= len(made) < 2000, "4000 were asked for"


def test_waiting_requests_take_turns(server: PageServer) -> None:
    """Requests for one model at the same time: each is answered whole and right, none at the same moment."""
    run = server.runs[0]
    body = {"prompt": "The", "tokens": 30, "seed": 7}
    alone = ask(server, "/api/generate", body)
    answers: list[Any] = []
    with run.lock:
        threads = [
            threading.Thread(target=lambda: answers.append(ask(server, "/api/generate", body))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        assert value(ask(server, "/api/state"))["runs"], "other requests do not wait"
        time.sleep(0.3)
        assert not answers
    for thread in threads:
        thread.join(20)
    assert answers == [alone] * 4


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b"[]", 400, "JSON object"),
        ({"prompt": 3}, 400, "'prompt' should be text"),
        ({"prompt": "x" * 64}, 400, "The prompt has 65 tokens, but the model's context is 64."),
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


def test_files_of_the_page(server: PageServer) -> None:
    names = {"": "text/html", "page.css": "text/css", "icon.svg": "image/svg+xml"}
    page = Path(inspected.__file__).parent / "page"
    names |= {path.name: "text/javascript" for path in page.glob("*.js")}
    for name, kind in names.items():
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request("GET", f"/{name}", headers={"Authorization": f"Bearer {server.token}"})
        answer = connection.getresponse()
        assert (answer.status, answer.headers.get_content_type()) == (200, kind)
        assert answer.read() == (page / (name or "page.html")).read_bytes()
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert not re.search(r"https?:|unsafe|\*|data:", policy)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Access-Control-Allow-Origin"] is None
    written = "".join((page / (name or "page.html")).read_text() for name in names)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://(?!www\.w3\.org/)", written
    )
    assert not re.search(r"<script(?! type=\"module\" src)|\sstyle=|\son\w+=", (page / "page.html").read_text())


def test_a_stop_does_not_wait_for_a_long_call(folder: Path) -> None:
    run = ServedRun(folder / "yurii")
    found = PageServer([run])
    with run.lock:  # whoever waits for it here waits for ever
        assert not found.stop()
    assert PageServer([run], found.server_port).stop(), "the port is free again"


def test_only_this_machine_is_listened_to(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_runs_that_cannot_be_asked(folder: Path) -> None:
    with serving(ServedRun(folder / "begun")) as found:
        assert value(ask(found, "/api/state"))["runs"][0]["loaded"] is None
        for path, body in (("generate", {"prompt": ""}), ("compare", {"text": "a"}), ("sample", {}), ("load", {})):
            status, (answer,) = ask(found, f"/api/{path}", body)
            assert (status, "no checkpoint yet" in answer["error"]) == (400, True), path
        assert value(ask(found, "/api/watch"))["runs"][0]["sentence"] == "The run has no metrics yet."
    with serving(ServedRun(folder / "yurii"), ServedRun(folder / "bpe")) as found:
        assert "trained with the tokenizer bytes" in value(ask(found, "/api/state"))["apart"]
        status, (answer,) = ask(found, "/api/compare", {"text": "a"})
        assert (status, "cannot be compared" in answer["error"]) == (400, True)
        assert ask(found, "/api/generate", {"side": 1, "tokens": 2})[0] == 200


def test_a_run_with_rules_of_its_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config can only be read once the plug-in has been."""
    shutil.copytree(folder / "begun", tmp_path / "run")
    record = tmp_path / "run" / "run.json"
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "import stepformer as sf\n"
        "from stepformer.rules.first_order import Nesterov\n"
        "sf.register_template('served-own', equation='as Nesterov')(type('Own', (Nesterov,), {}))\n"
    )
    values = json.loads(record.read_text())
    values["config"]["model"]["template"] = "served-own"
    write_json(record, {**values, "plugins": [str(plugin)]})
    for table in ("_entries", "_aliases"):  # the name must not stay for other tests
        monkeypatch.setattr(templates, table, dict(getattr(templates, table)))
    with pytest.raises(InputError, match=r"needs code of its own, '.*own.py' .* which you have not trusted"):
        ServedRun(tmp_path / "run")
    assert main(["trust", str(tmp_path / "run")]) == 0
    assert ServedRun(tmp_path / "run").config.model.template == "served-own"


def test_newer_checkpoints_are_offered_and_taken(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "begun", tmp_path / "run")
    kept, mine = folder / "yurii" / "checkpoints", tmp_path / "run" / "checkpoints"
    first, last = sorted(path.name for path in kept.glob("step-*"))[-2:]
    with serving(ServedRun(tmp_path / "run")) as found:
        shutil.copytree(kept / first, mine / first)
        expected = {"kind": "last", "step": int(first[5:])}  # of a run without a best one
        assert value(ask(found, "/api/state"))["runs"][0]["newer"] == expected
        loaded = value(ask(found, "/api/load", {"side": 0}))
        assert (loaded["loaded"], loaded["newer"]) == (expected, None)
        shutil.copytree(kept / last, mine / last)
        assert value(ask(found, "/api/state"))["runs"][0]["newer"]["step"] == int(last[5:])
        (mine / last / "model.safetensors").write_bytes(b"no weights")
        shutil.rmtree(mine / first)
        status, (answer,) = ask(found, "/api/load", {"side": 0})
        assert (status, "damaged" in answer["error"]) == (400, True)
        assert ask(found, "/api/generate", {"tokens": 2})[0] == 200, "the weights from before are still there"


# the command


def test_bad_input_of_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yurii = str(folder / "yurii")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, sentence in (
            ([str(folder / "nowhere")], "There is no run folder"),
            ([str(folder / "data")], "is not a run: it has no run.json"),
            ([f"{yurii}@first"], "RUN@best or RUN@last"),
            ([yurii, yurii, yurii], "one run or two, not 3"),
            ([yurii, "--port", str(port)], f"Port {port} is taken: choose another with --port"),
            ([yurii, "--port", "70000"], "--port 70000 should lie between"),
        ):
            assert main(["serve", *words, "--no-browser"]) == 2, words
            err = capsys.readouterr().err
            assert sentence in err
            assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "chosen", "token"),
    [([], None, None), ([], "", None), ([], "0123456789abcdef", "0123456789abcdef"), (["--no-token"], "0123", "")],
)
def test_the_command_asks_for_a_token_unless_told_not_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], chosen: str | None, token: str | None
) -> None:
    given: list[Any] = []

    def server(runs: Any, port: int, token: str | None) -> None:
        given.append(token)
        raise StepformerError("Enough.")

    monkeypatch.setattr("stepformer.pages.serving.PageServer", server)
    monkeypatch.delenv("STEPFORMER_SERVE_TOKEN", raising=False)
    if chosen is not None:
        monkeypatch.setenv("STEPFORMER_SERVE_TOKEN", chosen)
    assert main(["serve", str(folder / "begun"), "--no-browser", *words]) == 2
    assert given == [token]


def test_a_folder_may_have_an_at_sign(tmp_path: Path) -> None:
    (tmp_path / "run@last").mkdir()
    assert place(str(tmp_path / "run@last"), "best") == (tmp_path / "run@last", "best")
    assert place("run@last", "best") == (Path("run"), "last")


def test_ctrl_c_ends_the_command_at_once(folder: Path) -> None:
    """Also while text is being made."""
    words = [str(folder / name) for name in ("yurii", "bpe", "begun")]
    command = [
        sys.executable,
        "-m",
        "stepformer",
        "serve",
        *words[:2],
        "--no-browser",
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0].startswith(f"{words[0]}: yurii, best weights, step ")
        found = re.match(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{32}) ", lines[2])
        assert found, lines
        body = json.dumps({"tokens": MOST_TOKENS, "temperature": 0}).encode()
        head = "POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {found[2]}\r\n"
        with socket.create_connection(("127.0.0.1", int(found[1])), timeout=20) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b" 200 " in client.recv(100)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            rest = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert b'"end"' not in rest  # the text was not made to its end first
        assert process.returncode == 0
        note, _, last = err.partition("\n")
        assert note.startswith("note: The two runs cannot be compared token by token")
        assert last.strip() == "stepformer: the page is closed"
