"""`stepformer serve`: its answers over HTTP and its command; test_serve_page.py opens the page."""

from __future__ import annotations

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

from served import ask, connected, post, serving, value
from stepformer.base.errors import InputError, StepformerError
from stepformer.base.files import write_json
from stepformer.cli import main
from stepformer.cli.runs import prompt_ids, readable
from stepformer.decoding.sampling import Generation, stream
from stepformer.pages.serving import PageServer, ServedRun
from stepformer.pages.serving import inspect as inspected
from stepformer.pages.serving.runs import MOST_TOKENS, place
from stepformer.rules import templates

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


def test_of_a_prompt_that_is_too_long_the_end_is_read(server: PageServer, recwarn: pytest.WarningsRecorder) -> None:
    """As in `stepformer generate`; bad settings are answered with a status all the same."""
    long, body = "One " * 30, {"tokens": 3, "seed": 5}
    status, events = ask(server, "/api/generate", {"prompt": long, **body})
    assert status == 200
    note = "The prompt has 121 tokens, but the model's context is 64: its last 64 are read."
    assert [event.get("note") for event in events] == [note, None, None, None]
    assert not recwarn.list
    run = server.runs[0].run
    assert run is not None
    end = run.model.generate(
        [prompt_ids(run, long)[-64:]], max_new_tokens=3, temperature=0.8, seed=5, stop=256, on_context_end="slide"
    )
    assert [event["token"]["id"] for event in events[:-1]] == end.tokens[0]
    assert "note" not in ask(server, "/api/generate", {"prompt": "x" * 63, **body})[1][0]
    assert ask(server, "/api/generate", {"prompt": long, "top_p": 0, **body})[0] == 400


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


def test_a_stop_lets_answers_end_and_does_not_wait_for_those_who_ask_nothing(folder: Path) -> None:
    """Browsers open connections before they need them: a thread that reads nothing must not look like a busy one."""
    run = ServedRun(folder / "yurii")
    found = PageServer([run])
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    with socket.create_connection(("127.0.0.1", found.server_port)):
        while not found.answering:
            time.sleep(0.01)
        slow = threading.Thread(target=time.sleep, args=(0.3,))
        found.answering[slow] = socket.socket()
        slow.start()
        found.shutdown()
        begun = time.monotonic()
        assert found.stop(patience=20)
        assert 0.2 < time.monotonic() - begun < 15
    thread.join()


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
