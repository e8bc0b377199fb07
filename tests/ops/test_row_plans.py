"""Plans of generated passes against the blocks as they are written, whole models in fp64, and what their programs are.

1e-12 of each gradient's norm for sums in another order (1e-14 measured), and 1e-14 of the largest one for those that
are themselves the rounding of a sum that nearly cancels, such as that of gamma before a norm which forgets it.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton")
import forked
import stepformer as sf
from architectures import covering_presets
from helpers import shake, tiny, tokens
from row_cases import FP32, FP64, SINGLE, SIZE, gradients
from row_references import run_plan
from stepformer.model.engines import fused
from stepformer.ops import kernels
from stepformer.ops.row_programs import extract
from stepformer.ops.symbols import leaf
from stepformer.rules import State
from stepformer.rules.first_order import Nesterov

pytestmark = pytest.mark.usefixtures("interpreted")
ROOT = Path(__file__).resolve().parents[2]
EXTRAS: list[dict[str, Any]] = [
    {"value_residual": "free"}, {"value_tables": True}, {"embedding_skip": True}, {"positions": "rotary"},
    {"qk_norm": True},
    {"scale": "scalar"}, {"denseformer": True}, {"unet": True},
    {"norm": "rmsnorm"}, {"bias": True},
]  # fmt: skip


def check_plan(model: sf.Model, rounding: float = 1e-14) -> None:
    """Logits and gradients by the plan in fp64; `rounding` is what a gradient may miss, of the largest one."""
    assert fused.structural(model) is None
    ids = tokens(2, 8, 17)
    with kernels.off():
        expected = model(ids).logits
        slopes = gradients(model, expected)
        found = run_plan(model, ids)
        own = gradients(model, found)
    assert (found - expected).norm() <= FP64 * expected.norm()
    assert own.keys() == slopes.keys()
    largest = max(float(g.norm()) for g in slopes.values())
    for name, slope in slopes.items():
        error = float((own[name] - slope).norm())
        assert error <= FP64 * float(slope.norm()) + rounding * largest, name


def rounding_of(model: sf.Model) -> float:
    """Inverse roots of covariances that are nearly singular, and Newton-Schulz, which blows up small singular values
    by 3.4^5, carry a rounding into every gradient: 1e-14 of the largest was seen, 1e-12 is allowed."""
    return 1e-12 if model.config.template in ("shampoo", "soap", "muon", "ortho") else 1e-14


@pytest.mark.parametrize("name", sf.presets())
def test_plans_of_all_presets(name: str) -> None:
    model = shake(tiny(name, **SIZE))
    check_plan(model, rounding_of(model))


def with_extras(name: str, wanted: list[dict[str, Any]]) -> dict[str, Any]:
    """Those of the wanted changes that an architecture does not refuse."""
    config, changes = sf.preset(name).config.replace(**SIZE), {}
    for change in wanted:
        try:
            config = config.replace(**change)
        except sf.ConfigError:
            continue
        changes |= change
    return changes


@pytest.mark.parametrize("name", covering_presets())
def test_plans_of_all_presets_with_extras(name: str) -> None:
    """Everything at once that an architecture takes."""
    changes = with_extras(name, EXTRAS)
    assert changes
    model = shake(tiny(name, **SIZE, **changes))
    check_plan(model, rounding_of(model))


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: next(iter(extra)))
@pytest.mark.parametrize("name", sf.presets())
def test_plans_of_all_presets_with_one_extra(name: str, extra: dict[str, Any]) -> None:
    changes = with_extras(name, [extra])
    if not changes:
        pytest.skip("it refuses this")
    model = shake(tiny(name, **SIZE, **changes))
    check_plan(model, rounding_of(model))


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned steps": ("vanilla", {"learned_steps": True, "alpha": 0.7, "beta": 0.4}),
    "cox-matthews": ("symp-etd-ab2", {"etd": "cox-matthews"}),
    "alpha of Nesterov": ("symp-plain-euler", {"memory": "nesterov"}),
    "another clock": ("symp-exp-euler", {"t0": 2.5}),
    "one ratio, looking ahead": ("symp-ab2", {"history": "constant", "lookahead": True, "step_gradient": True}),
    "momentum at zero": ("symp-presymp-euler", {"aux_init": "zero", "damping": "linear"}),
    "a velocity of the MLP's own": ("symp-exp-euler", {"mlp_step": "C", "damping": "log", "lookahead": True}),
    "along the attention's motion": ("symp-exp-euler", {"mlp_step": "A"}),
    "along its motion, with a past": ("linear-symp-ab2", {"mlp_step": "A", "step_gradient": True}),
    "a last drift": ("symplectic-euler", {"final_drift": True}),
    "a value residual and two calls": ("verlet-ama", {"value_residual": "unit", "embedding_skip": True}),
    "half of the first values": ("imex-k2-mam", {"value_residual": "fixed"}),
    "value tables and two calls": ("verlet-ama", {"value_tables": True}),
    "value tables after a value residual": ("yurii", {"value_tables": True, "value_residual": "free"}),
    "strang, tables": ("tables", {"splitting": "strang", "order": "mam"}),
    "parallel, tables": ("tables", {"splitting": "parallel", "embedding_skip": True}),
    "strang, adamw": ("adamw", {"splitting": "strang", "order": "mam"}),
    "strang, muon": ("muon", {"splitting": "strang", "order": "ama"}),
    "strang, soap": ("soap", {"splitting": "strang", "order": "mam"}),
    "parallel, soap": ("soap", {"splitting": "parallel"}),
    "parallel, adam": ("adam", {"splitting": "parallel", "norm": "rmsnorm", "embedding_skip": True}),
    "vectors on the answers": ("yurii", {"scale": "layerscale", "splitting": "strang", "order": "ama"}),
    "a vector on both answers": ("vanilla", {"scale": "layerscale", "splitting": "parallel"}),
    "scaled answers, imex": ("imex-k2-ama", {"scale": "rezero"}),
    "scaled answers, the last one idle": ("symplectic-euler", {"scale": "layerscale"}),
    "every second output": ("yurii", {"denseformer": True, "dilation": 2, "n_layer": 5}),
    "an average after every second layer": ("vanilla", {"denseformer": True, "period": 2, "unet": True, "n_layer": 5}),
    "averages of Hamiltonian layers": ("symp-etd-ab2", {"denseformer": True, "unet": True}),
    "weights of each token": ("hyper", {"dynamic": True}),
    "of two streams, for both oracles at once": ("hyper", {"dynamic": True, "n": 2, "splitting": "parallel"}),
    "by RMSNorm": ("hyper", {"dynamic": True, "n": 3, "norm": "rmsnorm", "weight_sharing": "oracles"}),
    "one stream": ("hyper", {"n": 1}),
    "permutations": ("mhc", {"mixing": "permutations", "n": 3}),
    "parallel, constrained": ("mhc", {"n": 2, "splitting": "parallel", "tables": 1}),
    "normalised answers, two calls": ("verlet-ama", {"output_norm": True, "norm": "rmsnorm"}),
    "normalised answers among streams": ("mhc", {"output_norm": True, "n": 3, "tables": 1, "qk_norm": True}),
    "a norm of both answers": ("vanilla", {"output_norm": True, "splitting": "parallel", "scale": "rezero"}),
    "a soft cap": ("yurii", {"logit_softcap": 3.0}),
    "documents": ("yurii", {"document_separator": 3}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_plans_with_options(case: str) -> None:
    name, changes = OTHERS[case]
    model = shake(tiny(name, **{**SIZE, **changes}))
    check_plan(model, rounding_of(model))


@pytest.mark.parametrize("layers", [set(), {1}, {0, 2}])
def test_plans_of_hybrids(layers: set[int]) -> None:
    check_plan(shake(tiny("yurii", **SIZE)).hybrid(layers=layers))
    around = {"scale": "scalar", "denseformer": True, "unet": True}
    check_plan(shake(tiny("yurii", **SIZE, **around)).hybrid(layers=layers))


# what a user writes


def documented(page: str, number: int) -> None:
    """Run a Python block of a page of the documentation."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
    exec(compile(blocks[number], f"<{page}>", "exec"), {"__name__": __name__})


PLUGINS: dict[str, tuple[str, int, list[tuple[str, dict[str, Any]]]]] = {
    "qhm": (
        "write-your-own-rule", 0,
        [("vanilla", {"template": "qhm", **more}) for more in (
            {}, {"splitting": "parallel"}, {"splitting": "strang", "order": "mam"},
            {"embedding_skip": True, "value_residual": "unit"},
        )],
    ),
    "sigmoid": (
        "write-your-own-attention", 0,
        [("yurii", {"attention": "sigmoid"}), ("adam", {"attention": "sigmoid", "value_residual": "free"})],
    ),
    "kick-drift": (
        "write-your-own-attention", 2,
        [("symp-plain-euler", {"template": "kick-drift"}), ("linear-symp-ab2", {"template": "kick-drift"})],
    ),
    "echo": (
        "write-your-own-extra", 0,
        [(name, {"extras": ["echo"], "echo_start": 0.1}) for name in ("yurii", "vanilla", "symp-ab2", "soap")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_the_documentation_writes_is_fused(plugin: str, registries: None) -> None:
    """By the plan in fp64, and the first of them by kernels in fp32: 1e-5 for sums in another order."""
    page, number, cases = PLUGINS[plugin]
    documented(page, number)
    for name, changes in cases:
        model = shake(tiny(name, **SIZE, **changes))
        check_plan(model, rounding_of(model))
    name, changes = cases[0]
    model, ids = shake(tiny(name, dtype=SINGLE, **SIZE | {"n_layer": 1}, **changes), scale=0.1), tokens(1, 3, 17)
    with kernels.off():
        expected = model(ids).logits
    assert (model(ids).logits - expected).norm() <= FP32 * expected.norm()


# texts


TEXTS = """
import json, sys
import stepformer as sf
from stepformer.ops import row_passes
from stepformer.ops.row_launching import forward_tile, backward_tile

def texts(name, **changes):
    model = sf.build(name, seed=0, n_layer=3, n_head=2, d_model=16, context=8, vocab_size=17, **changes)
    found = []
    for step in model.plan().passes():
        own = row_passes.compiled(step.program.text, step.handed, step.borrows)
        needed = tuple(own.names)
        backward = own.backward(dict.fromkeys(own.reached, "f"), needed, tuple("f" for _ in needed))
        printed = [own.forwards[keep].at(forward_tile(16))[0].text for keep in (True, False)]
        printed.append(backward.kernel.at(backward_tile(16, 4, 2, 8))[0].text)
        found.append([step.program.text, *printed])
    return [found, model.plan(ready=True).numbers.key]
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [["yurii"], pytest.param(["yurii", "symp-etd-ab2"], marks=pytest.mark.slow)], ids=len)
def test_texts_do_not_depend_on_what_was_traced_before(names: list[str]) -> None:
    """A fresh process writes the same programs and kernels, though many others were traced in this one."""
    alive = [tiny(name, **SIZE) for name in sf.presets()[::4]]
    assert all(fused.structural(model) is None for model in alive)
    scope: dict[str, Any] = {}
    exec(TEXTS, scope)
    code = TEXTS + f"print(json.dumps({{name: texts(name) for name in {names[::-1]!r}}}))"
    done = forked.python(code, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    fresh = json.loads(done.stdout)
    for name in names:
        assert scope["texts"](name) == fresh[name], name


def test_a_mean_of_what_is_carried() -> None:
    """A number per token from before the oracle's answer: it is kept, or computed again."""

    class Mine(Nesterov):
        def kick(self, s: State, c: Any, g: Tensor, scale: float = 1.0) -> State:
            return s.replace(v=c.beta * s.v + g - 0.1 * s.v.mean(dim=-1, keepdim=True))

    model = shake(tiny("yurii", **SIZE))
    for block in model.blocks:
        block.template.__class__ = Mine
    check_plan(model)


def test_the_order_of_a_sum_is_ones_own() -> None:
    """The same program whether or not somebody has added, or multiplied, the other way round before."""

    def text(swapped: bool) -> str:
        a, b, c = (leaf("row", f"{name} {marker}") for name in "abc")
        first = (b + a) * (c * b) if swapped else (a + b) * (b * c)
        return extract([first + c], [], lambda n: False).program.text

    marker = "alone"
    alone = text(False)
    marker = "after"
    alive = [leaf("row", f"{name} after") for name in "abc"]
    kept = [alive[1] + alive[0], alive[2] * alive[1]]
    assert text(False) == alone
    assert len(kept) == 2


def test_the_same_rule_in_another_layer_is_the_same_program() -> None:
    plan = tiny("yurii", **{**SIZE, "n_layer": 6}).plan()
    assert len(plan.passes()) == 13
    assert len({step.program.text for step in plan.passes()}) <= 5


def test_passes_read_and_write_no_more_rows_than_they_must() -> None:
    """Between two answers gradient descent moves x; a momentum rule x and v, and reads what it has moved. Of four
    streams each is read and written once, all numbers that weigh them beside it."""
    rows = {
        name: [(step.program.inputs["row"], len(step.program.outputs)) for step in tiny(name, **SIZE).plan().passes()]
        for name in ("vanilla", "yurii", "adam", "hyper")
    }
    assert rows["vanilla"] == [(1, 1), *[(2, 2)] * 5, (2, 1)]
    assert rows["yurii"] == [(2, 1), *[(3, 3)] * 5, (3, 1)]
    assert rows["adam"][1:-1] == [(4, 4)] * 5
    assert rows["hyper"] == [(1, 1), (2, 5), *[(5, 5)] * 4, (5, 1)]
    assert math.prod(rows["adam"][-1]) == 4
