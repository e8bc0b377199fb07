"""The rows of the catalogue: every named architecture with its equation and its source, one call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

YURII, STREAMS, SYMP = "zimin2026yuriiformer", "gai2026momentum", "stein2026sympformer"
CONSTRAINED = "constrained-transformers"

Register = Callable[..., None]


def register_all(register: Register) -> None:
    """Hand every row to `register` (catalogue.register_preset), in the order in which they are listed."""
    momentum(register)
    hamiltonian(register)
    constrained(register)


def momentum(register: Register) -> None:
    """YuriiFormer and Momentum Streams: rules on softmax attention."""

    def yurii(name: str, best: str, equation: str, *, aliases: tuple[str, ...] = (), **settings: Any) -> None:
        published = f"TinyStories best validation loss {best}"
        register(name, equation=equation, cite=YURII, aliases=aliases, published=published, **settings)

    def streams(name: str, equation: str, *, aliases: tuple[str, ...] = (), **settings: Any) -> None:
        register(name, equation=equation, cite=STREAMS, aliases=aliases, **settings)

    # A = Attn(LN .), M = MLP(LN .); LN_v is the velocity norm, LN_u the update norm.
    yurii("gd-euler", "1.107", "x' = x + A(x) + M(x)", template="gd", splitting="parallel")
    yurii("gd-lie-trotter", "1.106", "x += A(x); x += M(x)", template="gd", aliases=("vanilla",))
    yurii(
        "polyak-euler",
        "1.099",
        "v' = LN_v(beta v + gamma (A(x) + M(x))); x' = x + v'",
        template="heavy-ball",
        splitting="parallel",
    )
    yurii(
        "polyak-lie-trotter",
        "1.083",
        "for O in A, M: v = LN_v(beta v + gamma O(x)); x += v",
        template="heavy-ball",
        aliases=("hb",),
    )
    yurii(
        "nesterov-euler",
        "1.101",
        "z = x + mu v; v' = LN_v(beta v + gamma (A(z) + M(z))); x' = x + v'",
        template="nesterov",
        splitting="parallel",
    )
    yurii(
        "nesterov-lie-trotter",
        "1.078",
        "for O in A, M: v = LN_v(beta v + gamma O(x + mu v)); x += v",
        template="nesterov",
        aliases=("yurii",),
    )
    yurii(
        "symplectic-euler",
        "1.080",
        "v = LN_v(beta v - gamma A(x + mu v)); x += delta v; v = LN_v(beta v - gamma' M(x + mu v))",
        template="nesterov",
        splitting="symplectic-euler",
    )
    best = {
        ("once", 1): ("1.086", "1.083"),
        ("every", 1): ("1.078", "1.112"),
        ("once", 2): ("1.078", "1.081"),
        ("every", 2): ("1.070", "1.097"),
    }
    for k in (1, 2):
        for norm in ("once", "every"):
            for order, value in zip(("ama", "mam"), best[norm, k], strict=True):
                a, m = ("A", "M") if order == "ama" else ("M", "A")
                n = "LN_v" if norm == "every" else ""
                end = "x' = x + V'" if norm == "every" else "V' = LN_v(V'); x' = x + V'"
                refine = f"{n}(beta V + gamma' {m}(x + mu' V))" if k == 1 else f"{n}(beta V + gamma' {m}(x + mu' V'))"
                refine = f"V' = {refine}" if k == 1 else f"V' = V; {k} times V' = {refine}"
                yurii(
                    f"imex{'-ln' if norm == 'every' else ''}-k{k}-{order}",
                    value,
                    f"V = {n}(beta v + gamma {a}(x + mu v)); {refine}; {end}",
                    template="nesterov",
                    splitting="imex",
                    order=order,
                    k=k,
                    velocity_norm=norm,
                )
    for order, value in (("ama", "1.074"), ("mam", "1.077")):
        turns = "A/2, M, A/2" if order == "ama" else "M/2, A, M/2"
        yurii(
            f"verlet-{order}",
            value,
            f"for O in {turns}: v = LN_v(beta v + gamma O(x + mu v)); x += v",
            template="nesterov",
            splitting="strang",
            order=order,
        )

    tmm = "for O in A, M: v = LN_v(beta v + gamma O(x + mu v)); x += nu v"
    streams("tmm", tmm, template="triple-momentum", aliases=("tmm-lie-trotter",))
    streams("tmm-zero", f"{tmm}; v_0 = 0", template="triple-momentum", aux_init="zero")
    moments = "m = beta1 m + (1-beta1) g; s = beta2 s + (1-beta2) g g"
    streams("adam", f"g = O(x); {moments}; x += gamma LN_u(m / (sqrt s + eps))", template="adam")
    streams("adamw", f"g = O(x); {moments}; x = (1-lambda) x + gamma LN_u(m / (sqrt s + eps))", template="adamw")
    streams(
        "rmsprop",
        "g = O(x); s = beta2 s + (1-beta2) g g; x += gamma LN_u(g / (sqrt s + eps))",
        template="rmsprop",
    )
    streams("muon", "m = beta m + (1-beta) O(x); x += gamma LN_u(NS5(m))", template="muon")
    streams("ortho", "x += gamma LN_u(NS5(O(x)))", template="ortho")
    covariance = "G = O(x); R = betaR R + (1-betaR) G^T G"
    streams("soap", f"{covariance}; m = beta1 m + (1-beta1) G; x += gamma LN_u(m R^(-1/2))", template="soap")
    streams("shampoo", f"{covariance}; x += gamma LN_u(G R^(-1/2))", template="shampoo")


INTEGRATORS = {
    "plain-euler": ("x' = x + h_x F", "y' = LN_Y(alpha y + h_y G)"),
    "presymp-euler": ("x' = x + h_x F", "y' = LN_Y((1 - alpha(t) h_y) y + h_y G)"),
    "exp-euler": ("x' = x + h_x F", "y' = LN_Y(e^-s y + h_y phi1(s) G)"),
    "conformal-euler": ("y* = e^-s (y + h_y G)", "x' = x + h_x F(y*); y' = LN_Y(y*)"),
    "ab2": (
        "x' = x + h_x ((1 + r/2) F - (r/2) F_prev)",
        "y' = LN_Y(y + h_y ((1 + r/2) f - (r/2) f_prev)), f = G - alpha y",
    ),
    "etd-ab2": (
        "x' = x + h_x ((1 + r/2) F - (r/2) F_prev)",
        "y' = LN_Y(e^-s y + h_y (phi1(s) G + r phi2(s) (G - G_prev)))",
    ),
}


def hamiltonian(register: Register) -> None:
    """SympFormer: linear attention, and attention as a Hamiltonian system."""
    for name, (first, second) in INTEGRATORS.items():
        register(
            f"symp-{name}",
            equation=f"{first}; {second}; then y = LN_V(beta y + gamma M(x + mu y)); x += y; y_0 = 0",
            cite=SYMP,
            template=name,
            attention="hamiltonian",
            aux_init="zero",
        )
    register("linear", equation="x += h L(x), L linear attention; x += M(x)", cite=SYMP, attention="linear")
    register(
        "linear-yurii",
        equation="for O in hL, M: v = LN_v(beta v + gamma O(x + mu v)); x += v",
        cite=SYMP,
        template="nesterov",
        attention="linear",
    )
    for name, (first, second) in INTEGRATORS.items():
        register(
            f"linear-symp-{name}",
            equation=f"{first}; {second}; then v = LN_V(beta v + gamma M(x + mu v)); x += v",
            cite=SYMP,
            template=name,
            attention="linear-hamiltonian",
            mlp_step="C",
        )


def constrained(register: Register) -> None:
    """Transformers as constrained optimization: gainless norm, attention at a target entropy or inside a KL ball."""

    def row(name: str, equation: str, **settings: Any) -> None:
        layer = f"{equation}; x += alpha A(N(x)); x += beta M(N(x)), N gainless RMSNorm"
        register(name, equation=layer, cite=CONSTRAINED, norm="rmsnorm", **settings)

    row("entropy", "a = softmax(b s) with H(a) = r ln t, r = 0.5", attention="entropy")
    row("entropy-head", "a = softmax(b s) with H(a) = r ln t, r learned per head", attention="entropy", target="head")
    row(
        "entropy-token",
        "a = softmax(b s) with H(a) = r ln t, r a map of the token",
        attention="entropy",
        target="token",
    )
    row(
        "entropy-floor",
        "a = softmax(s) unless H(a) < r ln t, r = 0.05; then H(a) = r ln t",
        attention="entropy",
        constraint="floor",
        ratio=0.05,
    )
    row("kl", "a = softmax(b s) with KL(a || uniform) = r ln t, r = 0.1", attention="kl")
    row("kl-previous", "a = softmax(ln a_below + b s) with KL = r ln t", attention="kl", prior="previous")
    row("kl-carried", "a = softmax(keep ln a_below + b s) with KL = r ln t", attention="kl", prior="carried")
