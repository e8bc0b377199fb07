"""The expressions that symbols make: their order, and the same ones of other symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stepformer.ops.symbols import Symbol, add, make, mul, rec, standardise


def topological(roots: Iterable[Symbol], stop: Callable[[Symbol], bool] = lambda n: False) -> list[Symbol]:
    """Arguments before what uses them; nothing behind a symbol at which to stop."""
    order: dict[Symbol, None] = {}
    for root in roots:
        waiting = [(root, False)]
        while waiting:
            n, done = waiting.pop()
            if n in order:
                continue
            if done or stop(n) or not n.args:
                order[n] = None
            else:
                waiting.append((n, True))
                waiting += [(a, False) for a in reversed(n.args)]
    return list(order)


AGAIN: dict[str, Callable[..., Symbol]] = {"add": add, "mul": mul, "rec": rec}


def rebuild(n: Symbol, known: dict[Symbol, Symbol], stop: Callable[[Symbol], bool] = lambda n: False) -> Symbol:
    """`n` with some symbols exchanged (`known`, which grows); simplifications apply anew."""
    for m in topological([n], lambda m: m in known or stop(m)):
        if m in known:
            continue
        if not m.args or stop(m):
            known[m] = m
        elif m.op == "hat" and not stop(m.args[1]):
            known[m] = standardise(known[m.args[0]], known[m.args[1].args[1]], centred=m.args[1].attr)
        else:
            args = [known[a] for a in m.args]
            known[m] = AGAIN[m.op](*args) if m.op in AGAIN else make(m.op, *args, attr=m.attr, kind=m.kind)
    return known[n]
