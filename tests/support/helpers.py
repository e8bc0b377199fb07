"""Shared geometry, weights and the table of template x splitting pairs that have meaning."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

import stepformer as sf
from draws import seeded, shifted
from stepformer.extras.documents import within_documents
from stepformer.measure.diagnostics.audit import audit
from stepformer.oracles import Call, fresh_call
from stepformer.oracles.constrained import ConstrainedAttention

short_audit = inspect.unwrap(audit)  # which trains for fewer steps than users may ask for
TINY: dict[str, Any] = {"n_layer": 2, "n_head": 3, "d_model": 12, "context": 8, "vocab_size": 11}


def tiny(
    name: str = "vanilla", *, seed: int | None = 0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> sf.Model:
    """A two-layer model of width 12 with three heads, fp64 unless told otherwise."""
    return sf.build(name, seed=None if seed is None else shifted(seed), dtype=dtype, **{**TINY, **overrides})


def tokens(batch: int = 2, time: int = 8, vocab: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (batch, time), generator=seeded(seed))


def shake(model: sf.Model, scale: float = 0.3, seed: int = 0) -> sf.Model:
    """Move every parameter off its initial value, so that no fault hides behind a zero or a one."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(scale * noise.to(parameter.dtype))
    return model


def copy_shared(source: sf.Model, target: sf.Model, rename: dict[str, str] | None = None) -> None:
    """Give `target` every parameter of `source` that it also has, by name (after renaming)."""
    wanted = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            for old, new in (rename or {}).items():
                name = name.replace(old, new)
            if name in wanted and wanted[name].shape == parameter.shape:
                wanted[name].copy_(parameter)


# Which pairs have meaning, written out from the catalogue and not from the code.
STRANG = [{"splitting": "strang", "order": order} for order in ("ama", "mam")]
BASIC = [{"splitting": "parallel"}, {"splitting": "lie-trotter"}, *STRANG]


def imex(*ks: int) -> list[dict[str, Any]]:
    return [
        {"splitting": "imex", "order": order, "k": k, "velocity_norm": norm}
        for order in ("ama", "mam")
        for k in ks
        for norm in ("once", "every")
    ]


SYMPLECTIC = [{"splitting": "symplectic-euler", "final_drift": drift} for drift in (False, True)]
ACCEPTED: list[dict[str, Any]] = [
    {"template": template, **splitting}
    for template, splits in {
        **dict.fromkeys(("gd", "adam", "adamw", "rmsprop", "muon", "ortho", "soap", "shampoo"), BASIC),
        "heavy-ball": BASIC + imex(1) + SYMPLECTIC,
        "nesterov": BASIC + imex(1, 2, 3) + SYMPLECTIC,
        "triple-momentum": BASIC + imex(1, 2, 3),
        "tables": BASIC,
        "attnres": BASIC[:2],
        "hyper": [{**split, **more} for split in BASIC[:2] for more in ({}, {"dynamic": True, "n": 3, "tables": 1})],
        "mhc": [{**split, **more} for split in BASIC[:2] for more in ({}, {"mixing": "permutations", "tables": 2})],
    }.items()
    for splitting in splits
]
INTEGRATORS = ("plain-euler", "presymp-euler", "exp-euler", "conformal-euler", "ab2", "etd-ab2")
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"template": template, "splitting": splitting}, "integrates the two fields")
        for template in INTEGRATORS
        for splitting in ("parallel", "lie-trotter", "strang", "imex", "symplectic-euler")
    ),
    *(
        ({"template": template, "attention": attention, "splitting": splitting}, "brings its own integrator")
        for template in INTEGRATORS
        for attention in ("hamiltonian", "linear-hamiltonian")
        for splitting in ("parallel", "strang", "imex", "symplectic-euler")
    ),
    *(
        ({"template": template, "attention": attention}, "does not integrate them")
        for template in ("gd", "nesterov", "adam", "muon")
        for attention in ("hamiltonian", "linear-hamiltonian")
    ),
    *(
        ({"template": template, "splitting": splitting}, "works on a velocity stream")
        for template in (
            *("gd", "adam", "adamw", "rmsprop", "muon", "ortho", "soap", "shampoo", "tables"),
            *("hyper", "mhc", "attnres"),
        )
        for splitting in ("imex", "symplectic-euler")
    ),
    ({"template": "tables", "aux_init": "zero"}, "has no tables"),
    *(
        ({"template": name, "splitting": "strang"}, "gives each oracle call its own weights")
        for name in ("hyper", "mhc")
    ),
    *(
        ({"template": template, key: value}, "acts on x, and template")
        for template in ("hyper", "mhc", "attnres")
        for key, value in (("embedding_skip", True), ("scale", "rezero"), ("denseformer", True), ("unet", True))
    ),
    ({"template": "mhc", "mixing": "permutations", "n": 5}, "use n up to 4"),
    ({"template": "hyper", "n": 2, "tables": 2}, "use fewer tables than n"),
    ({"template": "attnres", "splitting": "strang"}, "keeps the answer of every oracle call"),
    ({"template": "heavy-ball", "splitting": "imex", "k": 2}, "repeats itself"),
    ({"template": "triple-momentum", "splitting": "symplectic-euler"}, "delta"),
    *(
        ({"template": "nesterov", "splitting": splitting, "order": "mam"}, "has no meaning here")
        for splitting in ("lie-trotter", "parallel", "symplectic-euler")
    ),
    ({"template": "nesterov", "splitting": "strang", "k": 2}, "has no meaning here"),
    ({"template": "nesterov", "splitting": "imex", "k": 0}, "below its minimum 1"),
    ({"template": "nesterov", "splitting": "lie-trotter", "final_drift": True}, "has no meaning here"),
]


def pair_id(pair: dict[str, Any]) -> str:
    return "-".join(str(value) for value in pair.values())


def in_documents(ids: Tensor, separator: int = 0) -> Call:
    """The call of a forward pass whose tokens see those of their own document alone."""
    return within_documents(fresh_call(ids), ids == separator, torch.zeros_like(ids[:, 0]))


def served(attention: ConstrainedAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    """Whether a kernel gathers for this call of a constrained attention."""
    fast = ConstrainedAttention.attend.versions  # type: ignore[attr-defined]
    return any(version.serves(attention, q, k, v, q[..., 0], call) for version in fast)
