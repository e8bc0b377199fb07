"""How fast a run is, and how fast it could be."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from stepformer.model import Model
from stepformer.model.roles import Role, named_roles

# Dense bf16 products a second, from the makers' data sheets (without sparsity).
PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}


def flops_per_token(model: Model) -> float:
    """Floating-point operations of a training step per token: 6 per matrix weight and use, and the attention scores.

    The convention of PaLM (12 L T d for scores and values, no discount for the causal mask); splittings that ask an
    oracle twice count it twice, tables count only where they are the head.
    """
    config = model.config
    total = 0.0
    for i, block in enumerate(model.blocks):
        calls = block.splitting.calls()
        weights = {"attn": 0, "mlp": 0}
        for name, p, role in named_roles(block):
            oracle = name.partition(".")[0]
            if role is Role.MATRIX and oracle in weights and f"blocks.{i}.{name}" not in model.unused_parameters():
                weights[oracle] += p.numel()
        total += sum(6 * weights[oracle] * calls[oracle] for oracle in weights)
        total += 12 * config.context * config.d_model * calls["attn"]
    return total + 6 * config.vocab_size * config.d_model


@lru_cache
def peak_flops(device: torch.device) -> tuple[float, str]:
    """Operations a second this device could do, and how we know: its data sheet, or a product measured now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for word, peak in PEAKS.items():
            if word in name:
                return peak, f"{name} data sheet, bf16"
    size = 512 if device.type == "cpu" else 4096
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = torch.ones(size, size, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        c = a @ b
        c[0, 0].item()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best, f"a product of {size} x {size} matrices, measured"
