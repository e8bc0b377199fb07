"""Hamiltonian and linear attention: fields, forms, integrators, memory."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import stepformer as sf
from draws import seeded
from helpers import INTEGRATORS, copy_shared, in_documents, shake, tiny, tokens
from stepformer.measure.flows.integrators import number
from stepformer.ops.causal_sum import causal_sum
from stepformer.ops.phi import phi1, phi2
from stepformer.oracles.caches import Call, fresh_call
from stepformer.oracles.hamiltonian import HamiltonianAttention
from stepformer.oracles.linear import LinearHamiltonian
from stepformer.rules import State, Values

B, T, D = 2, 7, 6


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def attention(**options: Any) -> HamiltonianAttention:
    module = HamiltonianAttention(D, 2, bias=False, rotary=False, **options).double()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(0.5 * draw(*parameter.shape, seed=i))
    return module


def metric(module: HamiltonianAttention) -> Tensor:
    root = module.root.weight
    return root @ root.mT + 1e-6 * torch.eye(D, dtype=torch.float64)


@pytest.mark.parametrize("force", ["row", "query"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_closed_form_equals_the_double_sum(symmetric: bool, force: str) -> None:
    """F and G of section 9 against the sums that define them; 1e-12 relative, fp64 sums of seven terms."""
    module = attention(symmetric=symmetric, force=force, kappa=0.7, score_bound=0.0)
    u, y = draw(1, T, D, seed=8), draw(1, T, D, seed=9)
    field = module.fields(u, y, fresh_call(torch.zeros(1, T, dtype=torch.long)))
    wq, wk = module.query.weight, module.query.weight if module.key is None else module.key.weight
    a_matrix, b = module.tau * wq.mT @ wk, metric(module)
    velocity, forces = torch.zeros(T, D, dtype=torch.float64), torch.zeros(T, D, dtype=torch.float64)
    e = torch.exp(u[0] @ a_matrix @ u[0].mT)
    z = torch.stack([e[i, : i + 1].mean() for i in range(T)])
    a = torch.stack([y[0, i] @ b @ y[0, i] / D for i in range(T)])
    for i in range(T):
        velocity[i] = b @ y[0, i] / z[i]
        for j in range(i + 1):
            kinetic = a[i] / z[i] ** 2 + (a[j] / z[j] ** 2 if force == "row" else 0.0)
            potential = 0.7 if force == "row" else 0.35
            forces[i] += e[i, j] / (i + 1) * (0.5 * kinetic + potential) * (a_matrix @ u[0, j])
    assert (field.velocity(y)[0] - velocity).abs().max() <= 1e-12 * velocity.abs().max()
    assert (field.force()[0] - forces).abs().max() <= 1e-12 * forces.abs().max()


def test_without_a_mask_it_is_the_gradient_of_the_energy() -> None:
    """Symmetric A, no bound: G = -dH/du, F = d dH/dy by central differences.

    h = 1e-6 in fp64: 1e-8 of the largest slope, and rounding of the energy's terms, some of which may be large, over h.
    """
    module = attention(symmetric=True, kappa=0.7, score_bound=0.0, n0=T)
    a_matrix, b = module.tau * module.query.weight.mT @ module.query.weight, metric(module)
    u, y = draw(1, T, D, seed=8), draw(1, T, D, seed=9)
    everyone = Call(torch.arange(T), shown=torch.ones(1, 1, T, T, dtype=torch.bool), end=T)

    terms: list[Tensor] = []

    def energy(u: Tensor, y: Tensor) -> Tensor:
        e = torch.exp(u[0] @ a_matrix @ u[0].mT)
        a = ((y[0] @ b) * y[0]).sum(dim=-1) / D
        terms.append(0.5 * (a / e.mean(dim=1)).abs().sum() + 0.7 / (2 * T) * e.sum())
        return 0.5 * (a / e.mean(dim=1)).sum() - 0.7 / (2 * T) * e.sum()

    def slope(which: int) -> Tensor:
        out, step = torch.zeros(T, D, dtype=torch.float64), 1e-6
        for i in range(T):
            for k in range(D):
                bump = torch.zeros_like(u)
                bump[0, i, k] = step
                ends = [energy(*((u + s * bump, y) if which == 0 else (u, y + s * bump))) for s in (1, -1)]
                out[i, k] = (ends[0] - ends[1]) / (2 * step)
        return out

    with torch.no_grad():
        field = module.fields(u, y, everyone)
        du, dy = slope(0), slope(1)
        rounding = 20 * torch.finfo(torch.float64).eps * max(terms) / 1e-6
        assert (field.force()[0] + du).abs().max() <= 1e-8 * du.abs().max() + rounding
        assert (field.velocity(y)[0] - D * dy).abs().max() <= 1e-8 * (D * dy).abs().max() + D * rounding


def test_gradients_flow_through_the_normaliser() -> None:
    """F = B y / z depends on queries and keys through z alone: gradcheck of F, and it is not zero."""
    module = attention(score_bound=0.0)
    y = draw(1, T, D, seed=9)
    call = fresh_call(torch.zeros(1, T, dtype=torch.long))
    u = draw(1, T, D, seed=8).requires_grad_()
    assert torch.autograd.gradcheck(lambda u: module.fields(u, y, call).velocity(y), u)
    assert torch.autograd.gradcheck(lambda u: module.fields(u, y, call).force(), u)
    (grad,) = torch.autograd.grad(module.fields(u, y, call).velocity(y).sum(), module.query.weight)
    assert grad.abs().max() > 1e-3


def test_particles_are_equation_34() -> None:
    """F and G of (34), M lower triangular, in the paper's matrices; fp64 sums of seven terms: 1e-12 relative."""
    n = 9  # N, which need not be the length
    module = attention(system="particles", n0=n, score_bound=0.0, symmetric=True)
    u, y = draw(1, T, D, seed=8), draw(1, T, D, seed=9)
    field = module.fields(u, y, fresh_call(torch.zeros(1, T, dtype=torch.long)))
    big_a, big_b = module.tau * module.query.weight.mT @ module.query.weight, metric(module)
    x, y0 = u[0], y[0]
    m = torch.exp(x @ big_a @ x.mT).tril()
    ones = torch.ones(T, dtype=torch.float64)
    r = torch.diag((y0 * (y0 @ big_b.mT)).sum(dim=1) / (m @ ones) ** 2)
    velocity = n * torch.diag(1 / (m @ ones)) @ y0 @ big_b.mT
    force = n / 2 * (r @ m + m @ r + 2 * m) @ x @ big_a
    assert (field.velocity(y)[0] - velocity).abs().max() <= 1e-12 * velocity.abs().max()
    assert (field.force()[0] - force).abs().max() <= 1e-12 * force.abs().max()


class Given:
    """Fields that are what they are, wherever they are asked."""

    def __init__(self, velocity: Tensor, force: Tensor) -> None:
        self.given = velocity, force

    def velocity(self, y: Tensor) -> Tensor:
        return self.given[0]

    def force(self) -> Tensor:
        return self.given[1]


@pytest.mark.parametrize("t0", [1.0, 2.5])
def test_etd_ab2_of_the_presets_is_ab2_on_the_transformed_system(t0: float) -> None:
    """(17) applied to (12): with P = e^eta y and one step size, (x, P)' = (F, e^eta G); fp64, five steps: 1e-13."""
    steps, c_log, c_lin = [0.3, 0.1, 0.4, 0.2, 0.3], 2.0, 0.5
    for preset in ("symp-etd-ab2", "linear-symp-etd-ab2"):
        config = sf.model_config(preset, t0=t0)
        rule = config.component("template")(1, D, **config.options_of("template"))
        x, y = draw(T, D, seed=1), draw(T, D, seed=2)
        starts = {name: stream.start for name, stream in rule.streams.items()}
        streams = {k: number(v) if isinstance(v, float) else 0 * x for k, v in starts.items()}
        s = State(x, {**streams, "y": y})

        def eta(t: float) -> float:
            return c_log * math.log(t / t0) + c_lin * (t - t0)

        t, p, before = t0, y, None
        for k, h in enumerate(steps):
            f, g = draw(T, D, seed=10 + k), draw(T, D, seed=20 + k)
            numbers = {"h_x": h, "h_y": h, "c_log": c_log, "c_lin": c_lin}
            c = Values({name: number(value) for name, value in numbers.items()})
            s = rule.advance(s, c, Given(f, g))
            now = (f, math.exp(eta(t)) * g)
            if before is None:
                x, p = x + h * now[0], p + h * now[1]
            else:
                last, past = before
                one, two = (2 * last + h) / (2 * last), h / (2 * last)
                x, p = x + h * (one * now[0] - two * past[0]), p + h * (one * now[1] - two * past[1])
            t, before = t + h, (h, now)
            assert (s.x - x).abs().max() <= 1e-13
            assert (s.y - math.exp(-eta(t)) * p).abs().max() <= 1e-13


@pytest.mark.parametrize("name", ["symp-plain-euler", "linear-symp-plain-euler"])
def test_memory_of_nesterov_counts_layers_from_one(name: str) -> None:
    """0, 1/4, 2/5, 1/2: the learned memory with these values gives the same logits; fp64 rounding of a product."""
    fixed, learned = (shake(tiny(name, n_layer=4, memory=memory)) for memory in ("nesterov", "learned"))
    assert fixed.num_parameters() == learned.num_parameters() - 4
    copy_shared(fixed, learned)
    for layer, alpha in enumerate((0.0, 0.25, 0.4, 0.5)):
        learned.pin_coefficients(layer, alpha=alpha)
    found, expected = fixed(tokens()).logits, learned(tokens()).logits
    assert (found - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_the_clock_starts_where_it_is_told() -> None:
    """Friction c_log / t falls with t0, and c_lin alone does not know the time."""
    ids = tokens()
    for damping, same in (("log", False), ("linear", True)):
        one, other = (shake(tiny("symp-exp-euler", damping=damping, t0=t0)) for t0 in (1.0, 4.0))
        assert torch.equal(one(ids).logits, other(ids).logits) == same
    model = tiny("symp-presymp-euler", t0=4.0)
    s = model.start(tokens(), torch.arange(8))
    values = model.blocks[0].coefficients.values()["attn"]
    assert model.blocks[0].template.friction(s, values).item() == pytest.approx(3 / 4 + 1e-4, rel=1e-9)


def test_one_head_per_head_is_the_single_kernel() -> None:
    single, per_head = (shake(tiny("symp-exp-euler", n_head=1, kernel=kernel)) for kernel in ("single", "per-head"))
    assert torch.equal(single(tokens()).logits, per_head(tokens()).logits)


@pytest.mark.parametrize(("name", "power"), [("phi1", 1), ("phi2", 2)])
def test_phi_functions(name: str, power: int) -> None:
    """Against 60-digit arithmetic, values and derivatives, also at and around 0; fp32 input loses nothing."""
    getcontext().prec = 60
    function = {"phi1": phi1, "phi2": phi2}[name]

    def series(s: float, derivative: bool) -> float:
        powers = [Decimal(1)]
        for _ in range(120):
            powers.append(powers[-1] * -Decimal(s))
        terms = [-k * powers[k - 1] for k in range(1, 120)] if derivative else powers
        return float(sum(t / math.factorial(k + power) for k, t in enumerate(terms, start=int(derivative))))

    points = [0.0, 1e-12, 1e-8, 1e-4, 1e-3, 0.05, 0.0999, 0.1001, 0.5, 2.0, 12.0]
    s = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    value = function(s)
    (slope,) = torch.autograd.grad(value.sum(), s)
    for i, point in enumerate(points):
        assert value[i].item() == pytest.approx(series(point, False), rel=1e-13)
        assert slope[i].item() == pytest.approx(series(point, True), rel=1e-11)
    assert slope[0].item() == pytest.approx(-1 / math.factorial(power + 1), rel=1e-14)
    narrow = torch.tensor([1e-4], dtype=torch.float32)
    assert function(narrow).item() == pytest.approx(series(narrow.item(), False), rel=1e-7)


def naive_gather(q: Tensor, k: Tensor, v: Tensor, origins: Tensor | None) -> Tensor:
    out = torch.zeros(B, T, v.shape[-1], dtype=q.dtype)
    for b in range(B):
        for i in range(T):
            for j in range(0 if origins is None else int(origins[b, i]), i + 1):
                out[b, i] = out[b, i] + (q[b, i] @ k[b, j]) * v[b, j]
    return out


@pytest.mark.parametrize("documents", [False, True])
def test_recurrence_chunks_and_dense_agree(documents: bool) -> None:
    """Values, states and gradients; fp64 sums of seven terms in different order: 1e-12."""
    ids = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 1]])
    call = in_documents(ids) if documents else fresh_call(ids)
    q, k, v = (draw(B, T, D, seed=i).requires_grad_() for i in range(3))
    weight = draw(B, T, D, seed=3)
    expected = naive_gather(q, k, v, call.origins)
    gradients = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for chunk in (0, 1, 2, 3, 7, 20):
        out, state = causal_sum(q, k, v, None, chunk, call.positions, call.origins)
        assert (out - expected).abs().max() <= 1e-12
        for a, b in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), gradients, strict=True):
            assert (a - b).abs().max() <= 1e-12
        begin = [int(call.origins[b, -1]) if call.origins is not None else 0 for b in range(B)]
        for b in range(B):
            kept = k[b, begin[b] :].mT @ v[b, begin[b] :]
            assert (state[b] - kept).abs().max() <= 1e-12


@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("name", ["linear", "linear-yurii", "linear-symp-conformal-euler", "linear-symp-etd-ab2"])
def test_chunks_give_the_same_model(name: str, chunk: int) -> None:
    whole, pieces = (shake(tiny(name, chunk=c)) for c in (0, chunk))
    assert (whole(tokens()).logits - pieces(tokens()).logits).abs().max() <= 1e-12


class LargestScores(TorchDispatchMode):
    """Counts tensors whose last two dimensions are at least `size` x `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.ndim >= 2 and min(t.shape[-2:]) >= self.size:
                self.found += 1
        return out


QUADRATIC = ["symp-etd-ab2", "entropy", "entropy-token", "kl"]


@pytest.mark.parametrize("name", QUADRATIC)
def test_queries_in_chunks_need_no_square(name: str) -> None:
    """The same loss and gradients, and no tensor of T x T, T = 40 being larger than every width in the model."""
    geometry: dict[str, Any] = {"context": 40, "n_head": 2, "d_model": 8, "mlp_hidden": 8}
    whole, pieces = (shake(tiny(name, query_chunk=c, **geometry)) for c in (0, 16))
    ids, targets = tokens(2, 40), tokens(2, 40, seed=1)
    losses = []
    counts = []
    for model in (whole, pieces):
        with LargestScores(40) as seen:
            loss = model(ids, targets).loss
            assert loss is not None
            loss.backward()
        losses.append(loss)
        counts.append(seen.found)
    assert counts[0] > 0
    assert counts[1] == 0
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-13)
    for (n, a), b in zip(whole.named_parameters(), pieces.parameters(), strict=True):
        if a.grad is not None:
            assert b.grad is not None, n
            assert (a.grad - b.grad).abs().max() <= 1e-11, n


def test_decoding_memory_of_linear_attention_does_not_grow() -> None:
    def stored(name: str, capacity: int) -> int:
        cache = tiny(name, context=64).new_cache(2, capacity)
        return sum(t.numel() for layer in cache.slots for slot in layer for t in slot.tensors())

    for name in ("linear", "linear-yurii", "linear-symp-plain-euler"):
        assert stored(name, 8) == stored(name, 64) > 0
    assert stored("vanilla", 64) == 8 * stored("vanilla", 8)
    model = tiny("linear-symp-conformal-euler", context=64)
    cache = model.new_cache(2)
    sizes = [sum(t.numel() for layer in cache.slots for slot in layer for t in slot.tensors())]
    with torch.no_grad():
        for _ in range(20):
            model(tokens(2, 1), cache=cache)
            sizes.append(sum(t.numel() for layer in cache.slots for slot in layer for t in slot.tensors()))
    assert len(set(sizes)) == 1


def test_linear_fields_share_one_state() -> None:
    """After both fields the slot holds sum_j u_j y_j^T, whichever was asked last."""
    module = LinearHamiltonian(D, 2, bias=False, rotary=False).double()
    slot = module.new_slot(1, 8, torch.device("cpu"), torch.float64)
    u, y = draw(1, T, D, seed=8), draw(1, T, D, seed=9)
    call = fresh_call(torch.zeros(1, T, dtype=torch.long))
    call.slots = [slot]
    with torch.no_grad():
        field = module.fields(u, y, call)
        field.velocity(y)
        first = slot.state.clone()
        field.force()
    assert (first - u[0].mT @ y[0]).abs().max() <= 1e-12
    assert (slot.state - first).abs().max() <= 1e-12


@pytest.mark.parametrize("name", INTEGRATORS)
def test_dead_parameters_are_declared(name: str) -> None:
    """y_0 = 0: B has no effect in the first layer, unless x moves with the new momentum."""
    model = tiny(f"symp-{name}")
    dead = [] if name == "conformal-euler" else ["blocks.0.attn.root.weight"]
    assert model.unused_parameters() == dead
    assert tiny(f"symp-{name}", aux_init="embed").unused_parameters() == []


def test_the_momentum_that_nobody_reads() -> None:
    """With an MLP step of its own the last layer's y is never read: LN_Y, h_y, the friction and V are declared."""
    unused = tiny("linear-symp-exp-euler").unused_parameters()
    names = ["attn.value.weight", "aux_norms.attn.weight", *(f"coefficients.{k}" for k in ("c_lin", "c_log", "h_y"))]
    assert unused == [f"blocks.1.{name}" for name in names]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"force": "full"}, "reading-the-future.md"),
        ({"value_residual": "unit"}, "mixes values"),
        ({"value_tables": True}, "adds to values"),
        ({"kernel": "per-head", "metric": "derived"}, "low rank"),
        ({"learned_kappa": True, "kappa": 0.0}, "kappa > 0"),
        ({"system": "particles"}, "give it as n0"),
        ({"t0": 2.0}, "has no meaning here"),
        ({"kappa": 0.0, "mlp_step": "A"}, "does nothing"),
        ({"n_layer": 1, "mlp_step": "C"}, "single layer"),
        ({"bias": True}, "bias = false"),
        ({"qk_norm": True}, "has no meaning here"),
    ],
    ids=str,
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(sf.ConfigError) as caught:
        sf.model_config("symp-plain-euler", **settings)
    assert len(caught.value.problems) == 1
    assert sentence in caught.value.problems[0]


def test_linear_attention_has_nothing_to_rotate() -> None:
    for name in ("linear", "linear-symp-ab2"):
        with pytest.raises(sf.ConfigError, match="rotate"):
            sf.model_config(name, positions="rotary")


def test_bounds_are_reported() -> None:
    """Scores far beyond a tiny bound are counted; with the default bound and fresh weights none are."""
    ids = tokens()
    tight = shake(tiny("symp-plain-euler", score_bound=0.01)).observe(ids)
    assert all(layer["bounded_scores"][0] > 0.5 for layer in tight)
    fresh = tiny("symp-plain-euler").observe(ids)
    assert all(layer["bounded_scores"][0] == 0 for layer in fresh)
