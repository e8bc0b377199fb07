"""`stepformer diagnose hessian` on runs: protocols, what is kept, interrupted and continued."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import make_corpus, small_run
from stepformer.base.errors import ConfigError, InputError
from stepformer.measure import measured
from stepformer.measure.diagnostics import curvature
from stepformer.measure.diagnostics.common import fixed_windows
from stepformer.measure.diagnostics.curvature import (
    HessianOperator,
    plot,
    probe,
    text,
)
from stepformer.training import load_run, train
from stepformer.training.loading import LoadedRun, corpus_of

# runs

QUICK = {"windows": 6, "eigenvalues": 2, "iterations": 12, "probes": 5, "curve": 5, "precision": "fp64"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    folder = tmp_path_factory.mktemp("curvature")
    make_corpus(folder / "data")
    train(small_run(folder / "data"), folder / "run", quiet=True)
    return load_run(folder / "run", device="cpu")


@pytest.fixture(scope="module")
def result(run: LoadedRun) -> dict[str, Any]:
    return curvature.measure(run, curvature.SETTINGS(**QUICK, surface=3), quiet=True)


def test_a_run_is_measured(run: LoadedRun, result: dict[str, Any]) -> None:
    json.dumps(result, allow_nan=False)
    assert result["parameters"] == run.model.num_parameters()
    assert result["tokens"] == 6 * 16
    windows = fixed_windows(corpus_of(run).split("val"), 6, 16, 0)
    with torch.no_grad():
        expected = copy.deepcopy(run.model).double()(windows[:, :-1], windows[:, 1:]).loss
    assert expected is not None
    assert result["loss"] == pytest.approx(expected.item(), abs=1e-12)  # fp64: sums in another order
    assert result["check"]["repeat"] == 0.0
    assert len(result["eigenvalues"]) == 2
    assert abs(result["eigenvalues"][0]["value"]) >= abs(result["eigenvalues"][1]["value"])
    trace = result["trace"]
    samples = torch.tensor(trace["probes"], dtype=torch.float64)
    assert trace["mean"] == pytest.approx(float(samples.mean()))
    assert trace["std"] == pytest.approx(float(samples.std(correction=0)))
    assert trace["standard_error"] == pytest.approx(float(samples.std()) / 5**0.5)
    assert result["trace_per_parameter"] == pytest.approx(trace["mean"] / run.model.num_parameters())
    curve, surface = result["curve"], result["surface"]
    assert curve["alpha"] == [-0.5, -0.25, 0.0, 0.25, 0.5]
    assert curve["loss"][2] == surface["loss"][1][1] == result["loss"]
    assert curve["range"] == max(curve["loss"]) - min(curve["loss"])
    assert surface["loss"][0][1] == curve["loss"][0]  # the first direction of the surface is the curve's
    assert result["settings"]["context"] == 16


def test_windows_follow_the_seed_alone(run: LoadedRun, result: dict[str, Any]) -> None:
    nothing = {"eigenvalues": 0, "probes": 0, "curve": 0, "precision": "fp64", "windows": 6}
    same = curvature.measure(run, curvature.SETTINGS(**nothing), quiet=True)
    assert same["windows_hash"] == result["windows_hash"]
    assert same["loss"] == result["loss"]
    assert (same["eigenvalues"], same["trace"], same["trace_per_parameter"], same["curve"]) == ([], None, None, None)
    other = curvature.measure(run, curvature.SETTINGS(**nothing, seed=1), quiet=True)
    assert other["windows_hash"] != result["windows_hash"]


def test_interrupted_and_continued(run: LoadedRun, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the fourth probe: the same numbers afterwards, and nothing that was kept is computed again."""
    asked: list[int] = []

    def interrupted(operator: HessianOperator, number: int, seed: int = 0) -> float:
        asked.append(number)
        if number == 3 and asked.count(3) == 1:
            raise KeyboardInterrupt
        return probe(operator, number, seed)

    monkeypatch.setattr(curvature, "probe", interrupted)
    settings = curvature.SETTINGS(**QUICK, surface=3)
    weights = {name: p.clone() for name, p in run.model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        curvature.measure(run, settings, quiet=True)
    journal = run.folder.path / measured.FOLDER / "hessian.jsonl"
    assert journal.is_file()

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the eigenvalues were kept")

    monkeypatch.setitem(curvature.METHODS, "lanczos", refused)
    assert curvature.measure(run, settings, quiet=True) == result
    assert asked == [0, 1, 2, 3, 3, 4]
    assert not journal.exists()
    assert all(torch.equal(weights[name], p) for name, p in run.model.state_dict().items())


def test_protocols() -> None:
    ours, legacy = curvature.SETTINGS(), curvature.SETTINGS(protocol="legacy")
    assert ours.plan(1024).context == 1024
    assert ours.plan(128).context == 128
    assert ours.plan(1024).windows * ours.plan(1024).context == 8 * 4 * 1024
    plan = legacy.plan(1024)
    assert (plan.windows, plan.window_batch, plan.context) == (4, 2, 512)
    assert (plan.method, plan.eigenvalues, plan.iterations, plan.probes) == ("power", 1, 15, 10)
    assert (legacy.tolerance, legacy.normalise, legacy.curve, legacy.reach) == (1e-3, "tensor", 11, 0.5)
    assert legacy.plan(128).context == 128
    assert legacy.replace(probes=16).plan(128).probes == 16
    with pytest.raises(InputError, match="longer than the model's"):
        ours.replace(context=256).plan(128)


@pytest.mark.slow
def test_legacy_on_a_run(run: LoadedRun) -> None:
    found = curvature.measure(run, curvature.SETTINGS(protocol="legacy"), quiet=True)
    assert found["method"] == "power"
    assert 2 <= found["iterations"] <= 15
    assert len(found["trace"]["probes"]) == 10
    assert found["tokens"] == 4 * 16
    assert found["curve"]["normalise"] == "tensor"


@pytest.mark.parametrize("values", [{"curve": 10}, {"curve": 1}, {"surface": 4}, {"method": "arnoldi"}, {"reach": 0}])
def test_bad_settings(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        curvature.SETTINGS(**values)


def test_text_and_plot(result: dict[str, Any], tmp_path: Path) -> None:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=110).print(text(result))
    shown = out.getvalue()
    assert f"{result['eigenvalues'][0]['value']:.6g}" in shown
    assert f"{result['trace']['mean']:.6g}" in shown
    assert result["windows_hash"] in shown
    pytest.importorskip("matplotlib")
    plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    broken = {**result["curve"], "loss": [None, *result["curve"]["loss"][1:]], "range": None}
    Console(file=out, width=110).print(text({**result, "curve": broken}))
    assert "not finite" in out.getvalue()
    plot({**result, "curve": broken, "surface": None, "trace": None, "eigenvalues": []}, tmp_path / "plot.png")


@contextlib.contextmanager
def only_hessian(monkeypatch: pytest.MonkeyPatch) -> Iterator[argparse.ArgumentParser]:
    """A parser with the one diagnosis that is tested here."""
    from stepformer.cli import diagnose

    monkeypatch.setattr(diagnose, "KINDS", {"hessian": diagnose.KINDS["hessian"]})
    parser = argparse.ArgumentParser()
    diagnose.add_diagnose(parser.add_subparsers(), argparse.ArgumentParser(add_help=False))
    yield parser


def test_the_command(run: LoadedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run.folder.path)
    words = [f"{key}={value}" for key, value in QUICK.items()]
    with only_hessian(monkeypatch) as parser:
        args = parser.parse_args(["diagnose", folder, *words, "--hessian", "--device", "cpu", "--json"])
        assert args.run(args) == 0
        printed = json.loads(capsys.readouterr().out)
        kept = measured.load(run.folder.path, "hessian")
        assert kept is not None
        assert kept["result"] == printed["hessian"]
        args = parser.parse_args(["diagnose", folder, *words, "--hessian", "--quiet", "--device", "cpu"])
        assert args.run(args) == 0
        assert "tr(H) / N" in capsys.readouterr().out
        args = parser.parse_args(["diagnose", folder, "probe=3", "--hessian"])
        with pytest.raises(ConfigError, match="Did you mean 'probes'"):
            args.run(args)
