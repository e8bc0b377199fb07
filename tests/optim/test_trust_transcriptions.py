"""The transcription of the architecture-aware step keeps what its equations promise, before anything is compared."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draws import seeded
from transcriptions import trust_layers
from transcriptions import trust_region as naive
from transcriptions.optimizers import polar_by_svd, scale_of

D, HEADS, HEAD_DIM, INNER, LENGTH = 8, 2, 4, 10, 12
ETA = 1e-3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def weights(seed: int = 0, gate: bool = False) -> dict[str, Any]:
    shapes = {"W_Q": (HEAD_DIM, D), "W_K": (HEAD_DIM, D), "W_V": (HEAD_DIM, D), "W_O": (D, HEAD_DIM)}
    result: dict[str, Any] = {
        name: [0.7 * normal(*shape, seed=seed + 10 * n + h) for h in range(HEADS)]
        for n, (name, shape) in enumerate(shapes.items())
    }
    result["W_up"], result["W_down"] = 0.5 * normal(INNER, D, seed=seed + 50), 0.5 * normal(D, INNER, seed=seed + 51)
    if gate:
        result["W_gate"] = 0.5 * normal(INNER, D, seed=seed + 52)
    return result


X = list(normal(LENGTH, D, seed=900))
FIRST = [list(normal(LENGTH, HEAD_DIM, seed=901 + h)) for h in range(HEADS)]

RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "entropy": {"attention": "entropy", "ratio": 0.6},
    "kl": {"attention": "kl", "ratio": 0.2},
    "floor": {"attention": "floor", "ratio": 0.75},  # some rows bound, some not
    "floor, tau 2": {"attention": "floor", "ratio": 0.01, "tau": 2.0},
    "layernorm": {"norm": "layernorm", "alpha": 0.7, "b": 1.3, "lambda_attn": 0.4},
    "qk norm": {"qk_norm": True},
    "rotary": {"rotary": True, "mlp": "relu2"},
    "rotary, qk norm, entropy": {"rotary": True, "qk_norm": True, "attention": "entropy", "ratio": 0.6},
    "swiglu": {"mlp": "swiglu"},
    "value residual": {"value_lambda": 0.3},
}


def run(name: str, w: dict[str, Any] | None = None, queries: list[int] | None = None) -> trust_layers.Layer:
    rule = RULES[name]
    w = weights(gate=rule.get("mlp") == "swiglu") if w is None else w
    return trust_layers.run_layer(X, w, rule, FIRST if "value_lambda" in rule else None, queries)


def draw(layer: trust_layers.Layer, seed: int = 500) -> dict[str, Tensor]:
    """A random matrix for every group."""
    shapes = {"W_Q": (HEAD_DIM, D), "W_K": (HEAD_DIM, D), "W_V": (HEAD_DIM, D), "W_O": (D, HEADS * HEAD_DIM)}
    shapes |= {"W_up": (INNER, D), "W_gate": (INNER, D), "W_down": (D, INNER)}
    names = [f"{weight}.{h}" for weight in ("W_Q", "W_K", "W_V") for h in range(HEADS)] + ["W_O", "W_up", "W_down"]
    names += [] if layer.W_gate is None else ["W_gate"]
    return {name: normal(*shapes[name.split(".")[0]], seed=seed + n) for n, name in enumerate(names)}


def moved(w: dict[str, Any], step: dict[str, Tensor], times: float = 1.0) -> dict[str, Any]:
    result = {name: list(value) if isinstance(value, list) else value for name, value in w.items()}
    for name, dW in step.items():
        weight, _, head = name.partition(".")
        if weight == "W_O":
            columns = dW.split(HEAD_DIM, dim=1)
            result[weight] = [old + times * new for old, new in zip(result[weight], columns, strict=True)]
        elif head:
            result[weight][int(head)] = result[weight][int(head)] + times * dW
        else:
            result[weight] = result[weight] + times * dW
    return result


def exact(layer: trust_layers.Layer, step: dict[str, Tensor], radial: bool = True) -> Tensor:
    """The exact quadratic of groups that are all of attention scores, all of W_V and W_O, or all of the MLP."""
    per_head = {weight: [step.get(f"{weight}.{h}") for h in range(HEADS)] for weight in ("W_Q", "W_K", "W_V")}
    if any(name.startswith(("W_Q", "W_K")) for name in step):
        return naive.exact_attention(layer, per_head["W_Q"], per_head["W_K"])
    if any(name.startswith(("W_V", "W_O")) for name in step):
        outs = list(step["W_O"].split(HEAD_DIM, dim=1)) if "W_O" in step else [None] * HEADS
        return naive.exact_attention_stream(layer, per_head["W_V"], outs, radial)
    return naive.exact_mlp_stream(layer, step.get("W_up"), step.get("W_down"), step.get("W_gate"), radial)


# Exact quadratics.


def a_row(kind: str, seed: int) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Scores, log prior and the rest of the problem of one row."""
    t = 4 + seed % 7
    s = normal(t, seed=seed)
    if kind == "kl with a prior":
        log_q = torch.log_softmax(0.5 * normal(t, seed=seed + 100), dim=0)
        return s, log_q, {"kind": "kl", "goal": 0.1 * math.log(t)}
    if kind == "inactive floor":
        return s, None, {"kind": "floor", "goal": 1e-4, "tau": 0.8}
    kind = kind.removeprefix("active ")
    return s, None, {"kind": kind, "goal": {"kl": 0.1, "floor": 0.98}.get(kind, 0.7) * math.log(t), "tau": 0.1}


KINDS = ["softmax", "entropy", "kl", "kl with a prior", "inactive floor", "active floor"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_change_as_the_quadratic_says_and_not_along_the_scores(kind: str) -> None:
    true, predicted, along, alone = 0.0, 0.0, 0.0, 0.0
    for seed in range(20):
        s, log_q, problem = a_row(kind, seed)
        a, beta, bound = trust_layers.solve(s, log_q=log_q, **problem)
        assert bound == (kind not in ("softmax", "inactive floor"))
        assert beta == {"softmax": 1.0, "inactive floor": 1 / 0.8}.get(kind, beta)
        direction = normal(len(s), seed=seed + 200)
        ds = direction * ETA / torch.sqrt(trust_layers.row_quadratic(a, s, direction, beta, bound))
        predicted += float(trust_layers.row_quadratic(a, s, ds, beta, bound))
        tangent = trust_layers.tangent_quadratic(a, trust_layers.row_tangent(a, s, ds, beta, bound))
        assert abs(float(tangent) / ETA**2 - 1) <= 1e-9
        true += float(trust_layers.divergence(a, trust_layers.solve(s + ds, log_q=log_q, **problem)[0]))
        along += float(trust_layers.divergence(a, trust_layers.solve(1.01 * s, log_q=log_q, **problem)[0]))
        alone += float(trust_layers.row_quadratic(a, s, 0.01 * s, beta, bound))
    assert abs(true / predicted - 1) <= 0.01
    if kind in ("softmax", "inactive floor"):
        assert along > 1e-5
    else:
        assert along <= 1e-20
        assert abs(alone) <= 1e-15


@pytest.mark.parametrize("bound", [True, False])
def test_a_row_follows_its_prior(bound: bool) -> None:
    """The tangent with a moving prior, against rows that are solved again."""
    for seed in range(5):
        s, log_q, problem = a_row("kl with a prior", seed)
        assert log_q is not None
        if not bound:
            problem = {"kind": "floor", "goal": -1.0, "tau": 0.7}
        a, beta, found = trust_layers.solve(s, log_q=log_q, **problem)
        assert found == bound
        ds, move, step = normal(len(s), seed=seed + 1), normal(len(s), seed=seed + 2), 1e-5
        d_log_q = move - (torch.exp(log_q) * move).sum()
        tangent = trust_layers.row_tangent(a, s, ds, beta, bound, d_log_q)
        ends = [
            trust_layers.solve(s + t * ds, log_q=torch.log_softmax(log_q + t * move, dim=0), **problem)[0]
            for t in (step, -step)
        ]
        difference = (torch.log(ends[0]) - torch.log(ends[1])) / (2 * step)
        assert (tangent - difference).abs().max() <= 1e-6 * tangent.abs().max()


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_normalised_streams_change_as_the_quadratic_says(norm: str) -> None:
    for seed in range(5):
        x, dB = 3 * normal(D, seed=seed) + 1, normal(D, seed=seed + 50) + 2 * normal(1, seed=seed)
        dB = dB * 1e-4 / torch.sqrt(trust_layers.stream_quadratic(x, dB, norm))
        change = trust_layers.normalised(x + dB, norm) - trust_layers.normalised(x, norm)
        assert abs(float((change * change).mean()) / 1e-8 - 1) <= 1e-2
        assert float(trust_layers.stream_quadratic(x, x, norm)) <= 1e-15


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("part", ["scores", "values", "mlp"])
def test_a_layer_that_really_moves(name: str, part: str) -> None:
    layer = run(name)
    w = weights(gate=layer.W_gate is not None)
    starts = {"scores": ("W_Q", "W_K"), "values": ("W_V", "W_O"), "mlp": ("W_up", "W_gate", "W_down")}[part]
    step = {group: dW for group, dW in draw(layer).items() if group.startswith(starts)}
    eta = ETA / 10  # the third order of a few short rows is one per cent of the second at 1e-3
    scale = eta / math.sqrt(float(exact(layer, step)))
    after = run(name, moved(w, step, scale))
    true = torch.zeros((), dtype=torch.float64)
    for i in layer.queries:
        if part == "scores":
            pairs = zip(layer.heads, after.heads, strict=True)
            kl = torch.stack([trust_layers.divergence(one.a[i], other.a[i]) for one, other in pairs])
            true = true + layer.rule["lambda_attn"] * kl.mean()
        else:
            old, new = (run_.x_a[i] if part == "values" else run_.x_m[i] for run_ in (layer, after))
            norm = layer.rule["norm"]
            true = true + (trust_layers.normalised(new, norm) - trust_layers.normalised(old, norm)).square().mean()
    assert abs(float(true) / LENGTH / eta**2 - 1) <= 0.01


# Kronecker factors.


@pytest.mark.parametrize("name", RULES)
def test_kronecker_factors_are_exact_where_nothing_is_averaged(name: str) -> None:
    """One query: the expectation of a product is the product; one head of W_V, W_O and W_down need not even that."""
    one, all_ = run(name, queries=[LENGTH - 2]), run(name)
    turned = one.rule["qk_norm"] or one.rule["rotary"]
    factors = {id(layer): naive.all_factors(layer) for layer in (one, all_)}
    for group, dW in draw(one).items():
        for layer in (one, all_) if group.startswith(("W_V", "W_O", "W_down")) else (one,):
            kronecker = naive.quadratic(factors[id(layer)][group], dW)
            ratio = float(kronecker / exact(layer, {group: dW}, radial=False))
            if turned and group.startswith("W_K"):
                assert ratio > 0  # the turned key's factor is an approximation even then
            else:
                assert abs(ratio - 1) <= 1e-9, group


@pytest.mark.parametrize("name", RULES)
def test_factors_are_symmetric_and_not_negative(name: str) -> None:
    for factors in naive.all_factors(run(name)).values():
        for matrix in factors.values():
            assert (matrix - matrix.T).abs().max() <= 1e-12 * matrix.abs().max()
            values = torch.linalg.eigvalsh(matrix)
            assert values[0] >= -1e-12 * values[-1]


def test_the_key_factor_by_column_sums() -> None:
    """E_i Cov_{a_i}(u) = U^T diag(column sums of A) U / T - E[ubar ubar^T]."""
    layer = run("softmax")
    A = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    for i, a in enumerate(layer.heads[0].a):
        A[i, : i + 1] = a
    U = torch.stack(layer.u)
    expected = U.T @ torch.diag(A.sum(dim=0)) @ U / LENGTH - (A @ U).T @ (A @ U) / LENGTH
    assert (naive.key_factors(layer, 0)["R"] - expected).abs().max() <= 1e-12


def test_the_turned_key_factor_without_turns_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys turned back: with Rot = I the sum over j has a_i for its weights, which sum to one."""
    layer = run("softmax")
    layer.rule["rotary"] = True
    monkeypatch.setattr(naive, "key_map", lambda layer, head, j: torch.eye(HEAD_DIM, dtype=torch.float64))
    turned = naive.key_factors(layer, 1)["L"]
    assert (turned - naive.key_factors(run("softmax"), 1)["L"]).abs().max() <= 1e-12


def test_constrained_rows_have_no_budget_along_their_scores() -> None:
    """dW_Q = W_Q and dW_K = W_K only scale the scores: exact and, for one query, Kronecker forms vanish."""
    layer = run("entropy", queries=[LENGTH - 1])
    for weight, at in (("W_Q", "W_Q"), ("W_K", "W_K")):
        dW = getattr(layer.heads[0], at)
        factors = naive.all_factors(layer)[f"{weight}.0"]
        free = naive.all_factors(run("softmax", queries=[LENGTH - 1]))[f"{weight}.0"]
        assert abs(float(exact(layer, {f"{weight}.0": dW}))) <= 1e-12
        assert abs(float(naive.quadratic(factors, dW))) <= 1e-10 * float(naive.quadratic(free, dW))


# The step.


def definite(size: int, seed: int) -> Tensor:
    root = normal(size, 2 * size, seed=seed)
    return root @ root.T / size


def some_groups() -> tuple[dict[str, naive.Factors], dict[str, Tensor]]:
    shapes = {"one": (3, 4), "two": (5, 2), "three": (2, 2)}
    groups = {
        name: {"L": definite(rows, 10 * n), "R": definite(cols, 10 * n + 1)}
        for n, (name, (rows, cols)) in enumerate(shapes.items())
    }
    return groups, {name: normal(*shape, seed=80 + n) for n, (name, shape) in enumerate(shapes.items())}


def dot(G: dict[str, Tensor], step: dict[str, Tensor]) -> float:
    return sum(float((G[name] * step[name]).sum()) for name in G)


def barrier_solution(Q: Tensor, g: Tensor, eta: float) -> Tensor:
    """argmin g.x subject to x^T Q x <= eta^2: Newton's method on t g.x - log(eta^2 - x^T Q x), t rising."""
    x = torch.zeros_like(g)
    unit = eta / float(torch.linalg.norm(g)) / float(torch.linalg.eigvalsh(Q)[-1]) ** 0.5

    def value(x: Tensor, t: float) -> float:
        room = eta**2 - float(x @ Q @ x)
        return t * float(g @ x) - math.log(room) if room > 0 else math.inf

    for power in range(21):
        t = 10.0 ** (power / 2) / unit / float(g @ g)
        for _ in range(60):
            room = eta**2 - x @ Q @ x
            slope = t * g + 2 * (Q @ x) / room
            bend = 2 * Q / room + 4 * torch.outer(Q @ x, Q @ x) / room**2
            newton = -torch.linalg.solve(bend, slope)
            if float(-slope @ newton) < 1e-6:
                break
            size = 1.0
            while value(x + size * newton, t) > value(x, t) and size > 1e-12:
                size *= 0.5
            x = x + size * newton
    return x


def test_the_frobenius_step_beats_random_directions_and_equals_a_solver() -> None:
    groups, G = some_groups()
    step = naive.frobenius_steps(groups, G, 0.3)
    assert abs(sum(float(naive.quadratic(groups[name], step[name])) for name in G) / 0.09 - 1) <= 1e-12
    best = dot(G, step)
    spent, gained = torch.zeros(10_000).double(), torch.zeros(10_000).double()
    for n, (name, factors) in enumerate(groups.items()):
        shape = G[name].shape
        directions = normal(10_000, *shape, seed=300 + n)
        directions[:5000] = step[name] / step[name].norm() + 0.1 * directions[:5000]  # half of them near the best
        spent += torch.einsum("ab,nbc,cd,nad->n", factors["L"], directions, factors["R"], directions)
        gained += (directions * G[name]).sum(dim=(1, 2))
    assert float((0.3 * gained / spent.sqrt()).min()) > best
    blocks = [torch.kron(factors["L"], factors["R"]) for factors in groups.values()]
    solved = barrier_solution(torch.block_diag(*blocks), torch.cat([G[name].flatten() for name in groups]), 0.3)
    ours = torch.cat([step[name].flatten() for name in groups])
    assert (solved - ours).abs().max() <= 1e-7 * ours.abs().max()


def test_the_spectral_step_spends_equal_shares_and_is_best_in_the_worst_case() -> None:
    groups, G = some_groups()
    step = naive.spectral_steps(groups, G, 0.3)
    for n, (name, factors) in enumerate(groups.items()):
        assert abs(float(naive.quadratic(factors, step[name])) / (0.09 / 3) - 1) <= 1e-12
        left, right = (torch.linalg.inv(naive.inverse_root(factors[side])) for side in ("L", "R"))
        size = float(torch.linalg.matrix_norm(left @ step[name] @ right, 2))
        directions = normal(3000, *G[name].shape, seed=400 + n)
        sizes = torch.linalg.matrix_norm(left @ directions @ right, 2)
        gained = (directions * G[name]).sum(dim=(1, 2)) * size / sizes
        assert float(gained.min()) > float((G[name] * step[name]).sum())


def test_unit_change_of_the_output_gives_muon() -> None:
    """L = I/out and R = I: Muon with `jordan` scaling and lr = eta / sqrt(number of groups)."""
    shapes = {"wide": (3, 7), "tall": (8, 4), "square": (5, 5)}
    G = {name: normal(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    groups = {
        name: {"L": torch.eye(rows).double() / rows, "R": torch.eye(cols).double()}
        for name, (rows, cols) in shapes.items()
    }
    for name, dW in naive.spectral_steps(groups, G, 0.2).items():
        muon = -0.2 / math.sqrt(3) * scale_of("jordan", *shapes[name]) * polar_by_svd(G[name])
        assert (dW - muon).abs().max() <= 1e-12


def gauge(rotary: bool, orthogonal: bool, seed: int) -> Tensor:
    """An invertible matrix; with rotary positions one that commutes with the rotations of pairs (i, i + d_h/2)."""
    if not rotary:
        sizes = torch.ones(HEAD_DIM) if orthogonal else torch.linspace(0.4, 2.5, HEAD_DIM)
        return polar_by_svd(normal(HEAD_DIM, HEAD_DIM, seed=seed)) @ torch.diag(sizes).double()
    angles = normal(HEAD_DIM // 2, seed=seed)
    sizes = torch.ones(HEAD_DIM // 2) if orthogonal else torch.linspace(0.4, 2.5, HEAD_DIM // 2)
    real, imaginary = torch.diag(sizes * torch.cos(angles)), torch.diag(sizes * torch.sin(angles))
    return torch.cat([torch.cat([real, -imaginary], dim=1), torch.cat([imaginary, real], dim=1)])


def gradients(name: str, w: dict[str, Any]) -> dict[str, Tensor]:
    """Of a random linear function of the stream after the MLP."""
    leaves = {key: [v.clone().requires_grad_() for v in w[key]] for key in ("W_Q", "W_K", "W_V", "W_O")}
    layer = run(name, {**w, **leaves})
    loss = sum((normal(D, seed=700 + i) * z).sum() for i, z in enumerate(layer.x_m))
    flat = [v for values in leaves.values() for v in values]
    found = iter(torch.autograd.grad(loss, flat))
    by_name = {key: [next(found) for _ in values] for key, values in leaves.items()}
    result = {f"{key}.{h}": by_name[key][h] for key in ("W_Q", "W_K", "W_V") for h in range(HEADS)}
    return result | {"W_O": torch.cat(by_name["W_O"], dim=1)}


@pytest.mark.parametrize("steps", [naive.frobenius_steps, naive.spectral_steps])
@pytest.mark.parametrize("name", ["softmax", "entropy", "rotary", "rotary, qk norm, entropy", "value residual"])
def test_the_step_does_not_depend_on_the_gauge(name: str, steps: Any) -> None:
    """W_Q -> M W_Q, W_K -> M^-T W_K and W_V -> N W_V, W_O -> W_O N^-1: the same change of scores and of the branch."""
    w, rule = weights(), RULES[name]
    kept = ("rotary" in rule, "qk_norm" in rule)
    M = [gauge(*kept, seed=600 + h) for h in range(HEADS)]
    N = [gauge(False, False, seed=610 + h) for h in range(HEADS)]
    first = FIRST
    other = {
        **w,
        "W_Q": [m @ v for m, v in zip(M, w["W_Q"], strict=True)],
        "W_K": [torch.linalg.inv(m).T @ v for m, v in zip(M, w["W_K"], strict=True)],
        "W_V": [n @ v for n, v in zip(N, w["W_V"], strict=True)],
        "W_O": [v @ torch.linalg.inv(n) for n, v in zip(N, w["W_O"], strict=True)],
    }
    turned_first = [[n @ v for v in values] for n, values in zip(N, first, strict=True)]
    residual = "value_lambda" in rule
    layer = trust_layers.run_layer(X, w, rule, first if residual else None)
    changed = trust_layers.run_layer(X, other, rule, turned_first if residual else None)
    G = gradients(name, w)
    turned = {
        **{f"W_Q.{h}": torch.linalg.inv(M[h]).T @ G[f"W_Q.{h}"] for h in range(HEADS)},
        **{f"W_K.{h}": M[h] @ G[f"W_K.{h}"] for h in range(HEADS)},
        **{f"W_V.{h}": torch.linalg.inv(N[h]).T @ G[f"W_V.{h}"] for h in range(HEADS)},
        "W_O": G["W_O"] @ torch.block_diag(*N).T,
    }
    if not residual and "entropy" not in name:  # what the chain rule says is what autograd finds
        for group, found in gradients(name, other).items():
            assert (found - turned[group]).abs().max() <= 1e-9 * found.abs().max(), group

    def answers(layer: trust_layers.Layer, G: dict[str, Tensor]) -> list[Tensor]:
        factors = naive.all_factors(layer)
        step = steps({group: factors[group] for group in G}, G, ETA)
        rows = [
            naive.score_change(layer, head, i, step[f"W_Q.{h}"], step[f"W_K.{h}"])
            for h, head in enumerate(layer.heads)
            for i in range(LENGTH)
        ]
        values = [
            head.W_O @ step[f"W_V.{h}"] @ naive.ubar(layer, head, i)
            for h, head in enumerate(layer.heads)
            for i in range(LENGTH)
        ]
        return [torch.cat(rows), torch.cat(values), torch.cat([step["W_O"] @ out for out in layer.o])]

    for one, two in zip(answers(layer, G), answers(changed, turned), strict=True):
        # typically 1e-12; a draw whose factors or gradients are nearly singular loses half of the digits
        assert (one - two).abs().max() <= 1e-6 * one.abs().max()
    muon = polar_by_svd(G["W_Q.0"]), torch.linalg.inv(M[0]) @ polar_by_svd(turned["W_Q.0"])
    if not kept[1]:
        assert (muon[0] - muon[1]).norm() > 0.1 * muon[0].norm()


# Damping and radius.


def test_damping_is_a_share_of_the_mean_eigenvalue() -> None:
    matrix = definite(4, 3)
    before, after = torch.linalg.eigvalsh(matrix), torch.linalg.eigvalsh(naive.damped(matrix))
    assert (after - before - 1e-2 * before.mean()).abs().max() <= 1e-12


def test_the_radius_follows_both_ratios() -> None:
    cases = [
        (1.6, 1.0, 1 / 1.2),
        (1.0, 0.2, 1 / 1.2),
        (1.1, 0.7, 1.05),
        (1.3, 0.7, 1.0),
        (1.1, 0.5, 1.0),
        (1.5, 0.25, 1.0),
        (1.2, 0.7, 1.0),
    ]
    for r1, r2, factor in cases:
        assert naive.next_radius(0.1, r1, r2, cap=1.0) == pytest.approx(0.1 * factor, rel=1e-12)
    assert naive.next_radius(0.1, 1.0, 1.0, cap=0.102) == 0.102
    G = {"w": normal(2, 3)}
    assert naive.decrease_ratio(1.0, 0.9, G, {"w": -0.1 * G["w"] / G["w"].square().sum()}) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["softmax", "entropy"])
def test_measured_over_predicted_goes_to_one_for_two_layers_moved_together(name: str) -> None:
    ws = [weights(0), weights(100)]

    def network(both: list[dict[str, Any]]) -> list[trust_layers.Layer]:
        first = run(name, both[0])
        return [first, trust_layers.run_layer(first.x_m, both[1], RULES[name])]

    at = network(ws)
    groups = {f"{n} {group}": f for n in range(2) for group, f in naive.all_factors(at[n]).items()}
    G = {f"{n} {group}": g for n in range(2) for group, g in draw(at[n], 500 + 50 * n).items()}
    step = naive.frobenius_steps({key: naive.damped_factors(f) for key, f in groups.items()}, G, 1e-4)
    parts = [{key[2:]: dW for key, dW in step.items() if key.startswith(str(n))} for n in range(2)]

    def shifted(times: float) -> list[trust_layers.Layer]:
        return network([moved(ws[n], parts[n], times) for n in range(2)])

    measured = naive.measured_change(at, shifted(1.0))
    predicted = naive.predicted_change(at, shifted(1e-2), shifted(-1e-2), 1e-2)
    assert abs(float(measured / predicted) - 1) <= 0.01
    starts = (("W_Q", "W_K"), ("W_V", "W_O"), ("W_up", "W_down"))
    local = sum(
        exact(at[n], {group: dW for group, dW in parts[n].items() if group.startswith(start)})
        for n in range(2)
        for start in starts
    )
    assert float(measured / local) > 1.1  # what the changed inputs of later layers add
