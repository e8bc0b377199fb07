"""Weights of entropy- and KL-constrained attention, one row (sequence, head, query) after the other.

A row has scores s_j, j = 1..t, and a log prior log q_j on its visible tokens; its weights are
a(beta) = softmax(log q + beta s), beta >= 0, with
    entropy:  H(a) = h,          dH/dbeta = -beta Var_a(s)      (uniform q)
    kl:       KL(a || q) = rho,  dKL/dbeta = beta Var_a(s).
Both are written as slack(beta) = 0 for a slack that falls with beta: H - h, or rho - KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from transcriptions.parts import Block, Memory, Rule, sigmoid

BETA_MAX = 300.0  # in units of 1 / std(s)


def log_weights(beta: Tensor, scores: Tensor, log_q: Tensor) -> Tensor:
    """log a = log q + beta s - log sum_j q_j exp(beta s_j).

    All relative to the token m with the largest weight, of which the sum is 1 + the others: a weight of nearly 1 then
    has a logarithm to full precision, which is what is left of a saturated row's entropy.
    """
    m = int(torch.argmax(log_q + beta * scores))
    raw = (log_q - log_q[m]) + beta * (scores - scores[m])
    others = torch.cat([raw[:m], raw[m + 1 :]])
    return raw - torch.log1p(torch.exp(others).sum())


def entropy(log_a: Tensor) -> Tensor:
    """H(a) = -sum_j a_j log a_j; a weight that underflows adds nothing."""
    return -(torch.exp(log_a) * log_a).sum()


def divergence(log_a: Tensor, log_q: Tensor) -> Tensor:
    """KL(a || q) = sum_j a_j (log a_j - log q_j)."""
    return (torch.exp(log_a) * (log_a - log_q)).sum()


def variance(log_a: Tensor, scores: Tensor) -> Tensor:
    """Var_a(s) = sum_j a_j (s_j - m)^2, m = sum_j a_j s_j; s measured from the score with the largest weight."""
    a = torch.exp(log_a)
    away = scores - scores[int(torch.argmax(a))]
    mean = (a * away).sum()
    return (a * (away - mean) ** 2).sum()


def uniform(scores: Tensor) -> Tensor:
    """log q_j = -ln t."""
    return torch.full_like(scores, -math.log(scores.shape[0]))


def target(ratio: Tensor, visible: int, rule: Rule) -> Tensor:
    """entropy: h = r ln t, or h = ln(1 + r (t - 1)) for the form "support"; kl: rho = r ln t."""
    if rule["attention"] == "entropy" and rule["target_form"] == "support":
        return torch.log(1.0 + ratio * (visible - 1))
    return ratio * math.log(visible)


def ratios(u: Tensor, b: Block, rule: Rule) -> Tensor:
    """r of every (sequence, token, head).

    fixed: the rule's constant; head: sigmoid(r_h); token: sigmoid(r_h + (W_r u)_h), u the normalised input.
    """
    shape = (u.shape[0], u.shape[1], rule["n_head"])
    if rule["target"] == "fixed":
        return torch.full(shape, rule["ratio"], dtype=u.dtype, device=u.device)
    if rule["target"] == "head":
        return sigmoid(b["attn_coef"]["r"]).expand(shape)
    return sigmoid(b["attn_coef"]["r"] + u @ b["ratio_map"].T)


def prior(row: tuple[int, int, int], seen: list[int], scores: Tensor, b: Block, rule: Rule) -> Tensor:
    """log q of one row, from the latest attention call (uniform if there was none), or from a table.

    uniform: -ln t;  previous: log a_prev;  carried: keep log a_prev + (1 - keep) (-ln t), renormalised;
    learned: c_{h, i-j} for the query's own position i and each visible j, renormalised.
    """
    memory: Memory = rule["memory"]
    if rule["prior"] == "learned":
        raw = torch.stack([b["prior_table"][row[1], row[2] - j] for j in seen])
        return raw - torch.logsumexp(raw, dim=0)
    if rule["attention"] == "entropy" or rule["prior"] == "uniform" or memory.log_weights is None:
        return uniform(scores)
    before = memory.log_weights[row]
    if rule["detach_prior"]:
        before = before.detach()
    if rule["prior"] == "previous":
        return before
    keep = sigmoid(b["attn_coef"]["keep"])[row[1]]
    raw = keep * before + (1 - keep) * uniform(scores)
    return raw - torch.logsumexp(raw, dim=0)


def ceiling(scores: Tensor, rule: Rule) -> Tensor:
    """The largest beta: 300 / std(s), and 1/tau where there is only a floor."""
    largest = BETA_MAX / ((scores - scores.mean()) ** 2).mean().sqrt()
    if rule["constraint"] == "floor":
        return torch.clamp(largest, max=1.0 / rule["tau"])
    return largest


def slack_in_numbers(beta: float, scores: list[float], log_q: list[float], goal: float, kind: str) -> float:
    """The slack once more, in Python's numbers: tens of thousands of bisections of short rows are quicker so."""
    m = max(range(len(scores)), key=lambda j: log_q[j] + beta * scores[j])
    raw = [(q - log_q[m]) + beta * (score - scores[m]) for score, q in zip(scores, log_q, strict=True)]
    log_sum = math.log1p(math.fsum(math.exp(value) for j, value in enumerate(raw) if j != m))
    log_a = [value - log_sum for value in raw]
    if kind == "entropy":
        return math.fsum(-math.exp(a) * a for a in log_a) - goal
    return goal - math.fsum(math.exp(a) * (a - q) for a, q in zip(log_a, log_q, strict=True))


def bisect(slack: Callable[[float], float], high: float) -> float:
    """The zero of a slack that falls from above 0 at beta = 0 to below 0 at `high`, to 1e-18 of `high`."""
    low = 0.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if slack(middle) > 0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def tally(rule: Rule, what: str) -> None:
    if "report" in rule:
        rule["report"][what] = rule["report"].get(what, 0) + 1


def solved_row(scores: Tensor, log_q: Tensor, goal: Tensor, rule: Rule) -> Tensor:
    """log a of one row.

    One visible token or equal scores: a = q.  Slack not positive at beta = 0: a = q, beta = 0.  Slack not negative at
    the largest beta: that beta, as a constant.  Otherwise the root beta*: bisection without gradient, then two Newton
    steps beta <- beta + slack(beta) / (beta Var_a(s)), which only polish the value but carry its derivatives
    (d beta = d slack / (beta Var)).
    """

    def slack(beta: Tensor) -> Tensor:
        log_a = log_weights(beta, scores, log_q)
        return entropy(log_a) - goal if rule["attention"] == "entropy" else goal - divergence(log_a, log_q)

    tally(rule, "rows")
    if scores.shape[0] == 1 or scores.max() == scores.min():
        tally(rule, "degenerate")
        return log_q
    with torch.no_grad():
        highest = ceiling(scores, rule)
        zero = torch.zeros_like(highest)
        if slack(zero) <= 0:
            tally(rule, "flat")
            beta, active = zero, False
        elif slack(highest) >= 0:
            floor = rule["constraint"] == "floor" and highest == 1.0 / rule["tau"]
            tally(rule, "inactive" if floor else "capped")
            beta, active = highest, False
        else:
            numbers = (scores.tolist(), log_q.tolist(), float(goal), rule["attention"])
            root = bisect(lambda beta: slack_in_numbers(beta, *numbers), float(highest))
            beta, active = torch.full_like(highest, root), True
    if active:
        for _ in range(2):
            beta = beta + slack(beta) / (beta * variance(log_weights(beta, scores, log_q), scores))
    return log_weights(beta, scores, log_q)


def constrained_weights(scores: list[Tensor], u: Tensor, b: Block, rule: Rule) -> list[Tensor]:
    """The weight matrices (B, T, T) of all heads, zero where token i does not see token j."""
    memory: Memory = rule["memory"]
    r = ratios(u, b, rule)
    latest = {}
    heads = []
    for h in range(rule["n_head"]):
        sequences = []
        for s, visible in enumerate(memory.visible):
            rows = []
            for i, seen in enumerate(visible):
                s_row = scores[h][s, i, seen]
                log_q = prior((s, h, i), seen, s_row, b, rule)
                log_a = solved_row(s_row, log_q, target(r[s, i, h], len(seen), rule), rule)
                latest[s, h, i] = log_a
                index = torch.tensor(seen, device=u.device)
                rows.append(torch.zeros_like(scores[h][s, i]).scatter(0, index, torch.exp(log_a)))
            sequences.append(torch.stack(rows))
        heads.append(torch.stack(sequences))
    memory.log_weights = latest
    return heads
