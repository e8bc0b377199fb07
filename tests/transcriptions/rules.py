"""Which function transcribes which (template, splitting), and the network around a stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from transcriptions import connections, hamiltonian, rivals
from transcriptions.parts import (
    DEFAULTS,
    Block,
    Memory,
    Rule,
    coef,
    free_coef,
    pre_norm,
    to_matrix,
    visible_tokens,
)
from transcriptions.preconditioned import (
    adam_lie_trotter,
    adam_parallel,
    adam_strang,
    adamw_lie_trotter,
    adamw_parallel,
    adamw_strang,
    muon_lie_trotter,
    muon_parallel,
    muon_strang,
    ortho_lie_trotter,
    ortho_parallel,
    ortho_strang,
    rmsprop_lie_trotter,
    rmsprop_parallel,
    rmsprop_strang,
    shampoo_lie_trotter,
    shampoo_parallel,
    shampoo_strang,
    soap_lie_trotter,
    soap_parallel,
    soap_strang,
)
from transcriptions.velocity import (
    gd_lie_trotter,
    gd_parallel,
    gd_strang,
    heavy_ball_imex,
    heavy_ball_lie_trotter,
    heavy_ball_parallel,
    heavy_ball_strang,
    heavy_ball_symplectic_euler,
    nesterov_imex,
    nesterov_lie_trotter,
    nesterov_parallel,
    nesterov_strang,
    nesterov_symplectic_euler,
    tables_lie_trotter,
    tables_parallel,
    tables_strang,
    triple_momentum_imex,
    triple_momentum_lie_trotter,
    triple_momentum_parallel,
    triple_momentum_strang,
)

LAYERS: dict[tuple[str, str], Callable[..., tuple[Tensor, ...]]] = {
    ("gd", "parallel"): gd_parallel,
    ("gd", "lie-trotter"): gd_lie_trotter,
    ("gd", "strang"): gd_strang,
    ("heavy-ball", "parallel"): heavy_ball_parallel,
    ("heavy-ball", "lie-trotter"): heavy_ball_lie_trotter,
    ("heavy-ball", "strang"): heavy_ball_strang,
    ("heavy-ball", "imex"): heavy_ball_imex,
    ("heavy-ball", "symplectic-euler"): heavy_ball_symplectic_euler,
    ("nesterov", "parallel"): nesterov_parallel,
    ("nesterov", "lie-trotter"): nesterov_lie_trotter,
    ("nesterov", "strang"): nesterov_strang,
    ("nesterov", "imex"): nesterov_imex,
    ("nesterov", "symplectic-euler"): nesterov_symplectic_euler,
    ("triple-momentum", "parallel"): triple_momentum_parallel,
    ("triple-momentum", "lie-trotter"): triple_momentum_lie_trotter,
    ("triple-momentum", "strang"): triple_momentum_strang,
    ("triple-momentum", "imex"): triple_momentum_imex,
    ("tables", "parallel"): tables_parallel,
    ("tables", "lie-trotter"): tables_lie_trotter,
    ("tables", "strang"): tables_strang,
    ("adam", "parallel"): adam_parallel,
    ("adam", "lie-trotter"): adam_lie_trotter,
    ("adam", "strang"): adam_strang,
    ("adamw", "parallel"): adamw_parallel,
    ("adamw", "lie-trotter"): adamw_lie_trotter,
    ("adamw", "strang"): adamw_strang,
    ("rmsprop", "parallel"): rmsprop_parallel,
    ("rmsprop", "lie-trotter"): rmsprop_lie_trotter,
    ("rmsprop", "strang"): rmsprop_strang,
    ("muon", "parallel"): muon_parallel,
    ("muon", "lie-trotter"): muon_lie_trotter,
    ("muon", "strang"): muon_strang,
    ("ortho", "parallel"): ortho_parallel,
    ("ortho", "lie-trotter"): ortho_lie_trotter,
    ("ortho", "strang"): ortho_strang,
    ("soap", "parallel"): soap_parallel,
    ("soap", "lie-trotter"): soap_lie_trotter,
    ("soap", "strang"): soap_strang,
    ("shampoo", "parallel"): shampoo_parallel,
    ("shampoo", "lie-trotter"): shampoo_lie_trotter,
    ("shampoo", "strang"): shampoo_strang,
    **{("hyper", splitting): connections.hyper_layer for splitting in ("parallel", "lie-trotter")},
    **{("mhc", splitting): connections.mhc_layer for splitting in ("parallel", "lie-trotter")},
    **{(template, "lie-trotter"): hamiltonian.hamiltonian_layer for template in hamiltonian.TEMPLATES},
}

CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "attention": ("softmax", "linear", "entropy", "kl", "hamiltonian", "linear-hamiltonian"),
    "positions": ("learned", "rotary"),
    "value_residual": ("off", "fixed", "free", "unit"),
    "mlp": ("gelu", "relu2"),
    "target": ("fixed", "head", "token"),
    "target_form": ("log", "support"),
    "constraint": ("equality", "floor"),
    "prior": ("uniform", "previous", "carried", "learned"),
    "force": ("row", "query"),
    "kernel": ("single", "per-head"),
    "metric": ("learned", "derived"),
    "system": ("mean-field", "particles"),
    "alpha_k": ("learned", "nesterov"),
    "damping": ("loglin", "log", "linear"),
    "history": ("variable", "constant"),
    "etd": ("cox-matthews", "lawson"),
    "etd_start": ("exponential", "lawson"),
    "mlp_step": ("A", "B", "C"),
}


def complete_rule(rule: Rule) -> Rule:
    """The rule with its defaults filled in; ValueError where the combination has no meaning."""
    full = {**DEFAULTS, **rule}
    template, splitting = full["template"], full["splitting"]
    if (template, splitting) not in LAYERS:
        raise ValueError(f"no rule for template {template!r} with splitting {splitting!r}")
    for key, allowed in CHOICES.items():
        if full[key] not in allowed:
            raise ValueError(f"unknown {key} {full[key]!r}")
    if splitting in ("strang", "imex") and full["order"] not in ("ama", "mam"):
        raise ValueError(f"unknown order {full['order']!r}")
    if splitting == "imex":
        if full["k"] < 1:
            raise ValueError("IMEX needs k >= 1")
        if template == "heavy-ball" and full["k"] > 1:
            raise ValueError("heavy ball has mu = 0: IMEX refinements after the first are identical")
        if full["velocity_norm"] not in ("once", "every"):
            raise ValueError(f"unknown velocity_norm {full['velocity_norm']!r}")
    check_attention(full)
    return full


def check_attention(rule: Rule) -> None:
    """ValueError where the attention does not go with the template or an option."""
    attention, has_momentum = rule["attention"], rule["attention"] in ("hamiltonian", "linear-hamiltonian")
    if has_momentum != (rule["template"] in hamiltonian.TEMPLATES):
        raise ValueError(f"template {rule['template']!r} and attention {attention!r} do not belong together")
    if has_momentum and (rule["value_residual"] != "off" or rule["value_tables"]):
        raise ValueError("Hamiltonian attention has no values")
    if rule["qk_norm"] and attention not in ("softmax", "entropy", "kl"):
        raise ValueError(f"qk_norm has no meaning for {attention} attention")
    if rule["positions"] == "rotary" and attention in ("linear", "linear-hamiltonian"):
        raise ValueError(f"{attention} attention has no queries and keys to turn")
    if attention == "kl" and rule["target_form"] != "log":
        raise ValueError("the specification states the radius of kl attention in the form r ln t only")
    if attention == "hamiltonian" and rule["metric"] == "derived" and rule["kernel"] == "per-head":
        raise ValueError("the kernel of one head is singular: no derived metric")
    if attention == "hamiltonian" and rule["system"] == "particles" and rule["n0"] == 0:
        raise ValueError("(34) has one N")


def embed(tokens: Tensor, w: dict[str, Any], prefix: str, rule: Rule) -> Tensor:
    """tok_emb[token at t] + pos_emb[t]; no position table with rotary positions. Prefix "aux_", "value_": others."""
    x = w[prefix + "tok_emb"][tokens]
    if rule["positions"] == "learned":
        return x + w[prefix + "pos_emb"][: tokens.shape[1]]
    if prefix + "pos_emb" in w:
        raise ValueError(f"rotary positions leave {prefix}pos_emb unused")
    return x


def start(tokens: Tensor, w: dict[str, Any], rule: Rule) -> tuple[Any, ...]:
    """State before the first layer: x embedded; v, m, y from their own tables, or zero; s = 1; R = I.

    Connections: n copies of x, of which those after x start from `tables` of their own, or zero.
    Hamiltonian templates: x, y, the velocity v = 0 of MLP substep C, the clock t = t_0, no history.
    """
    template = rule["template"]
    x = embed(tokens, w, "", rule)
    if template in connections.TEMPLATES:
        H = rivals.copies(x, rule["n"])
        own = [f"h{i}" for i in range(1, rule["tables"] + 1)]
        found = [embed(tokens, w, f"aux_{k}_", rule) if f"aux_{k}_tok_emb" in w else torch.zeros_like(x) for k in own]
        return (x, *found, *H[1 + len(found) :])
    if template in ("gd", "ortho"):
        return (x,)
    if template == "rmsprop":
        return x, torch.ones_like(x)
    head_dim = x.shape[-1] // rule["n_head"]
    identities = torch.eye(head_dim, dtype=x.dtype, device=x.device).expand(*tokens.shape, head_dim, head_dim)
    if template == "shampoo":
        return x, identities
    aux = torch.zeros_like(x)
    if "aux_tok_emb" in w:
        aux = embed(tokens, w, "aux_", rule)
    if template in ("adam", "adamw"):
        return x, aux, torch.ones_like(x)
    if template == "soap":
        return x, to_matrix(aux, rule), identities
    if template in hamiltonian.TEMPLATES:
        return x, aux, torch.zeros_like(x), torch.tensor(rule["t0"], dtype=x.dtype, device=x.device), None
    return x, aux  # the velocity v, the momentum m of muon, or w_0 of tables


def head(x: Tensor, w: dict[str, Any], rule: Rule) -> Tensor:
    """LN_final(x) H^T, H = tok_emb unless there is a head of its own; soft-capped to c tanh(. / c) if the rule says so.

    Every other stream is discarded.
    """
    answer = pre_norm(x, w, "final_norm", rule) @ w.get("head", w["tok_emb"]).T
    cap = rule["logit_softcap"]
    return answer if cap is None else cap * torch.tanh(answer / cap)


def with_skip(x: Tensor, x_0: Tensor, b: Block, rule: Rule) -> Tensor:
    """Before each block x <- skip_x x + skip_x0 x_0, x_0 the input embedding; other streams are left alone."""
    return free_coef(b, "skip_x") * x + free_coef(b, "skip_x0") * x_0 if rule["embedding_skip"] else x


def with_unet(x: Tensor, earlier: list[Tensor], b: Block, layers: int, rule: Rule) -> Tensor:
    """Before block L-1-i, i < L/2:  x <- x + s_i X_i, X_i what block i gave; `earlier`: those so far."""
    i = layers - 1 - len(earlier)
    return x + free_coef(b, "skip_unet") * earlier[i] if rule["unet"] and i < layers // 2 else x


def averaged(history: list[Tensor], b: Block, rule: Rule) -> Tensor:
    """Y_i = sum of alpha_ij X_j over j <= i, j = i mod k, if p divides i; else X_i. `history` is X_0 .. X_i."""
    i = len(history) - 1
    if not rule["denseformer"] or i % rule["period"]:
        return history[i]
    sources = [j for j in range(i + 1) if (i - j) % rule["dilation"] == 0]
    return sum(free_coef(b, f"alpha_{j}") * history[j] for j in sources)  # type: ignore[return-value]


def logits(tokens: Tensor, w: dict[str, Any], rule: Rule) -> Tensor:
    """Logits (B, T, V) of the model whose every layer takes one step of `rule`."""
    rule = complete_rule(rule)
    rule["memory"] = Memory(visible_tokens(tokens, rule["document_separator"]))
    if rule["value_tables"]:
        rule["memory"].value_rows = embed(tokens, w, "value_", rule)
    layer = LAYERS[rule["template"], rule["splitting"]]
    state = start(tokens, w, rule)
    x_0 = state[0]
    x, history, given = x_0, [x_0], list[Tensor]()
    for b in w["blocks"]:
        x = with_unet(with_skip(x, x_0, b, rule), given, b, len(w["blocks"]), rule)
        x, *streams = layer(x, *state[1:], b, rule)
        state = (x, *streams)
        if rule["splitting"] == "symplectic-euler" and rule["final_drift"] and b is w["blocks"][-1]:
            x = x + coef(b, "delta") * state[1]
        history.append(x)
        x = averaged(history, b, rule)
        given.append(x)
    if rule["template"] in connections.TEMPLATES:
        x = rivals.sum_of_rows([x, *state[1 : rule["n"]]])
    return head(x, w, rule)


def hybrid_logits(tokens: Tensor, w: dict[str, Any], rule: Rule, momentum_layers: Collection[int]) -> Tensor:
    """Layers in `momentum_layers` take the Lie-Trotter momentum step; the others are plain residual blocks

    x <- x + A(x), x <- x + M(x) with the same A, M (no LN_v, no coefficients), and pass v through unchanged.
    The cutoff mode with cutoff c is momentum_layers = range(c): v is then never read again.
    """
    rule = complete_rule(rule)
    template = rule["template"]
    if template not in ("heavy-ball", "nesterov", "triple-momentum") or rule["splitting"] != "lie-trotter":
        raise ValueError("hybrid inference is defined for velocity templates with Lie-Trotter splitting")
    for index in momentum_layers:
        if not 0 <= index < len(w["blocks"]):
            raise ValueError(f"there is no layer {index}")
    rule["memory"] = Memory(visible_tokens(tokens, rule["document_separator"]))
    if rule["value_tables"]:
        rule["memory"].value_rows = embed(tokens, w, "value_", rule)
    layer = LAYERS[template, "lie-trotter"]
    x_0, v = start(tokens, w, rule)
    x, history, given = x_0, [x_0], list[Tensor]()
    for index, b in enumerate(w["blocks"]):
        x = with_unet(with_skip(x, x_0, b, rule), given, b, len(w["blocks"]), rule)
        if index in momentum_layers:
            x, v = layer(x, v, b, rule)
        else:
            (x,) = gd_lie_trotter(x, b, rule)
        history.append(x)
        x = averaged(history, b, rule)
        given.append(x)
    return head(x, w, rule)
