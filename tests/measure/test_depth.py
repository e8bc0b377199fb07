"""Inside the network: entropies, energies, norms, cosines and losses against naive computations."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import stepformer as sf
from architectures import covering_presets
from helpers import shake, tiny, tokens
from runs import make_corpus, small_run
from stepformer.base.errors import InputError
from stepformer.measure import measured
from stepformer.measure.diagnostics import depth
from stepformer.measure.diagnostics.common import fixed_windows
from stepformer.measure.diagnostics.depth import DepthSettings, inside
from stepformer.measure.flows.systems import LinearFlow, SoftmaxFlow
from stepformer.oracles import fresh_call
from stepformer.training import load_run, train
from stepformer.training.loading import LoadedRun, corpus_of

COUNTS = torch.arange(1, 9, dtype=torch.float64)  # visible tokens
TIGHT = 1e-11  # fp64, one formula summed in two orders


def windows(count: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    return tokens(count, length, seed=seed)


def near(a: Any, b: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=TIGHT, atol=TIGHT
    )


def naive_entropy(weights: Tensor) -> Tensor:
    """-sum p ln p, row by row, with 0 ln 0 = 0."""
    return -torch.special.xlogy(weights, weights).sum(dim=-1)


def heads_of(u: Tensor, weight: Tensor, n_head: int) -> list[Tensor]:
    """q, k, v of the fused projection, each (B, H, T, head_dim)."""
    return [t.unflatten(-1, (n_head, -1)).transpose(1, 2) for t in F.linear(u, weight).chunk(3, dim=-1)]


def inputs_of_attention(model: sf.Model, ids: Tensor) -> list[Tensor]:
    """What the attention of every layer receives, at its first call."""
    found: list[Tensor] = []
    handles = [
        block.attn.register_forward_pre_hook(lambda module, arguments: found.append(arguments[0].detach()))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


def causal(time: int = 8) -> Tensor:
    return torch.ones(time, time, dtype=torch.bool).tril()


# entropy and energy of a row


def test_softmax_rows() -> None:
    model, ids = shake(tiny("yurii")), tokens()
    layers = model.observe(ids)
    for block, u, seen in zip(model.blocks, inputs_of_attention(model, ids), layers, strict=True):
        q, k, _ = heads_of(u, block.attn.get_parameter("qkv.weight"), 3)
        scores = q @ k.mT / math.sqrt(4)
        weights = torch.softmax(scores.masked_fill(~causal(), -torch.inf), dim=-1)
        assert [t.shape for t in seen["entropy"]] == [(2, 3, 8)]
        near(seen["entropy"][0], naive_entropy(weights))
        total = (scores.exp() * causal()).sum(dim=-1)
        near(seen["energy"][0], -(total / COUNTS).log())
        # the energy is the least of -s.a + KL(a || uniform), attained by the weights
        to_uniform = COUNTS.log() - naive_entropy(weights)
        near(seen["energy"][0], -(weights * scores).sum(dim=-1) + to_uniform)


def test_uniform_attention_has_the_entropy_of_its_count() -> None:
    """Equal scores over t keys: ln t, and an energy of 0."""
    model = shake(tiny("vanilla"))
    with torch.no_grad():
        for block in model.blocks:
            block.attn.get_parameter("qkv.weight")[:12] = 0  # queries
    for seen in model.observe(tokens()):
        near(seen["entropy"][0], COUNTS.log().expand(2, 3, 8))
        near(seen["energy"][0], torch.zeros(2, 3, 8))
    result = inside(model, windows())
    expected = math.fsum(math.log(t) for t in range(2, 9)) / 7  # the first query, which sees itself alone, is left out
    near([row["entropy"] for row in result["layers"]], [[expected] * 3] * 2)


def test_rows_stay_inside_documents() -> None:
    """With a separator every document is a sequence of its own: its rows have the entropies that they have alone."""
    model = shake(tiny("vanilla", document_separator=0, positions="rotary"))
    ids = tokens(1, 8) % 10 + 1
    ids[0, 3] = 0
    together = model.observe(ids)[0]["entropy"][0]
    alone = [model.observe(part)[0]["entropy"][0] for part in (ids[:, :3], ids[:, 3:])]
    near(together, torch.cat(alone, dim=2))
    assert together[..., 3].abs().max() == 0
    # the mean over queries leaves out both that see nothing but themselves
    row = inside(model, torch.cat([ids, ids[:, :1]], dim=1))["layers"][0]
    near(row["entropy"], together.sum(dim=(0, 2)) / 6)


def test_sharp_rows_are_no_numbers_of_their_own() -> None:
    """Scores of thousands: all weight on one key, entropy 0 and not NaN."""
    model = tiny("vanilla", dtype=torch.float32)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.get_parameter("qkv.weight").mul_(1e4)
    for seen in model.observe(tokens()):
        entropy = seen["entropy"][0]
        assert entropy.isfinite().all()
        assert entropy.min() >= 0
        assert entropy.max() < 0.7


@pytest.mark.parametrize("name", ["entropy", "entropy-floor", "kl", "kl-previous"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_constrained_rows(name: str, chunk: int) -> None:
    """From the reported inverse temperatures: a = softmax(ln p + beta s), energy -s.a."""
    model, ids = shake(tiny(name, query_chunk=chunk)), tokens()
    log_prior = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    for block, u, seen in zip(model.blocks, inputs_of_attention(model, ids), model.observe(ids), strict=True):
        q, k, _ = heads_of(u, block.attn.get_parameter("qkv.weight"), 3)
        scores = q @ k.mT / math.sqrt(4)
        logits = (log_prior + seen["beta"][0][..., None] * scores).masked_fill(~causal(), -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        near(seen["entropy"][0], naive_entropy(weights))
        near(seen["energy"][0], -(weights * scores).sum(dim=-1))
        if name == "kl-previous":
            log_prior = weights.log().masked_fill(~causal(), 0.0)
        if name == "entropy":  # and H = r ln t is what it was asked for
            near(seen["entropy"][0][..., 1:], 0.5 * COUNTS[1:].log().expand(2, 3, 7))


def test_hamiltonian_rows() -> None:
    """One kernel of all dimensions; the energies of the last row add up to H of `stepformer flow` without a mask."""
    model, ids = shake(tiny("symp-plain-euler", aux_init="embed", score_bound=0, symmetric=True), 0.1), tokens()
    block, call = model.blocks[0], fresh_call(ids)
    s = model.start(ids, call.positions)
    seen = model.observe(ids)[0]
    u = block.attn_norm(s.x)
    query = block.attn.get_parameter("query.weight")
    kernel = query.mT @ query / (3 * math.sqrt(4))
    scores = u @ kernel @ u.mT
    weights = torch.softmax(scores.masked_fill(~causal(), -torch.inf), dim=-1)
    near(seen["entropy"][0], naive_entropy(weights)[:, None].detach())
    root = block.attn.get_parameter("root.weight")
    metric = root @ root.mT + 1e-6 * torch.eye(12, dtype=torch.float64)
    z = (scores.exp() * causal()).sum(dim=-1) / COUNTS
    a = (s.y * (s.y @ metric)).sum(dim=-1) / 12
    near(seen["energy"][0], (0.5 * a / z - 0.5 * z)[:, None].detach())
    # tokens that all see each other: H is the sum over tokens of the same expression
    flow = SoftmaxFlow(kernel, metric, divisor=12.0)
    free = scores[0].exp().mean(dim=-1)
    near((0.5 * a[0] / free - 0.5 * free).sum().detach(), flow.hamiltonian(u[0], s.y[0]).detach())


def test_linear_rows() -> None:
    """No probabilities; -1/2 u.V u is what linear attention descends, and H with momenta the Hamiltonian's."""
    ids = tokens()
    model = shake(tiny("linear"))
    seen = model.observe(ids)[0]
    assert "entropy" not in seen
    u = inputs_of_attention(model, ids)[0]
    near(seen["energy"][0][:, 0], -0.5 * (u * F.linear(u, model.blocks[0].attn.get_parameter("value.weight"))).sum(-1))

    model = shake(tiny("linear-symp-plain-euler"))
    block, call = model.blocks[0], fresh_call(ids)
    s = model.start(ids, call.positions)
    u, y = block.attn_norm(s.x), s.y
    seen = model.observe(ids)[0]
    kernel, value = (block.attn.get_parameter(f"{name}.weight") for name in ("kernel", "value"))
    pairs = ((u @ kernel.mT) @ u.mT) * (y @ y.mT) * causal()
    energy = 0.5 * pairs.sum(dim=-1) / COUNTS - 0.5 * (u * (u @ value.mT)).sum(dim=-1)
    near(seen["energy"][0][:, 0], energy.detach())
    # a single token is the flow of one particle
    flow = LinearFlow(kernel, value)
    near(seen["energy"][0][0, 0, 0], flow.hamiltonian(u[0, :1], y[0, :1]).detach())


def test_training_does_not_ask_for_rows() -> None:
    """What costs a look at all scores is computed on request only."""
    for name in ("vanilla", "entropy", "symp-ab2", "linear"):
        seen = tiny(name).observe(tokens(), rows=False)
        assert all("entropy" not in layer and "energy" not in layer for layer in seen)
    assert "capped_rows" in tiny("entropy").observe(tokens(), rows=False)[0]
    assert "bounded_scores" in tiny("symp-ab2").observe(tokens(), rows=False)[0]


def test_observing_changes_nothing() -> None:
    for name in ("yurii", "kl-previous", "symp-conformal-euler", "linear-symp-ab2"):
        model, ids = shake(tiny(name)), tokens()
        with torch.no_grad():
            before = model(ids).logits
            model.observe(ids)
            assert torch.equal(model(ids).logits, before)


def test_a_layer_with_two_attention_calls_reports_both() -> None:
    model = shake(tiny("verlet-ama"))
    seen = model.observe(tokens())[0]
    assert [t.shape for t in seen["entropy"]] == [(2, 3, 8)] * 2
    row = inside(model, torch.cat([tokens(), tokens()[:, :1]], dim=1))["layers"][0]
    mean = sum(t[:, :, 1:].mean(dim=(0, 2)) for t in seen["entropy"]) / 2
    near(row["entropy"], mean)


# along depth


@pytest.mark.parametrize("name", ["vanilla", "adam", "soap", "symp-ab2"])
def test_norms_updates_cosines_and_losses(name: str) -> None:
    model, text = shake(tiny(name, n_layer=3)), windows()
    ids, targets = text[:, :-1], text[:, 1:]
    call = fresh_call(ids)
    with torch.no_grad():
        states = [model.start(ids, call.positions)]
        for block in model.blocks:
            states.append(block(states[-1], call))
        losses = [F.cross_entropy(model.head(s.x).flatten(0, 1), targets.flatten()) for s in states]
    result = inside(model, text)
    assert result["tokens"] == 24
    for found, s, loss in zip([result["start"], *result["layers"]], states, losses, strict=True):
        near(found["readout_loss"], loss)
        for stream, value in {"x": s.x, **s.streams}.items():
            if value.isinf().any():
                assert found["norms"][stream] is None  # the step size before the first step
            else:
                near(found["norms"][stream], value.square().mean().sqrt())
    assert result["layers"][-1]["readout_loss"] == pytest.approx(model(ids, targets).loss.item(), rel=1e-12)
    steps = [b.x - a.x for a, b in itertools.pairwise(states)]
    for layer, row in enumerate(result["layers"]):
        near(row["update_norm"], steps[layer].square().mean().sqrt())
        if layer == 0:
            assert row["cosine"] is None
            continue
        dots = (steps[layer] * steps[layer - 1]).sum(-1) / (steps[layer].norm(dim=-1) * steps[layer - 1].norm(dim=-1))
        near(row["cosine"], dots.mean())


@pytest.mark.parametrize("name", covering_presets())
def test_every_preset_can_be_looked_into(name: str) -> None:
    model = shake(tiny(name))
    result = inside(model, windows())
    attention = model.config.attention
    for row, coefficients in zip(result["layers"], model.coefficients(), strict=True):
        assert row["coefficients"] == coefficients
        streams = model.blocks[0].template.streams
        here = {name for name, stream in streams.items() if stream.start != "later"}
        assert {"x", *here} <= set(row["norms"]) <= {"x", *streams}
        assert math.isfinite(row["readout_loss"])
        assert math.isfinite(row["energy"])
        heads = {"softmax": 3, "entropy": 3, "kl": 3, "hamiltonian": 1}.get(attention)
        if heads is None:
            assert row["entropy"] is None
        else:
            assert len(row["entropy"]) == heads
            assert all(0 < value < math.log(8) for value in row["entropy"])
        assert (row["capped_rows"] is not None) == (attention in ("entropy", "kl"))
        assert (row["bounded_scores"] is not None) == (attention == "hamiltonian")
    console = Console(width=120)
    with console.capture() as capture:
        console.print(depth.text(result))
    assert f"{result['layers'][1]['readout_loss']:.4g}" in capture.get()
    assert "…" not in capture.get()  # no column is cut


def test_wrong_tokens_are_explained() -> None:
    with pytest.raises(InputError, match="9 tokens, but the model's context is 8"):
        inside(tiny(), tokens(2, 10))
    with pytest.raises(InputError, match="vocabulary has ids 0 to 10"):
        inside(tiny(), tokens(2, 9) + 5)


# runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    folder = tmp_path_factory.mktemp("depth")
    make_corpus(folder / "data")
    train(small_run(folder / "data", "entropy-head"), folder / "run", quiet=True)
    return load_run(folder / "run", device="cpu")


def test_a_run_is_measured(run: LoadedRun, tmp_path: Path) -> None:
    """In batches of any size the numbers are those of all windows at once."""
    settings = DepthSettings(windows=5, window_batch=2)
    result = depth.measure(run, settings, quiet=True)
    assert result["tokens"] == 5 * 16
    assert not (run.folder.path / measured.FOLDER / "depth.jsonl").exists()
    text = fixed_windows(corpus_of(run).split("val"), 5, 16, 0)
    whole = inside(run.model, text)
    for a, b in zip(result["layers"], whole["layers"], strict=True):
        assert a["coefficients"] == b["coefficients"]
        for key in ("readout_loss", "update_norm", "energy", "capped_rows", "entropy"):
            near(a[key], b[key])
    again = depth.measure(run, settings, quiet=True)
    assert again == result
    assert depth.measure(run, settings.replace(seed=1), quiet=True)["windows_hash"] != result["windows_hash"]
    assert depth.measure(run, settings.replace(context=8), quiet=True)["tokens"] == 40
    with pytest.raises(InputError, match="context = 17 is longer"):
        depth.measure(run, settings.replace(context=17), quiet=True)
    depth.plot(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_an_interrupted_measurement_continues(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DepthSettings(windows=6, window_batch=2)
    whole = depth.measure(run, settings, quiet=True)
    look = depth._look
    done: list[int] = []

    def once(model: sf.Model, batch: Tensor) -> dict[str, Any]:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(1)
        return look(model, batch)

    monkeypatch.setattr(depth, "_look", once)
    with pytest.raises(KeyboardInterrupt):
        depth.measure(run, settings, quiet=True)

    def counted(model: sf.Model, batch: Tensor) -> dict[str, Any]:
        done.append(1)
        return look(model, batch)

    monkeypatch.setattr(depth, "_look", counted)
    assert depth.measure(run, settings, quiet=True) == whole
    assert len(done) == 3
