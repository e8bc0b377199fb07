"""What every architecture computes, as numbers that a change of structure must reproduce.

`python tests/support/unchanged.py` adds new architectures to `tests/recorded/architectures.json`, without digests if
this machine is not the one that recorded the others. `--anew` writes all of them: that is right only where the
mathematics is meant to change, and the commit says why.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stepformer as sf

RECORDED = Path(__file__).parents[1] / "recorded" / "architectures.json"
SIZE: dict[str, Any] = {"n_layer": 3, "n_head": 2, "d_model": 16, "context": 12, "vocab_size": 23}
EXTRAS: dict[str, dict[str, Any]] = {
    "value-residual": {"value_residual": "free"},
    "embedding-skip": {"embedding_skip": True, "embedding_skip_start": 0.1},
    "soft-cap": {"logit_softcap": 2.0},
    "documents": {"document_separator": 5},
    "positions": {"positions": "rotary", "qk_norm": True},
    "plain-norms": {"norm": "rmsnorm", "bias": True, "mlp": "swiglu"},
    "all": {
        "value_residual": "unit",
        "embedding_skip": True,
        "logit_softcap": 2.0,
        "document_separator": 5,
        "positions": "rotary",
        "qk_norm": True,
    },
}
WITH_EXTRAS = ("vanilla", "yurii", "adam", "muon", "verlet-ama", "imex-k2-mam", "symp-exp-euler", "linear", "entropy")


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every preset, and some of them with every extra that they accept."""
    found: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in sf.presets()}
    for name in ("symp-etd-ab2", "linear-symp-etd-ab2"):  # what stored runs of these names have
        found[f"{name} cox-matthews"] = (name, {"etd": "cox-matthews"})
    for name in WITH_EXTRAS:
        for extra, settings in EXTRAS.items():
            try:
                sf.model_config(name, **SIZE, **settings)
            except sf.ConfigError:
                continue
            found[f"{name} {extra}"] = (name, settings)
    return found


def machine() -> dict[str, str]:
    """Where these give the same bits."""
    return {"torch": torch.__version__, "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}


def facts(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The hash of the config, names, and of logits and gradients of one batch digest, sum and norm; greedy tokens."""
    model = sf.build(name, seed=7, dtype=torch.float64, **SIZE, **settings)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():  # off the zeros and ones that much of it starts at
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
    tokens, targets = torch.randint(SIZE["vocab_size"], (2, 2, SIZE["context"]), generator=generator)
    out = model(tokens, targets)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    written = model.generate(tokens[:, :4].tolist(), max_new_tokens=8, temperature=0.0)
    return {
        "hash": model.config.hash,
        "without gradient": [n for n, p in model.named_parameters() if p.grad is None],
        "logits": _summary(out.logits.detach()),
        "gradients": {name: _summary(gradient) for name, gradient in gradients.items()},
        "greedy": written.tokens,
    }


def _summary(tensor: Tensor) -> list[Any]:
    digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
    return [digest, tensor.sum().item(), tensor.norm().item()]


def record(*, anew: bool) -> None:
    torch.set_num_threads(1)
    known: dict[str, Any] = {} if anew else json.loads(RECORDED.read_text())
    there, own = known.get("architectures", {}), known.get("machine", machine())
    found = {case: there[case] if case in there else facts(*of) for case, of in cases().items()}
    if own != machine():
        for case in found.keys() - there.keys():
            for summary in (found[case]["logits"], *found[case]["gradients"].values()):
                summary[0] = None
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(value)}" for case, value in found.items())
    RECORDED.write_text(f'{{"machine": {json.dumps(own)},\n"architectures": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    record(anew="--anew" in sys.argv[1:])
    sys.stdout.write(f"{len(cases())} architectures in {RECORDED}\n")
