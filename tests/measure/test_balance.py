"""Balance of second moments: against loops over coordinates, against the bound of appendix E, for every preset."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import stepformer as sf
from architectures import covering_presets
from helpers import shake, tiny, tokens
from runs import make_corpus, small_run
from stepformer.cli import main
from stepformer.measure import measured
from stepformer.measure.diagnostics.balance import COLUMNS, balance, plot, statistics_of, text
from stepformer.training import train

EPS = 1e-8
TIGHT = 1e-11  # fp64, one formula summed in two orders


def naive(s: list[float], p: list[float]) -> dict[str, float]:
    """Appendix E by loops: D = diag(1 / (sqrt(s_j) + eps)), c its smallest entry, delta from the balance assumption."""
    d = [1 / (math.sqrt(value) + EPS) for value in s]
    c = min(d)
    delta = ((math.sqrt(max(s)) + EPS) / (math.sqrt(min(s)) + EPS)) ** 2 - 1
    best = sum(d) / len(d)  # the c of least |D - c I|_F
    update = [a * b for a, b in zip(d, p, strict=True)]
    before, after = ([v - sum(side) / len(side) for v in side] for side in (p, update))
    dot = sum(a * b for a, b in zip(before, after, strict=True))
    lengths = [math.sqrt(sum(v * v for v in side)) for side in (before, after)]
    return {
        "ratio": 1 + delta,
        "distance": max(abs(value / c - 1) for value in d),
        "bound": delta / 2,
        "deviation": math.sqrt(sum((value - best) ** 2 for value in d) / sum(value * value for value in d)),
        "cosine": dot / (lengths[0] * lengths[1]),
    }


def near(found: dict[str, Any], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys() == COLUMNS.keys()
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=TIGHT, abs=TIGHT), name


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_statistics_are_those_of_the_loops() -> None:
    s, p = draw(7).square(), draw(2, 7)[1]
    near(statistics_of(s, p), naive(s.tolist(), p.tolist()))


def test_a_balanced_preconditioner_is_a_scalar_and_an_unbalanced_one_obeys_the_bound() -> None:
    even = statistics_of(torch.full((6,), 0.3, dtype=torch.float64), draw(6))
    assert [even[name].item() for name in ("distance", "deviation")] == pytest.approx([0, 0], abs=1e-7)
    assert even["cosine"].item() == pytest.approx(1)
    for delta in (0.01, 0.5, 8.0):
        s = torch.tensor([1.0, 1.0 + delta / 3, 1.0 + delta], dtype=torch.float64)
        found = statistics_of(s, draw(3))
        assert found["distance"].item() == pytest.approx(math.sqrt(1 + delta) - 1, rel=1e-6)
        assert found["distance"] <= found["bound"]
    # coordinates that are zero: eps decides, and nothing is infinite
    assert all(value.isfinite() for value in statistics_of(torch.tensor([0.0, 1.0]), torch.ones(2)).values())


def answers(model: sf.Model, ids: Tensor) -> dict[tuple[int, str], Tensor]:
    """What the oracles of every layer answer."""
    found: dict[tuple[int, str], Tensor] = {}
    handles = [
        getattr(block, oracle).register_forward_hook(
            lambda module, inputs, output, place=(layer, oracle): found.update({place: output.detach()})
        )
        for layer, block in enumerate(model.blocks)
        for oracle in ("attn", "mlp")
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", ["vanilla", "tmm", "adam"])
def test_oracles_of_a_model(name: str) -> None:
    """Moments over all tokens of all batches, cosines with these moments."""
    model, ids = shake(tiny(name)), tokens(4, 8)
    result = balance(model, ids.split(2))
    assert result["tokens"] == 32
    for (layer, oracle), g in answers(model, ids).items():
        rows = g.flatten(0, 1).tolist()
        s = [sum(row[j] ** 2 for row in rows) / len(rows) for j in range(len(rows[0]))]
        each = [naive(s, row) for row in rows]
        near(
            result["layers"][layer]["oracle"][oracle],
            {key: sum(row[key] for row in each) / len(each) for key in each[0]},
        )


@pytest.mark.parametrize("name", ["rmsprop", "adam", pytest.param("adamw", marks=pytest.mark.slow)])
def test_streams_of_rules_that_divide(name: str) -> None:
    """s' = beta2 s + (1 - beta2) g^2 token by token from s = 1, and m' = beta1 m + (1 - beta1) g for Adam."""
    model, ids = shake(tiny(name)), tokens(2, 8)
    result, found = balance(model, [ids]), answers(model, ids)
    s = torch.ones(2, 8, 12, dtype=torch.float64)
    m = None if name == "rmsprop" else model.start(ids, torch.arange(8)[None]).m.detach()
    for layer, c in enumerate(model.coefficients()):
        for turn in ("attn", "mlp"):
            g = found[layer, turn]
            s = c[f"beta2_{turn}"] * s + (1 - c[f"beta2_{turn}"]) * g * g
            if m is not None:
                m = c[f"beta1_{turn}"] * m + (1 - c[f"beta1_{turn}"]) * g
            pairs = zip(s.flatten(0, 1).tolist(), (g if m is None else m).flatten(0, 1).tolist(), strict=True)
            each = [naive(*pair) for pair in pairs]
            near(
                result["layers"][layer]["stream"][turn],
                {key: sum(row[key] for row in each) / len(each) for key in each[0]},
            )


@pytest.mark.parametrize("name", covering_presets())
def test_every_preset_has_a_balance_and_stays_as_it_is(name: str) -> None:
    model, ids = shake(tiny(name)), tokens()
    with torch.no_grad():
        before = model(ids).logits
        result = balance(model, [ids])
        assert torch.equal(model(ids).logits, before)
    assert any(layer["oracle"] for layer in result["layers"])
    assert bool(result["summary"]["stream"]) == ("s" in model.blocks[0].template.streams)
    for layer in result["layers"]:
        for found in (*layer["oracle"].values(), *layer["stream"].values()):
            assert all(math.isfinite(value) for value in found.values())
            assert found["distance"] <= found["bound"] + TIGHT


def test_plain_layers_of_a_hybrid_have_no_kicks() -> None:
    result = balance(shake(tiny("yurii")).hybrid(layers={1}), [tokens()])
    assert [sorted(layer["oracle"]) for layer in result["layers"]] == [[], ["attn", "mlp"]]


def test_the_command_prints_draws_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    make_corpus(tmp_path / "tales")
    train(small_run(tmp_path / "tales", "adam"), tmp_path / "run", quiet=True)
    assert main(["diagnose", str(tmp_path / "run"), "--balance", "windows=4", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "oracle: D from the mean square" in printed
    assert "stream: D of each token" in printed
    found = measured.load(tmp_path / "run", "balance")
    assert found is not None
    assert (tmp_path / "run" / "measured" / "balance.png").stat().st_size > 1000
    assert found["result"]["tokens"] == 64
    shutil.rmtree(tmp_path / "run" / "measured")
    console = Console(width=110)
    with console.capture() as shown:
        console.print(text(balance(shake(tiny("vanilla")), [tokens()]) | {"windows_hash": "abc"}))
    assert "stream:" not in shown.get()
    plot(found["result"], tmp_path / "again.png")
