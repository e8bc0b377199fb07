"""What the papers print: sizes, settings and values of their runs; not written from the recipes."""

from __future__ import annotations

import re
from typing import Any

V = 50_304
PAPERS = {
    "yuriiformer": "zimin2026yuriiformer",
    "momentum": "gai2026momentum",
    "sympformer": "stein2026sympformer",
    "speed": "shortcuts",
}
# Per layer at width d: learned scalars, auxiliary norms; and whether a stream starts from tables of its own.
EXTRAS: dict[str, tuple[int, int, bool]] = {
    "gd-euler": (0, 0, False),
    "vanilla": (0, 0, False),
    "polyak-euler": (2, 1, True),
    "hb": (4, 2, True),
    "nesterov-euler": (3, 1, True),
    "yurii": (6, 2, True),
    "symplectic-euler": (5, 2, True),
    "imex": (5, 1, True),
    "imex-ln": (5, 2, True),
    "verlet": (5, 2, True),
    "tmm": (8, 2, True),
    "tmm-zero": (8, 2, False),
    "adam": (6, 2, True),
    "adamw": (8, 2, True),
    "rmsprop": (4, 2, False),
    "muon": (4, 2, True),
    "ortho": (2, 2, False),
    "soap": (6, 2, True),
    "shampoo": (4, 2, False),
    "symp-plain-euler": (6, 2, False),  # h_x, h_y, alpha; mu, beta, gamma
    "symp-presymp-euler": (7, 2, False),  # h_x, h_y, c_log, c_lin; mu, beta, gamma
    "symp-exp-euler": (7, 2, False),
    "symp-ab2": (7, 2, False),
    "symp-etd-ab2": (7, 2, False),
    "linear": (1, 0, False),
    "linear-yurii": (7, 2, True),
    "linear-symp-plain-euler": (6, 2, True),
    "linear-symp-conformal-euler": (7, 2, True),
    "linear-symp-presymp-euler": (7, 2, False),  # by the text: y_0 = 0
}
# Scalars per layer that a recipe's own model options add: the look-ahead; lambda of the values; two of the skip.
MORE_SCALARS = {
    "sympformer-table-1-hamiltonian": 1,
    "sympformer-table-3-presymp-euler": 1,
    "speed-value-residual": 1,
    "speed-momentum-warmup": 1,
    "speed": 3,
    "speed-public": 3,
}
# YuriiFormer, Table 5: best and final validation loss, training loss at step 10,000.
TABLE_5 = {
    "gd-euler": (1.107, 1.113, 0.962),
    "vanilla": (1.106, 1.114, 0.985),
    "nesterov-euler": (1.101, 1.112, 0.953),
    "yurii": (1.078, 1.090, 0.896),
    "polyak-euler": (1.099, 1.110, 0.933),
    "hb": (1.083, 1.096, 0.899),
    "symplectic-euler": (1.080, 1.092, 0.916),
    "imex-k1-mam": (1.083, 1.095, 0.912),
    "imex-k1-ama": (1.086, 1.097, 0.929),
    "imex-ln-k1-mam": (1.112, 1.123, 1.008),
    "imex-ln-k1-ama": (1.078, 1.091, 0.892),
    "verlet-mam": (1.077, 1.090, 0.886),
    "verlet-ama": (1.074, 1.088, 0.874),
    "imex-k2-mam": (1.081, 1.096, 0.921),
    "imex-k2-ama": (1.078, 1.088, 0.921),
    "imex-ln-k2-mam": (1.097, 1.104, 0.966),
    "imex-ln-k2-ama": (1.070, 1.084, 0.884),
}
# YuriiFormer, Table 3: best and final, small; best and final, medium.
TABLE_3 = {
    "gd-euler": (3.014, 3.023, 2.770, 2.775),
    "polyak-euler": (2.965, 2.972, 2.730, 2.734),
    "nesterov-euler": (2.959, 2.966, 2.726, 2.731),
    "vanilla": (2.990, 2.998, 2.758, 2.764),
    "hb": (2.925, 2.931, 2.705, 2.710),
    "yurii": (2.920, 2.926, 2.702, 2.707),
}
# YuriiFormer, Table 4, in percent: HellaSwag and ARC-Easy with 10 and 25 shots, then with none; small, then medium.
TABLE_4 = {
    "gd-euler": (29.9, 39.8, 30.2, 38.5, 34.7, 46.0, 34.4, 40.5),
    "polyak-euler": (30.9, 41.3, 30.5, 39.8, 36.3, 48.2, 36.1, 43.4),
    "nesterov-euler": (31.2, 41.6, 30.5, 41.2, 36.3, 48.0, 35.4, 43.5),
    "vanilla": (30.0, 40.5, 29.7, 39.4, 35.5, 45.4, 35.2, 42.6),
    "hb": (31.6, 42.5, 31.2, 41.1, 37.1, 49.0, 36.8, 44.0),
    "yurii": (31.8, 42.6, 31.2, 41.1, 36.8, 48.5, 36.5, 45.7),
}
# Momentum Streams, persistence on OpenWebText: as the authors' files have it, and with the 64th singular values.
PERSISTENCE = {
    ("", "vanilla"): (20.42, 16.25),
    ("", "adam"): (25.21, 19.20),
    ("", "adamw"): (24.66, 18.96),
    ("", "yurii"): (14.44, 10.35),
    ("", "tmm"): (9.12, 6.11),
    ("-sam", "yurii"): (11.25, 8.19),
    ("-wsd", "yurii"): (13.90, 9.87),
    ("-sam", "tmm"): (6.69, 4.83),
    ("-wsd", "tmm"): (7.81, 5.62),
}
# Momentum Streams: best validation loss; None where no final value is public.
STREAMS: dict[str, dict[str, float | None]] = {
    "tinystories": {
        "vanilla": 1.1569,
        "adam": 1.1528,
        "adamw": 1.1472,
        "yurii": 1.1299,
        "tmm": 1.1284,
        "hb": 1.1330,
        "rmsprop": 1.1492,
        "ortho": 1.1489,
        "muon": 1.1503,
        "soap": 1.1431,
        "shampoo": 1.1412,
        "tmm-zero": None,
    },
    "openwebtext": {
        "vanilla": 3.0078,
        "adam": 2.9911,
        "adamw": 2.9883,
        "yurii": 2.9413,
        "tmm": 2.9342,
        "hb": 2.9453,
        "rmsprop": 3.0153,
        "ortho": None,
        "muon": None,
        "soap": None,
        "shampoo": None,
    },
    "tinystories-wsd": {"yurii": 1.0818, "tmm": 1.0860},
    "tinystories-sam": {"yurii": 1.0812, "tmm": 1.0791},
    "tinystories-sawd": {"yurii": 1.0772, "tmm": 1.0815},
    "openwebtext-wsd": {"yurii": 2.9275, "tmm": 2.9236},
    "openwebtext-sam": {"yurii": 2.9481, "tmm": 2.9395},
    "openwebtext-sawd": {"yurii": 2.9323, "tmm": None},
    "openwebtext-pure-adamw": {"vanilla": 3.0103, "tmm": 2.9696},
    "openwebtext-half-rate": {"vanilla": 3.0288, "tmm": 2.9634},
    "tinystories-width-900": {"vanilla": 1.1454},
    "tinystories-depth-18": {"vanilla": 1.1298},
    "tinystories-seeds": {"vanilla": 1.1578, "tmm": 1.1272},
}
# SympFormer, Tables 1 to 3: best and last. The Hamiltonian rows of Table 1 read the future and are no targets.
SYMP: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "table-1": {"vanilla": (2.4473, 2.4687), "yurii": (2.3872, 2.4041)},
    "table-1-hamiltonian": {
        "symp-plain-euler": (None, None),
        "symp-presymp-euler": (None, None),
        "symp-exp-euler": (None, None),
        "symp-ab2": (None, None),
        "symp-etd-ab2": (None, None),
    },
    "table-2": {"linear": (2.961427, 3.0830), "linear-yurii": (2.765975, 2.8783)},
    "table-2-plain-euler": {"linear-symp-plain-euler": (2.920602, 3.0399)},
    "table-2-conformal-euler": {"linear-symp-conformal-euler": (2.731363, 2.8467)},
    "table-2-presymp-euler": {"linear-symp-presymp-euler": (2.731363, 2.8467)},
    "table-3": {"linear": (2.917168, 3.0118), "linear-yurii": (2.765023, 2.8486)},
    "table-3-plain-euler": {"linear-symp-plain-euler": (2.656692, 2.7483)},
    "table-3-conformal-euler": {"linear-symp-conformal-euler": (2.690885, 2.7862)},
    "table-3-presymp-euler": {"linear-symp-presymp-euler": (2.690885, 2.7862)},
}
READS_THE_FUTURE = {
    "symp-plain-euler": 2.3234,
    "symp-presymp-euler": 2.4592,
    "symp-exp-euler": 2.2523,
    "symp-ab2": 2.6546,
    "symp-etd-ab2": 1.8386,
}
SPEED = ("speed-baseline", "speed-value-residual-fixed", "speed-value-residual", "speed-momentum-warmup", "speed")
SPEED += ("speed-public",)
PUBLISHED: dict[str, dict[str, float | None]] = {
    "yuriiformer-tinystories": {name: row[0] for name, row in TABLE_5.items()},
    "yuriiformer-openwebtext": {name: row[0] for name, row in TABLE_3.items()},
    "yuriiformer-openwebtext-medium": {name: row[2] for name, row in TABLE_3.items()},
    **{f"momentum-streams-{name}": values for name, values in STREAMS.items()},
    **{f"sympformer-{name}": {run: best for run, (best, _) in rows.items()} for name, rows in SYMP.items()},
    **{name: {"vanilla": None} for name in SPEED},
}
TOTALS = {  # known in full from the authors' own counts and by hand
    ("yuriiformer-tinystories", "vanilla"): 124_373_760,
    ("yuriiformer-tinystories", "yurii"): 163_812_168,
    ("yuriiformer-tinystories", "polyak-euler"): 163_802_904,
    ("yuriiformer-tinystories", "nesterov-euler"): 163_802_916,
    ("yuriiformer-tinystories", "symplectic-euler"): 163_812_156,
    ("yuriiformer-tinystories", "imex-k1-mam"): 163_802_940,
    ("yuriiformer-tinystories", "imex-ln-k2-ama"): 163_812_156,
    ("yuriiformer-tinystories", "verlet-ama"): 163_812_156,
    ("momentum-streams-tinystories", "tmm"): 163_812_192,
    ("momentum-streams-tinystories", "tmm-zero"): 124_392_288,
    ("momentum-streams-tinystories", "hb"): 163_812_144,
    ("momentum-streams-tinystories", "adam"): 163_812_168,
    ("momentum-streams-tinystories", "adamw"): 163_812_192,
    ("momentum-streams-tinystories", "muon"): 163_812_144,
    ("momentum-streams-tinystories", "soap"): 163_812_168,
    ("momentum-streams-tinystories", "rmsprop"): 124_392_240,
    ("momentum-streams-tinystories", "ortho"): 124_392_216,
    ("momentum-streams-tinystories", "shampoo"): 124_392_240,
    ("momentum-streams-tinystories-width-900", "vanilla"): 162_857_700,
    ("momentum-streams-tinystories-depth-18", "vanilla"): 166_850_304,
    ("sympformer-table-1", "vanilla"): 3_646_528,
    ("sympformer-table-1", "yurii"): 6_899_824,
    ("sympformer-table-1-hamiltonian", "symp-plain-euler"): 3_614_840,
    ("sympformer-table-1-hamiltonian", "symp-etd-ab2"): 3_614_848,
    ("sympformer-table-2", "linear"): 3_392_068,
    ("sympformer-table-2", "linear-yurii"): 6_620_252,
    ("sympformer-table-3", "linear"): 3_613_768,
    ("sympformer-table-3-conformal-euler", "linear-symp-conformal-euler"): 6_899_832,
    ("sympformer-table-2-presymp-euler", "linear-symp-presymp-euler"): 3_392_604,
    ("sympformer-table-3-presymp-euler", "linear-symp-presymp-euler"): 3_614_848,
    ("speed-value-residual-fixed", "vanilla"): 124_373_760,
    ("speed-value-residual", "vanilla"): 124_373_772,
    ("speed", "vanilla"): 124_373_796,
    ("speed-public", "vanilla"): 162_201_636,
}
_COMMON = {"tokenizer": "gpt2", "batch": 480, "seed": 42, "eval_every": 100, "eval_tokens": 4_915_200}
_TINYSTORIES = {**_COMMON, "corpus": "tinystories", "steps": 10_000, "warmup": 1_000, "lr": 0.02}
_OPENWEBTEXT = {**_COMMON, "corpus": "openwebtext", "steps": 30_000, "warmup": 3_000, "lr": 0.004}
_MUON = {"name": "muon", "lr_embedding": 6e-4, "lr_norm": 6e-4, "lr_coefficient": 3e-3, "wd_matrix": 0.0}
_MUON |= {"wd_embedding": 0.1, "wd_norm": 0.0, "wd_coefficient": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
_MUON |= {"momentum": 0.95, "nesterov": True, "scaling": "jordan", "qkv": "fused", "clip": 1.0, "floor": 0.1}
_MUON |= {"clip_coefficients": True, "momentum_warmup": 0, "legacy_warmup": False, "polar": "newton-schulz"}
_MUON |= {"schedule": "cosine", "sam": "off", "rho": 0.05, "decay_start": None}
_SYMP = {"tokenizer": "gpt2", "corpus": "tinystories", "steps": 10_000, "seed": 1337, "eval_tokens": 4_915_200}
_SYMP |= {"name": "adamw", "lr": 3e-4, "lr_embedding": 3e-4, "lr_norm": 3e-4, "wd_matrix": 0.0, "wd_embedding": 0.1}
_SYMP |= {"wd_norm": 0.0, "wd_coefficient": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip": 1.0, "floor": 0.4}
_SYMP |= {"clip_coefficients": False, "schedule": "cosine", "warmup": 150, "legacy_warmup": False, "sam": "off"}
_SPEED = {**_MUON, "tokenizer": "gpt2", "corpus": "fineweb", "steps": 3_200, "batch": 512, "seed": 42, "lr": 0.02}
_SPEED |= {"lr_embedding": 0.3, "lr_norm": 0.02, "lr_coefficient": 0.02, "wd_embedding": 0.0, "clip": 0.0, "floor": 0.0}
_SPEED |= {"schedule": "wsd", "warmup": 320, "decay_start": 3_200 - 914, "eval_every": 125, "eval_tokens": 10_485_760}


def expected(name: str) -> dict[str, Any]:
    """The settings of a recipe by the training tables of the papers."""
    if name.startswith("sympformer"):
        first = "table-1" in name
        return {**_SYMP, "batch": 6 * (16 if first else 12), "lr_coefficient": 0.0015 if first else 0.03}
    if name.startswith("speed"):
        warm = name in ("speed", "speed-momentum-warmup", "speed-public")
        head = {"lr_head": 0.002} if name == "speed-public" else {}
        return {**_SPEED, **head, "momentum_start": 0.85, "momentum_warmup": 500 if warm else 0}
    values = {**_MUON, **(_TINYSTORIES if "tinystories" in name else _OPENWEBTEXT)}
    decay_start = 8_300 if "tinystories" in name else 25_000
    if name.endswith("medium"):
        values["lr"] = 0.006
    if name.endswith("half-rate"):
        values["lr"] = 0.002
    values["streams"] = "fp32"
    if name.startswith("momentum"):  # the authors' 160 x 8 blocks of 1024; soap and shampoo on TinyStories 160 x 4
        values |= {"eval_first": "1_310_720, 655_360" if "tinystories" in name else 160 * 8 * 1024, "eval_whole": True}
    if name.endswith("pure-adamw"):
        values |= {"name": "adamw", "lr": 6e-4, "lr_coefficient": 6e-4, "wd_matrix": 0.1, "scaling": "none"}
    if name.endswith(("wsd", "sawd")):
        values |= {"schedule": "wsd", "decay_start": decay_start}
    if name.endswith("sam"):
        values["sam"] = "always"
    if name.endswith("sawd"):
        values["sam"] = "decay"
    return values


def family(run: str) -> str:
    """The row of EXTRAS: all IMEX rules of one norm placement share theirs, and both Verlet orders."""
    return re.sub(r"-k\d-(ama|mam)$|-(ama|mam)$", "", run)


def count(name: str, run: str) -> int:
    """Parameters of a recipe's run. Squares of d: an MLP 8, softmax attention 4; W_Q, W_K and C 3; A and V 2."""
    L, d, _, T = geometry(name)
    scalars, norms, tables = EXTRAS[family(run)]
    scalars += MORE_SCALARS.get(name, 0)
    if name == "speed-public":  # gainless norms, no position table, a head beside the token table
        return L * (12 * d**2 + scalars) + 2 * V * d
    squares = 11 if run.startswith("symp-") else 10 if run.startswith("linear") else 12
    return L * (squares * d**2 + (2 + norms) * d + scalars) + (V + T) * d * (2 if tables else 1) + d


def geometry(name: str) -> tuple[int, int, int, int]:
    """Layers, width, heads, context."""
    if name.endswith("medium"):
        return 24, 1024, 16, 1024
    if name.startswith("sympformer-table-2"):
        return 4, 64, 4, 128
    if name.startswith("sympformer"):
        return 8, 64, 8, 512 if "table-1" in name else 1024
    heads = 6 if name == "speed-public" else 12
    return 18 if name.endswith("depth-18") else 12, 900 if name.endswith("width-900") else 768, heads, 1024
