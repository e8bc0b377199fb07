"""Hessian-vector products, eigenvalues, traces and loss curves, against Hessians that were built without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import stepformer as sf
from architectures import covering_presets
from helpers import shake, tiny, tokens
from stepformer.base.errors import InputError, StepformerError
from stepformer.measure.diagnostics import curvature
from stepformer.measure.diagnostics.curvature import (
    HessianOperator,
    batches_of,
    direction,
    lanczos,
    loss_at,
    probe,
)
from stepformer.measure.diagnostics.hessian import LIMITS, grid

GPT: dict[str, Any] = {"n_layer": 2, "n_head": 2, "d_model": 8, "context": 6, "vocab_size": 11, "mlp_hidden": 4}


def windows_for(model: sf.Model, rows: int = 4) -> Tensor:
    return tokens(rows, model.config.context + 1, model.config.vocab_size)


def gradients(model: sf.Model, windows: Tensor) -> Tensor:
    """The flat gradient of the mean loss by one backward pass, in fp64."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(windows[:, :-1], windows[:, 1:]).loss
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, found, strict=True)]
    )


def move(model: sf.Model, by: Tensor) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, part in zip(parameters, by.split([p.numel() for p in parameters]), strict=True):
            p.add_(part.view_as(p))


def gradient_difference(model: sf.Model, windows: Tensor, along: Tensor, step: float) -> Tensor:
    """The derivative of the gradient along a direction: central differences of fourth order."""
    place, total = 0.0, torch.zeros_like(along)
    for at, weight in ((2, -1), (1, 8), (-1, -8), (-2, 1)):
        move(model, (at * step - place) * along)
        place = at * step
        total += weight * gradients(model, windows)
    move(model, -place * along)
    return total / (12 * step)


@pytest.fixture(scope="module")
def gpt() -> sf.Model:
    model: sf.Model = shake(tiny("vanilla", **GPT))
    return model


@pytest.fixture(scope="module")
def dense(gpt: sf.Model) -> Tensor:
    """The whole Hessian: a second backward pass from every entry of the gradient."""
    windows = windows_for(gpt)
    parameters = list(gpt.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        loss = gpt(windows[:, :-1], windows[:, 1:]).loss
    first = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    units = torch.eye(len(first), dtype=torch.float64)
    rows = torch.autograd.grad(first, parameters, units, is_grads_batched=True)
    return torch.cat([part.flatten(1) for part in rows], dim=1)


@pytest.fixture(scope="module")
def operator(gpt: sf.Model) -> HessianOperator:
    return HessianOperator(gpt, batches_of(windows_for(gpt), 2))


def test_the_reference_is_the_derivative_of_the_gradient(gpt: sf.Model, dense: Tensor) -> None:
    """Every column by central differences of gradients, so that the reference rests on no second derivative at all."""
    windows, step = windows_for(gpt), 3e-6
    shapes = {name: p.shape for name, p in gpt.named_parameters()}
    here = torch.cat([p.detach().flatten() for p in gpt.parameters()])

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        out: Tensor = torch.func.functional_call(gpt, named, (windows[:, :-1], windows[:, 1:])).loss
        return out

    gradient = torch.func.vmap(torch.func.grad(loss), chunk_size=100)
    steps = step * torch.eye(len(here), dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        columns = (gradient(here + steps) - gradient(here - steps)) / (2 * step)
    # truncation, some 100 step^2, and rounding, 1e-16 / step, are near 1e-9 of the largest entry
    assert float((columns - dense).abs().max()) < 1e-8 * float(dense.abs().max())
    assert float((dense - dense.mT).abs().max()) < 1e-13 * float(dense.abs().max())


def test_products_are_those_of_the_dense_hessian(operator: HessianOperator, dense: Tensor) -> None:
    v = operator.draw("normal", 3, "test")
    torch.testing.assert_close(operator @ v, dense @ v, rtol=1e-10, atol=1e-12 * float(dense.abs().max()))


def test_products_do_not_depend_on_the_batches(gpt: sf.Model, operator: HessianOperator) -> None:
    """Three and one rows weigh as their tokens do, and so do targets that are ignored."""
    windows = windows_for(gpt)
    v = operator.draw("normal", 4, "test")
    torch.testing.assert_close(HessianOperator(gpt, batches_of(windows, 3)) @ v, operator @ v, rtol=1e-9, atol=1e-12)
    inputs, targets = windows[:, :-1], windows[:, 1:].clone()
    targets[0, 2:] = -100
    whole = HessianOperator(gpt, [(inputs, targets)])
    parts = HessianOperator(gpt, [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])])
    assert whole.tokens == parts.tokens == 4 * 6 - 4
    torch.testing.assert_close(parts @ v, whole @ v, rtol=1e-9, atol=1e-12)
    assert parts.loss() == pytest.approx(gpt(inputs, targets).loss.item(), abs=1e-14)


def test_top_eigenvalues(operator: HessianOperator, dense: Tensor) -> None:
    exact = torch.linalg.eigvalsh(dense)
    exact = exact[exact.abs().argsort(descending=True)]
    found, _ = lanczos(operator.product, operator.start, count=6, iterations=120, tolerance=1e-9)
    for pair, value in zip(found, exact, strict=False):
        assert pair.value == pytest.approx(float(value), rel=1e-6)
        assert pair.converged(1e-8)
    assert any(pair.value < 0 for pair in found)  # random weights are no minimum: the sign is part of the answer


def test_trace(operator: HessianOperator, dense: Tensor) -> None:
    samples = torch.tensor([probe(operator, number) for number in range(60)], dtype=torch.float64)
    exact = float(dense.trace())
    error = float(samples.std()) / len(samples) ** 0.5
    assert abs(float(samples.mean()) - exact) < 3 * error


def test_probes_are_unbiased(operator: HessianOperator, dense: Tensor) -> None:
    """z.Hz = tr H + sum_{i != j} z_i z_j H_ij: the first needs z_i^2 = 1, the second averages to zero."""
    signs = torch.stack([operator.draw("signs", 0, f"probe {number}") for number in range(400)])
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    pairs = signs.mT @ signs / len(signs)
    pairs.fill_diagonal_(0.0)
    # several 100,000 means of 400 signs have a standard deviation of 0.05 each; six of them leave 0.1 % for the largest
    assert float(pairs.abs().max()) < 0.3
    assert float(pairs.square().mean()) == pytest.approx(1 / 400, rel=0.02)
    off = dense - torch.diag(dense.diag())
    expected = float(dense.trace() + signs[7] @ off @ signs[7])
    assert probe(operator, 7) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", covering_presets())
def test_products_of_every_preset(name: str) -> None:
    """Against differences of gradients, for every tensor by itself, and against differences of losses."""
    config = sf.model_config(name, n_layer=2, n_head=3, d_model=12, context=8, vocab_size=11)
    model = shake(sf.Model(config, seed=0, dtype=torch.float64))
    windows = tokens(3, 9)
    operator = HessianOperator(model, batches_of(windows, 2))
    along = operator.draw("normal", 0, "test")
    product = operator @ along

    flowing = config.replace(**({"step_gradient": True} if "step_gradient" in config.options_of("template") else {}))
    other = sf.Model(flowing, seed=0, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    # Rounding allows 1e-16 / step = 1e-10, more where nearly equal scores amplify it (7e-9 seen), most where a matrix
    # that Newton-Schulz makes orthogonal is nearly singular: of 12 draws the median is 5e-10, the worst 2.6e-8. Its
    # fifth derivatives are large, too: as much truncation.
    iterated = config.template in ("muon", "ortho")
    difference = gradient_difference(other, windows, along, 1e-6)
    for expected, found in zip(operator.split(difference), operator.split(product), strict=True):
        assert float((expected - found).norm()) < (2e-7 if iterated else 3e-8) * float(product.norm())
    # No derivative of ours at all: a second difference of losses, with rounding of some 1e-16 loss / step^2; the steps
    # are shorter where Newton-Schulz makes the sixth derivatives large.
    step, rounding = (2e-6, 2e-3) if iterated else (1e-5, 1e-4)
    weights = ((2, -1 / 12), (1, 4 / 3), (0, -5 / 2), (-1, 4 / 3), (-2, -1 / 12))
    second = sum(weight * loss_at(operator, [along], [at * step]) for at, weight in weights) / step**2
    # truncation: up to 2.4e-5 where scores are nearly equal
    assert float(along @ product) == pytest.approx(second, rel=2e-4, abs=rounding)


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "entropy", "ratio": 0.9, "query_chunk": 3},
        {"attention": "kl", "prior": "previous", "detach_prior": True},
        {"template": "conformal-euler", "attention": "hamiltonian", "query_chunk": 3},
        {"attention": "linear", "chunk": 3},
        {"document_separator": 3},
        {"activation_checkpointing": True},
        {"attention_backend": "math"},
    ],
    ids=str,
)
def test_products_of_options(options: dict[str, Any]) -> None:
    """Queries in chunks, chunks that are computed again, stopped gradients, masks; a model left in training mode."""
    model = shake(tiny("vanilla", **options)).train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    operator = HessianOperator(model, batches_of(tokens(3, 9), 3))
    assert operator.check()["finite_difference"] < LIMITS[torch.float64]["finite_difference"]
    assert model.training
    assert model.config.to_dict() == tiny("vanilla", **options).config.to_dict()
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


def test_products_of_a_hybrid_and_of_pinned_coefficients() -> None:
    """What a model was told after it was built holds for its curvature too, also where it is built again."""
    model = shake(tiny("yurii"))
    windows = tokens(3, 9)
    hybrid = model.hybrid(layers={1})
    assert HessianOperator(hybrid, batches_of(windows, 3)).loss() == pytest.approx(
        hybrid(windows[:, :-1], windows[:, 1:]).loss.item(), abs=1e-14
    )
    for name, word in (("yurii", "beta"), ("symp-exp-euler", "h_x")):
        model = shake(tiny(name))
        model.pin_coefficients(**{word: 0.3})
        found = HessianOperator(model, batches_of(windows, 3)).loss()
        assert found == pytest.approx(model(windows[:, :-1], windows[:, 1:]).loss.item(), abs=1e-14)


def test_parameters_are_those_that_train(gpt: sf.Model) -> None:
    """The tied table once; unused and frozen ones not at all."""
    model = tiny("symp-ab2", aux_init="zero", mlp_step="A")
    operator = HessianOperator(model, batches_of(tokens(2, 9), 2))
    unused = model.unused_parameters()
    assert unused
    assert set(operator.names) == {name for name, _ in model.named_parameters()} - set(unused)
    left = sum(p.numel() for name, p in model.named_parameters() if name in unused)
    assert operator.size == model.num_parameters() - left
    assert HessianOperator(gpt, batches_of(windows_for(gpt), 2)).size == gpt.num_parameters()


def test_precision_is_that_of_the_computation(gpt: sf.Model) -> None:
    """An fp32 model measured in fp64 agrees with itself in fp32 to fp32's rounding, and stays fp32."""
    model = shake(tiny("vanilla", dtype=torch.float32, **GPT))
    batches = batches_of(windows_for(model), 2)
    single, double = HessianOperator(model, batches), HessianOperator(model, batches, dtype=torch.float64)
    v = single.draw("normal", 0, "test")
    assert (single @ v).dtype == torch.float32
    product = double @ v.double()
    assert product.dtype == torch.float64
    # 1e-7 times the growth of rounding through two layers and back twice
    assert float(((single @ v).double() - product).norm()) < 1e-5 * float(product.norm())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with pytest.raises(InputError, match="fp32 or fp64"):
        HessianOperator(model, batches, dtype=torch.bfloat16)


# checks before anything is trusted


class Noisy(sf.Model):
    """A model that adds noise to its loss, as dropout left on would."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output._replace(loss=output.loss * (1 + 0.1 * torch.rand(())))


class Wrong(torch.autograd.Function):
    """The square with a right gradient whose own gradient is not right: 12 in place of 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (12 * x - 10 * x.detach())


class Crooked(sf.Model):
    """A model with a wrong second derivative."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output._replace(loss=Wrong.apply(output.loss))


def test_checks_of_a_sound_model(operator: HessianOperator) -> None:
    found = operator.check()
    assert found["repeat"] == 0.0
    assert found["finite_difference"] < 1e-7
    assert found["symmetry"] < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "words"), [(Noisy, "is random"), (Crooked, "second derivative is wrong")])
def test_checks_stop_what_is_wrong(kind: type[sf.Model], words: str, dtype: torch.dtype) -> None:
    model = shake(kind(tiny("vanilla", **GPT).config, seed=0, dtype=dtype))
    with pytest.raises(StepformerError, match=words):
        HessianOperator(model, batches_of(windows_for(model), 2)).check()


def test_no_targets_and_no_parameters_are_refused(gpt: sf.Model) -> None:
    windows = windows_for(gpt)
    with pytest.raises(InputError, match="no targets"):
        HessianOperator(gpt, [(windows[:, :-1], torch.full_like(windows[:, 1:], -100))])
    with pytest.raises(InputError, match="No parameter"):
        HessianOperator(tiny("vanilla", **GPT).requires_grad_(False), batches_of(windows, 2))
    with pytest.raises(InputError, match="columns"):
        HessianOperator(gpt, batches_of(windows, 2)).product(torch.ones(3))


# the loss along directions


def test_the_curve_goes_through_the_loss(operator: HessianOperator) -> None:
    alpha = grid(11, 0.5)
    assert alpha[5] == 0.0
    assert alpha == [-a for a in reversed(alpha)]
    along = direction(operator)
    losses = [loss_at(operator, [along], [a]) for a in alpha]
    assert losses[5] == operator.loss()
    assert len(set(losses)) == 11
    # turned round, the direction gives the same curve backwards
    assert [loss_at(operator, [-along], [a]) for a in alpha] == losses[::-1]
    # near the middle it bends as the Hessian says; truncation and rounding are both near 1e-6 at this step
    step = 1e-3
    second = sum(w * loss_at(operator, [along], [at * step]) for at, w in ((1, 1), (0, -2), (-1, 1))) / step**2
    assert float(along @ (operator @ along)) == pytest.approx(second, rel=1e-3)


def test_directions_have_the_norms_of_the_weights() -> None:
    model = shake(tiny("yurii"))
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[2] = 0.0
    operator = HessianOperator(model, batches_of(tokens(2, 9), 2))
    by_tensor = operator.split(direction(operator))
    by_row = operator.split(direction(operator, normalise="filter"))
    for name, p, part, rows in zip(operator.names, operator.parameters, by_tensor, by_row, strict=True):
        assert float(part.norm()) == pytest.approx(float(p.detach().norm()), rel=1e-12), name
        if p.ndim < 2:
            assert not rows.any(), name
        else:
            torch.testing.assert_close(rows.norm(dim=1), p.detach().norm(dim=1), rtol=1e-12, atol=0)
    assert not torch.equal(direction(operator), direction(operator, 1))
    assert not torch.equal(direction(operator), direction(operator, seed=1))


def test_architectures_share_their_random_vectors() -> None:
    """Vanilla and a momentum model are probed alike where they have the same parameters."""
    first, second = (HessianOperator(tiny(name), batches_of(tokens(2, 9), 2)) for name in ("vanilla", "yurii"))
    mine = dict(zip(first.names, first.split(first.draw("signs", 0, "probe 0")), strict=True))
    theirs = dict(zip(second.names, second.split(second.draw("signs", 0, "probe 0")), strict=True))
    assert set(mine) < set(theirs)
    assert all(torch.equal(part, theirs[name]) for name, part in mine.items())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_weights_are_never_touched(gpt: sf.Model, error: type[BaseException]) -> None:
    before = {name: p.clone() for name, p in gpt.state_dict().items()}
    storage = {name: p.data_ptr() for name, p in gpt.state_dict().items()}
    operator = HessianOperator(gpt, batches_of(windows_for(gpt), 2))
    loss = operator.loss()
    along = direction(operator)

    def stopped() -> None:
        with operator.moved(along, 0.5):
            assert operator.loss() != loss
            assert all(torch.equal(before[name], p) for name, p in gpt.state_dict().items())  # even now
            raise error

    with pytest.raises(error):
        stopped()
    assert operator.loss() == loss
    assert all(torch.equal(before[name], p) for name, p in gpt.state_dict().items())
    assert storage == {name: p.data_ptr() for name, p in gpt.state_dict().items()}
    assert all(p.grad is None for p in gpt.parameters())


def test_too_many_vectors_are_refused(operator: HessianOperator) -> None:
    with pytest.raises(InputError, match="method=power"):
        curvature.check_memory(operator, 10**12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["vanilla", "soap", "symp-etd-ab2", "entropy-token"])
def test_on_a_gpu_as_on_a_cpu(name: str) -> None:
    """No fused attention there either, the same random vectors, and products that repeat up to the order of sums."""
    settings: dict[str, Any] = {"size": "tiny", "seed": 0}
    windows = tokens(4, 129, 256)
    near = HessianOperator(sf.build(name, **settings), batches_of(windows, 2))
    far = HessianOperator(sf.build(name, **settings, device="cuda"), batches_of(windows, 2))
    v = near.draw("normal", 0, "test")
    assert torch.equal(far.draw("normal", 0, "test").cpu(), v)
    expected = near @ v
    # fp32 rounding of two different libraries through four layers and back twice
    assert float(((far @ v).cpu() - expected).norm()) < 1e-3 * float(expected.norm())
    assert far.check()["repeat"] < 1e-4
