"""What momentum would be without memory: controls of the recipe, to be named with --plugin.

A velocity rule normalises what it writes (LN_v, with a gain that starts at 0.05) and remembers it. These have the norm
alone, so that what is better than they are comes from the memory.
"""

from torch import Tensor

from stepformer.rules import Template, Values, register_template
from stepformer.rules.hyper import ConstrainedConnections
from stepformer.rules.state import State
from stepformer.rules.template import scaled


@register_template("normed", equation="x' = x + LN_u(g(x))")
class Normed(Template):
    """Gradient descent with normalised answers."""

    normalises = "u"

    def kick(self, s: State, c: Values, g: Tensor, scale: float = 1.0) -> State:
        return s.replace(u=g)

    def drift(self, s: State, c: Values, scale: float = 1.0) -> State:
        return s.without("u").replace(x=s.x + scaled(scale, s.u))


@register_template("mhc-normed", equation="H' = R H + post^T LN_u(g(pre H)), as mhc")
class NormedConnections(ConstrainedConnections):
    """Manifold-constrained hyper-connections with normalised answers."""

    normalises = "u"
