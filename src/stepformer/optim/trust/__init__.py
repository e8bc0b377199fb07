"""Steps of the parameters, measured by what the network does: its attention rows and its normalised streams."""

from stepformer.optim.trust.changes import Change, change, local, row_change, stream_change, tangent
from stepformer.optim.trust.observing import Observation, Rows, Stream, moved, observe

__all__ = ["Change", "Observation", "Rows", "Stream", "change", "local", "moved", "observe", "row_change"]
__all__ += ["stream_change", "tangent"]
