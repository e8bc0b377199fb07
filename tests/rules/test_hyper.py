"""Hyper-connections and their constrained form: identities, starts, counts, roles. Equations: test_equations.py.

Identities hold in fp64 with norm_eps = 1e-30, to 1e-12: n equal streams are summed in another order than one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stepformer as sf
from helpers import copy_shared, shake, tiny, tokens
from stepformer.model.roles import Role
from stepformer.ops import connections
from stepformer.optim.build import Optimizers
from stepformer.optim.config import OptimConfig
from stepformer.rules.first_order import TripleMomentum
from stepformer.rules.hyper import HyperConnections
from stepformer.rules.state import State
from transcriptions import rivals

SMALL_VANILLA = 124_373_760
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "static": ("hyper", {}, 576),
    "dynamic": ("hyper", {"dynamic": True}, 111_216),
    "sinkhorn": ("mhc", {}, 1_770_120),
    "permutations": ("mhc", {"mixing": "permutations"}, 2_360_136),
}
SPLITTINGS = ("lie-trotter", "parallel")


def beside_vanilla(name: str, **changes: Any) -> tuple[sf.Model, sf.Model]:
    """A model as it starts and a shaken vanilla, with the same oracles, tables and norms."""
    size = {"n_layer": 3, "norm_eps": 1e-30, "splitting": changes.pop("splitting", "lie-trotter")}
    vanilla = shake(tiny("vanilla", **size))
    own = tiny(name, **size, **changes)
    copy_shared(vanilla, own)
    return own, vanilla


def assert_same_logits(own: sf.Model, vanilla: sf.Model, tolerance: float = 1e-12) -> None:
    found, expected = (model(tokens()).logits for model in (own, vanilla))
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("splitting", SPLITTINGS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_hyper_starts_as_vanilla(n: int, dynamic: bool, splitting: str) -> None:
    assert_same_logits(*beside_vanilla("hyper", n=n, dynamic=dynamic, splitting=splitting))


def test_one_stream_is_vanilla_at_any_eps() -> None:
    vanilla, own = shake(tiny("vanilla")), tiny("hyper", n=1)
    copy_shared(vanilla, own)
    assert_same_logits(own, vanilla)


def test_two_streams_hold_a_velocity() -> None:
    """x - v and v: every momentum rule without its LN_v is a choice of hyper's numbers, here triple momentum."""
    rng, x = torch.Generator().manual_seed(5), torch.randn(2, 3, 4, dtype=torch.float64)
    velocity, streams = TripleMomentum(1, 4), HyperConnections(1, 4, n=2)
    s, h = State(x, {"v": 0.1 * x}), State(0.9 * x, {"h1": 0.1 * x})
    for _ in range(6):
        mu, beta, gamma, nu = torch.rand(4, dtype=torch.float64, generator=rng)
        W = torch.randn(4, 4, dtype=torch.float64, generator=rng)
        c = SimpleNamespace(mu=mu, beta=beta, gamma=gamma, nu=nu)
        s = velocity.drift(velocity.kick(s, c, torch.tanh(velocity.query(s, c) @ W)), c)
        more = nu - 1
        c = SimpleNamespace(A_m=(1, 1 + mu), A_r=(1, 0, 1 + more * beta, beta), B=(more * gamma, gamma))
        h = streams.drift(streams.kick(h, c, torch.tanh(streams.query(h, c) @ W)), c)
        assert (streams.read_out(h, c) - s.x).abs().max() <= 1e-14 * s.x.abs().max()


@pytest.mark.parametrize("splitting", SPLITTINGS)
@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_mhc_with_zero_maps_is_vanilla(n: int, mixing: str, splitting: str) -> None:
    """post = 2 sigmoid(0) = 1, and the rows of R sum to 1: n equal streams stay equal, whatever b1 and b3 are."""
    own, vanilla = beside_vanilla("mhc", n=n, mixing=mixing, splitting=splitting)
    with torch.no_grad():
        for name, p in own.named_parameters():
            if ".b1" in name or ".b3" in name:
                p.normal_(generator=torch.Generator().manual_seed(len(name)))
            elif ".b2" in name:
                p.zero_()
    assert_same_logits(own, vanilla)


@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_mixing_is_doubly_stochastic(n: int, mixing: str) -> None:
    """Exactly with permutations; after Sinkhorn's last step rows are, and columns nearly (2e-4 measured)."""
    count = n * n if mixing == "sinkhorn" else len(rivals.permutations(n))
    logits = torch.randn(50, count, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    R = connections.doubly_stochastic(logits, n, mixing)
    assert (R >= 0).all()
    assert (R.sum(-1) - 1).abs().max() <= 1e-14
    assert (R.sum(-2) - 1).abs().max() <= (1e-3 if mixing == "sinkhorn" else 1e-14)


def test_two_streams_have_one_mixing() -> None:
    """n = 2: c P_1 + (1 - c) P_2 is any doubly stochastic matrix, so both mixings reach the same ones."""
    a = torch.linspace(-2, 2, 9, dtype=torch.float64)
    diagonal = torch.stack([a, 0 * a, 0 * a, a], dim=-1)
    found = connections.doubly_stochastic(diagonal, 2, "sinkhorn")
    expected = connections.doubly_stochastic(torch.stack([a, 0 * a], dim=-1), 2, "permutations")
    assert (found - expected).abs().max() <= 1e-14


def test_large_logits_stay_finite() -> None:
    logits = torch.full((1, 16), -900.0, dtype=torch.float64, requires_grad=True)
    R = connections.doubly_stochastic(logits + 800 * torch.eye(4, dtype=torch.float64).flatten(), 4, "sinkhorn")
    R.square().sum().backward()
    assert R.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (R - torch.eye(4)).abs().max() <= 1e-12


@pytest.mark.parametrize("case", CASES)
def test_parameters_beside_vanilla(case: str) -> None:
    name, changes, extra = CASES[case]
    model = sf.build(name, size="small", device="meta", **changes)
    assert model.num_parameters() == SMALL_VANILLA + extra
    counts = {
        "static": rivals.hyper_static_count(24, 4),
        "dynamic": rivals.hyper_dynamic_count(24, 4, 768),
        "sinkhorn": rivals.mhc_count(24, 4, 768),
        "permutations": rivals.mhc_count(24, 4, 768, "permutations"),
    }
    assert counts[case] == extra


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_starts(splitting: str) -> None:
    """Call l reads stream l mod n; gates, maps and matrices as the transcription starts them."""
    for name, changes in (("hyper", {"dynamic": True}), ("mhc", {}), ("mhc", {"mixing": "permutations"})):
        model = tiny(name, n=3, n_layer=4, splitting=splitting, **changes)
        turns = [("", "")] if splitting == "parallel" else [("_attn", "attn"), ("_mlp", "mlp")]
        index = 0
        for block in model.blocks:
            for end, _ in turns:
                own = {k.removesuffix(end): p for k, p in block.coefficients.named_parameters() if k.endswith(end)}
                if name == "hyper":
                    start = rivals.hyper_start(index, 3, 12)
                else:
                    start = rivals.mhc_start(index, 3, 12, changes.get("mixing", "sinkhorn"))
                    start["a"] = torch.stack([start.pop(f"a{i}") for i in (1, 2, 3)])
                for key, p in own.items():
                    assert torch.equal(p, start[key].flatten()), (name, index, key)
                assert not any(p.any() for p in block.arrays.parameters())
                index += 1


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "scion", "polargrad"])
def test_arrays_are_trained_as_tables_are(optimizer: str) -> None:
    """AdamW at the tables' rate and decay under every optimizer that has it, never an orthogonal step."""
    model = tiny("mhc", dtype=torch.float32)
    roles = model.roles()
    assert {roles[n] for n in roles if ".arrays." in n} == {Role.ARRAY}
    assert {roles[n] for n in roles if ".coefficients." in n} == {Role.COEFFICIENT}
    groups = {group["role"]: group for group in Optimizers(model, OptimConfig(name=optimizer), 10).groups()}
    array, tables = groups["array"], groups["embedding"]
    assert (array["lr"], array["weight_decay"]) == (tables["lr"], tables["weight_decay"])
    assert array.get("geometry") in (None, "sign")
    assert groups["coefficient"]["weight_decay"] == 0


def test_hybrid_inference_is_refused() -> None:
    with pytest.raises(sf.InputError, match="this model has template 'hyper'"):
        tiny("hyper").hybrid(cutoff=1)


def test_streams_in_bf16_stay_in_bf16() -> None:
    for name in ("hyper", "mhc"):
        model = shake(tiny(name, dtype=torch.float32), scale=0.1)
        model.stream_dtype = torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            call = model.call_of(tokens())
            s = model.start(tokens(), call.positions)
            after = model.blocks[0](s, call)
        assert {t.dtype for t in (s.x, after.x, *after.streams.values())} == {torch.bfloat16}
