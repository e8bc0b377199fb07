"""Loss on uniform random tokens for three forces of one Hamiltonian attention, trained as in the audit's fourth check.

Writes reading_the_future.png beside this file and prints the numbers. Needs matplotlib and a checkout; about a
minute on one core.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import stepformer as sf
from stepformer.diagnostics.audit import GEOMETRY
from stepformer.plugins import load_plugin

HERE = Path(__file__).resolve().parent
STEPS, SEEDS, TAIL = 600, (0, 1, 2), 100
CHANCE = math.log(GEOMETRY["vocab_size"])
FORCES: dict[str, dict[str, Any]] = {
    "whole gradient": {"attention": "published-force"},
    "row": {"force": "row"},
    "query": {"force": "query"},
}


def uniform(generator: torch.Generator, batch: int = 32) -> torch.Tensor:
    return torch.randint(GEOMETRY["vocab_size"], (batch, GEOMETRY["context"] + 1), generator=generator)


def train(seed: int, settings: dict[str, Any]) -> tuple[sf.Model, list[float]]:
    """The audit's fourth check, with every loss kept."""
    model = sf.build("symp-plain-euler", seed=seed, **GEOMETRY, **settings).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    generator = torch.Generator().manual_seed(seed + 2)
    losses = []
    for _ in range(STEPS):
        tokens = uniform(generator)
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def without_a_future(model: sf.Model, seed: int) -> float:
    """The loss when each prediction is made from the prefix alone, as in generation."""
    tokens = uniform(torch.Generator().manual_seed(seed + 1000), batch=256)
    model.eval()
    losses = []
    for t in range(1, tokens.shape[1]):
        logits = model(tokens[:, :t]).logits[:, -1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[:, t]))
    return torch.stack(losses).mean().item()


def main() -> None:
    torch.set_num_threads(1)
    load_plugin(str(HERE.parents[1] / "tests" / "published_force.py"))
    print(f"ln V = {CHANCE:.3f}, ln V / T = {CHANCE / GEOMETRY['context']:.3f}; {STEPS} steps, last {TAIL} averaged")
    print(f"{'force':<16}seed   step 100   step 200   step 300   end     from the prefix alone")
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for (name, settings), colour, style in zip(FORCES.items(), ("C3", "C0", "C1"), ("-", "-", "--"), strict=True):
        curves = []
        for seed in SEEDS:
            model, losses = train(seed, settings)
            curves.append(losses)
            early = "".join(f"{sum(losses[s - 10 : s]) / 10:<11.3f}" for s in (100, 200, 300))
            end = sum(losses[-TAIL:]) / TAIL
            print(f"{name:<16}{seed:<7}{early}{end:<8.3f}{without_a_future(model, seed):.3f}", flush=True)
            axes.plot(losses, color=colour, linestyle=style, alpha=0.15, linewidth=0.8)
        mean = torch.tensor(curves).mean(dim=0)
        axes.plot(mean, color=colour, linestyle=style, linewidth=1.8, label=name)
    floor = CHANCE / GEOMETRY["context"]
    for height, text in ((CHANCE, "ln V: nothing predicted"), (floor, "ln V / T: all but the last target read")):
        axes.axhline(height, color="black", linewidth=0.8, linestyle=":")
        axes.text(STEPS, height + 0.06, text, ha="right", fontsize=9)
    axes.set(xlabel="training step", ylabel="loss on random tokens (nats)", xlim=(0, STEPS), ylim=(0, 3.1))
    axes.legend(frameon=False, loc="center right", title="force")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "reading_the_future.png", dpi=150)


if __name__ == "__main__":
    main()
