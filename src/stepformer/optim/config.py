"""The `[optim]` section: which optimizer trains the parameters, with which rates, schedule and clipping.

Not to be confused with the optimizer that the architecture is made of: that one is `model.template`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from stepformer.base.errors import ConfigError
from stepformer.base.settings import Settings, setting

# Values of keys left unset, by optimizer. Muon and AdamW: the Momentum-Streams recipe, TinyStories column. The step of
# PolarGrad grows with the gradient, so its rate is of another kind. Scion has no AdamW part: all rates are LMO steps.
# The rates of these two were tried at the tiny size only (docs/lab-notebook.md). Those in SCALED hold for 10,000 steps
# of 32 sequences at the small size; for other runs they are multiplied by `rate_factor`.
DEFAULTS: dict[str, dict[str, float | str]] = {
    "muon": {"lr": 0.02, "lr_embedding": 6e-4, "lr_norm": 6e-4, "lr_coefficient": 3e-3, "scaling": "jordan"},
    "adamw": {"lr": 6e-4, "lr_embedding": 6e-4, "lr_norm": 6e-4, "lr_coefficient": 3e-3, "scaling": "none"},
    "polargrad": {"lr": 0.2, "lr_embedding": 6e-4, "lr_norm": 6e-4, "lr_coefficient": 3e-3, "scaling": "none"},
    "trust": {"lr": 0.05, "lr_embedding": 6e-4, "lr_norm": 6e-4, "lr_coefficient": 3e-3, "scaling": "none"},
    "scion": {"lr": 0.05, "lr_embedding": 5e-3, "lr_norm": 2e-3, "lr_coefficient": 3e-3, "scaling": "spectral"},
}
for _name, _values in DEFAULTS.items():
    _values["wd_matrix"] = 0.1 if _name == "adamw" else 0.0
    _values["wd_embedding"] = 0.0 if _name == "scion" else 0.1
    # Five Newton-Schulz steps, Muon's, take Scion 16 % out of its ball and find 0.85 of PolarGrad's nuclear norm.
    _values["polar"] = "polar-express" if _name in ("scion", "polargrad") else "newton-schulz"

SCALED: dict[str, tuple[str, ...]] = {
    "muon": ("lr_embedding", "lr_norm"),
    "polargrad": ("lr_embedding", "lr_norm"),
    "trust": ("lr_embedding", "lr_norm"),
    "adamw": ("lr", "lr_embedding", "lr_norm"),
    "scion": (),
}
OWN = {  # keys that one optimizer alone reads
    "scion": ("radius", "own_init", "embedding_geometry"),
    "trust": (
        *("norm", "lambda_attn", "share_qk", "factor_damping", "factor_every", "probe", "probe_every", "adapt_radius"),
    ),
}
# Two runs whose AdamW rates are known: small takes 6e-4 (the recipe), tiny 6e-3 (docs/lab-notebook.md).
SMALL = {"steps": 10_000, "batch": 32, "width": 768, "depth": 12}
TINY = {"steps": 500, "batch": 32, "width": 128, "depth": 4}
LARGEST = 10.0  # no larger factor has been tried


def without_foreign(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an optimizer as they were stored, less what only others read: their defaults may change."""
    others = foreign(str(values.get("name", "muon")))
    return {key: value for key, value in values.items() if key not in others}


def foreign(name: str) -> set[str]:
    """Settings that this optimizer does not read, another one does."""
    return {key for owner, keys in OWN.items() if owner != name for key in keys}


def rate_factor(steps: int, batch: int, width: int, depth: int) -> float:
    """What AdamW's unset rates are multiplied by: sqrt(batch / steps) (width^2 depth)^(-0.172), 1 at SMALL, 10 at TINY.

    Noise is averaged over batches and over steps, hence the roots; the exponent of the size is what makes the factor
    10 at TINY. Shorter or smaller runs than that stay at 10.
    """

    def size(run: Mapping[str, int]) -> float:
        return run["width"] ** 2 * run["depth"]

    exponent = math.log(LARGEST / math.sqrt(SMALL["steps"] / TINY["steps"])) / math.log(size(SMALL) / size(TINY))
    noise = math.sqrt(SMALL["steps"] / steps * batch / SMALL["batch"])
    return min(noise * (size(SMALL) / size({"width": width, "depth": depth})) ** exponent, LARGEST)


def _usual(key: str, help: str) -> Any:
    """A rate or decay that is usually left unset; its help says what it is then, by optimizer."""
    values: dict[str, list[str]] = {}
    for name, defaults in DEFAULTS.items():
        values.setdefault(f"{defaults[key]:g}{' f' if key in SCALED[name] else ''}", []).append(name)
    texts = [value + ("" if len(values) == 1 else f" {'/'.join(names)}") for value, names in values.items()]
    return setting(None, f"{help} (unset: {', '.join(texts)})", least=0)


@dataclass(frozen=True)
class OptimConfig(Settings):
    """How parameters are trained, role by role. Keys left unset take the value their optimizer usually has."""

    section = "optim"
    unset: ClassVar[frozenset[str]] = frozenset()  # of an instance: the keys that were filled in

    name: Literal["muon", "adamw", "scion", "polargrad", "trust"] = setting(
        "muon", "what steps the block matrices (f below: the factor of length and size in docs/optimizers.md)"
    )
    lr: float | None = _usual("lr", "peak rate of the block matrices; trust: largest radius")
    lr_embedding: float | None = _usual("lr_embedding", "peak rate of token and position tables")
    lr_head: float | None = setting(None, "peak rate of an untied output head (unset: that of the tables)", least=0)
    lr_norm: float | None = _usual("lr_norm", "peak rate of norm gains and biases")
    lr_coefficient: float | None = _usual("lr_coefficient", "peak rate of the learned step coefficients")
    wd_matrix: float | None = _usual("wd_matrix", "decoupled weight decay of the block matrices")
    wd_embedding: float | None = _usual("wd_embedding", "decoupled weight decay of the tables")
    wd_head: float | None = setting(
        None, "decoupled weight decay of an untied head (unset: that of the tables)", least=0
    )
    wd_norm: float = setting(0.0, "decoupled weight decay of norm gains and biases", least=0)
    wd_coefficient: float = setting(0.0, "decoupled weight decay of the coefficients", least=0)
    beta1: float = setting(0.9, "AdamW: memory of the gradient", least=0)
    beta2: float = setting(0.95, "AdamW: memory of its square", least=0)
    eps: float = setting(1e-8, "AdamW: added to the root of the second moment", above=0)
    momentum: float = setting(0.95, "all but adamw: memory of the matrices' gradient (an average)", least=0)
    nesterov: bool = setting(True, "muon, polargrad, trust: look ahead along the momentum")
    momentum_start: float = setting(0.85, "momentum at step 0 when it is warmed up", least=0)
    momentum_warmup: int = setting(0, "steps over which the momentum rises to its value (0: none)", least=0)
    polar: Literal["newton-schulz", "polar-express", "svd"] | None = setting(
        None, "how the polar factor is found (unset: newton-schulz muon/trust, polar-express scion/polargrad)"
    )
    polar_dtype: Literal["auto", "bf16", "fp32", "fp64"] = setting(
        "auto", "what it is computed in (auto: bf16 on CUDA for newton-schulz, else fp32; fp64 with fp64 weights)"
    )
    scaling: Literal["jordan", "rms", "spectral", "none"] | None = setting(
        None,
        "factor of a polar step for an (out, in) matrix: jordan sqrt(max(1, out/in)), rms 0.2 sqrt(max(out, in)), "
        "spectral sqrt(out/in), none 1",
    )
    qkv: Literal["fused", "split", "heads"] = setting(
        "fused", "matrices stacked in one (queries, keys, values): one polar factor, each its own, or each head's"
    )
    embedding_geometry: Literal["row", "sign"] = setting("row", "scion: step of the tables, rows of unit RMS or signs")
    radius: float | None = setting(None, "scion: keep block matrices inside this ball (unset: unconstrained)", above=0)
    own_init: bool = setting(False, "scion: start block matrices and tables on their unit balls")
    norm: Literal["spectral", "frobenius"] = setting(
        "spectral", "trust: bound the worst case (the polar factor, whitened) or the average change (L^-1 M R^-1)"
    )
    lambda_attn: float = setting(1.0, "trust: what the change of attention rows counts beside that of streams", above=0)
    share_qk: float = setting(1.0, "trust: what queries and keys count in the budget, beside 1 for the others", above=0)
    factor_damping: float = setting(0.1, "trust: added to the factors, times their mean eigenvalue", least=0)
    factor_every: int = setting(50, "trust: steps between inversions of the factors", least=1)
    probe: int = setting(2048, "trust: tokens that are looked at for statistics and radius", least=1)
    probe_every: int = setting(10, "trust: steps between two looks", least=1)
    adapt_radius: bool = setting(True, "trust: find the radius below the schedule's rate; false: it is that rate")
    clip: float = setting(1.0, "largest global gradient norm (0: no clipping)", least=0)
    clip_coefficients: bool = setting(True, "coefficients take part in the clipping and its norm")
    schedule: Literal["cosine", "wsd", "constant"] = setting("cosine", "wsd: warm-up, stable, linear decay")
    warmup: int | None = setting(None, "steps of linear warm-up (unset: a tenth of all)", least=0)
    legacy_warmup: bool = setting(False, "warm up by t/W, whose first step is lost, instead of (t+1)/W")
    floor: float = setting(0.1, "last rate as a fraction of the peak", least=0)
    decay_start: int | None = setting(None, "wsd: first step of the decay (unset: five sixths of all)", least=0)
    sam: Literal["off", "always", "decay"] = setting("off", "sharpness-aware steps; decay: only there (SAWD with wsd)")
    rho: float = setting(0.05, "sam: how far the weights are perturbed", above=0)

    def __post_init__(self) -> None:
        unset = {key: value for key, value in DEFAULTS.get(self.name, {}).items() if getattr(self, key) is None}
        for key, value in unset.items():
            object.__setattr__(self, key, value)
        object.__setattr__(self, "unset", frozenset(unset))
        super().__post_init__()
        for key in (
            "lr",
            "lr_embedding",
            "lr_norm",
            "lr_coefficient",
            "wd_matrix",
            "wd_embedding",
            "lr_head",
            "wd_head",
        ):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, float(getattr(self, key)))

    def problems(self) -> list[str]:
        problems = []
        for key in ("beta1", "beta2", "momentum", "momentum_start"):
            if getattr(self, key) >= 1:
                problems.append(f"{key} = {getattr(self, key)} should be below 1.")
        for key in ("lr", "lr_embedding", "lr_head", "lr_norm", "lr_coefficient"):
            if (getattr(self, key) or 0) > 100:
                problems.append(f"{key} = {getattr(self, key):g} is no sensible rate: it should be at most 100.")
        if self.floor > 1:
            problems.append(f"floor = {self.floor} should be at most 1: it is a fraction of the peak rate.")
        if self.sam == "decay" and self.schedule != "wsd":
            problems.append("sam = 'decay' needs schedule = 'wsd': no other schedule has a decay phase.")
        if self.polar == "svd" and self.polar_dtype == "bf16":
            problems.append("polar = 'svd' cannot be computed in bf16: choose polar_dtype = 'auto', 'fp32' or 'fp64'.")
        if self.radius is not None and self.lr is not None and self.lr > self.radius:
            problems.append(f"lr = {self.lr} is larger than radius = {self.radius}: a step would leave the ball.")
        if self.decay_start is not None and self.schedule != "wsd":
            problems.append("decay_start belongs to schedule = 'wsd'.")
        for owner, keys in OWN.items():
            problems += [
                f"{f.name} = {getattr(self, f.name)!r} belongs to name = '{owner}'; this is '{self.name}'."
                for f in fields(self)
                if f.name in keys and self.name != owner and getattr(self, f.name) != f.default
            ]
        if self.name == "trust" and (self.qkv, self.scaling) != ("fused", "none"):
            problems.append("name = 'trust' takes every head by itself and sizes its steps: leave qkv and scaling out.")
        if self.radius is not None and self.wd_matrix and self.name == "scion":
            problems.append("radius and wd_matrix both pull the matrices inward: give one of them.")
        return problems

    def for_run(self, *, steps: int, batch: int, width: int, depth: int) -> OptimConfig:
        """This section with its unset rates for such a run; `unset` still says which they are."""
        factor = rate_factor(steps, batch, width, depth)
        found = copy.copy(self)
        for key in self.unset & {*SCALED[self.name]}:
            object.__setattr__(found, key, float(f"{float(DEFAULTS[self.name][key]) * factor:.3g}"))
        return found

    def with_rates_of(self, other: OptimConfig) -> OptimConfig:
        """This section with its unset keys as in another of the same optimizer, and none unset any more."""
        shared = {key: getattr(other, key) for key in self.unset} if other.name == self.name else {}
        return self.replace(**shared)

    def rate(self, role: str) -> float:
        """Peak rate of a role; a head without one has that of the tables, and so have arrays of a depth rule."""
        own = getattr(self, "lr" if role == "matrix" else f"lr_{role}", None)
        return self.rate("embedding") if own is None else float(own)

    def decay(self, role: str) -> float:
        own = getattr(self, f"wd_{role}", None)
        return self.decay("embedding") if own is None else float(own)

    def rates_text(self, without: Collection[str] = ()) -> str:
        """Peak rate and decay of every role, and which of them were not set; some keys may be left out."""
        words = []
        head = ["head"] if (self.lr_head, self.wd_head) != (None, None) else []
        for role in ("matrix", "embedding", *head, "norm", "coefficient"):
            rate, decay = "lr" if role == "matrix" else f"lr_{role}", f"wd_{role}"
            marks = ["*" if key in self.unset else "" for key in (rate, decay)]
            decays = f"{self.decay(role):g}{marks[1]}" if self.decay(role) and decay not in without else ""
            if rate not in without:
                words.append(f"{rate} {self.rate(role):g}{marks[0]}" + (f" (decay {decays})" if decays else ""))
            elif decays:
                words.append(f"{decay} {decays}")
        found = ", ".join(words)
        return f"{found} (*: not set, found by the rule of docs/optimizers.md)" if "*" in found else found


class Schedule:
    """The factor f(t) of every peak rate, for the 0-based step t of S steps with W steps of warm-up.

    A pure function of the step, so that a resumed run has nothing to remember:

    warm-up   f = (t+1)/W for t < W  (legacy: t/W, which loses the first step)
    cosine    f = floor + (1 - floor) (1 + cos(pi (t-W)/(S-W))) / 2
    wsd       f = 1 until D, then 1 - (1 - floor) (t-D)/(S-D)
    """

    def __init__(self, config: OptimConfig, steps: int) -> None:
        self.config, self.steps = config, steps
        self.warmup = min(steps, max(1, steps // 10)) if config.warmup is None else config.warmup
        self.decay_start = round(steps * 5 / 6) if config.decay_start is None else config.decay_start
        problems = []
        if self.warmup > steps:
            problems.append(f"[optim] warmup = {self.warmup} is longer than the run of {steps} steps.")
        unset = " (unset: 5/6 of all)" if config.decay_start is None else ""
        if config.schedule == "wsd" and not self.warmup <= self.decay_start <= steps:
            problems.append(
                f"[optim] decay_start = {self.decay_start}{unset} should lie between "
                f"the end of the warm-up, {self.warmup}, and the length of the run, {steps}."
            )
        if problems:
            raise ConfigError(problems)

    def factor(self, t: int) -> float:
        """What multiplies every peak rate at step t."""
        config, steps, warmup = self.config, self.steps, self.warmup
        if t < warmup:
            return (t if config.legacy_warmup else t + 1) / warmup
        if config.schedule == "cosine":
            share = min(1.0, (t - warmup) / max(1, steps - warmup))
            return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * share))
        if config.schedule == "wsd" and t >= self.decay_start:
            share = min(1.0, (t - self.decay_start) / max(1, steps - self.decay_start))
            return 1 - (1 - config.floor) * share
        return 1.0

    def momentum(self, t: int) -> float:
        """The momentum of the matrix optimizer at step t; AdamW keeps its betas."""
        config = self.config
        if t >= config.momentum_warmup:
            return config.momentum
        return config.momentum_start + (config.momentum - config.momentum_start) * t / config.momentum_warmup

    def perturbs(self, t: int) -> bool:
        """Whether step t is sharpness-aware."""
        return self.config.sam == "always" or (self.config.sam == "decay" and t >= self.decay_start)
