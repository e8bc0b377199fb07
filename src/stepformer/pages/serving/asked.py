"""What a client sends: within a time, and within limits."""

from __future__ import annotations

import io
import socket
import time
from typing import Any

from stepformer.base.errors import InputError

MOST_TOKENS = 4096  # in one request
LIMITS: dict[str, tuple[type | tuple[type, ...], float, float]] = {  # kind, least and most of each number
    "tokens": (int, 1, MOST_TOKENS),
    "temperature": ((int, float), 0, 100),
    "top_k": (int, 1, 1 << 30),
    "top_p": ((int, float), 0, 1),
    "seed": (int, -(2**63), 2**63 - 1),
    "number": (int, 0, 1 << 40),
}


class Hurried(io.RawIOBase):
    """What a client sends, within a time for all of it: a byte now and then does not keep a connection."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._until = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def text_of(body: dict[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str):
        raise InputError(f"'{name}' should be text.")
    return value


def number_of(body: dict[str, Any], name: str, most: float | None = None) -> Any:
    """A number of the request, in its limits or from 0 to `most`; None when it is left out."""
    value = body.get(name)
    if value is None:
        return None
    limits: tuple[Any, float, float] = LIMITS[name] if most is None else (int, 0, most)
    kind, least, highest = limits
    if isinstance(value, bool) or not isinstance(value, kind):
        raise InputError(f"'{name}' should be a {'whole ' if kind is int else ''}number.")
    if not least <= value <= highest:
        raise InputError(f"'{name}' should lie between {least:g} and {highest:g}.")
    return value


def settings_of(body: dict[str, Any]) -> dict[str, Any]:
    """The settings of `generation.stream` that a request asks for."""
    known = {"side", "prompt", "tokens", "temperature", "top_k", "top_p", "seed"}
    if unknown := sorted(body.keys() - known):
        raise InputError(f"There is no setting '{unknown[0]}': there are {', '.join(sorted(known))}.")
    temperature = number_of(body, "temperature")
    return {
        "temperature": 0.8 if temperature is None else temperature,
        "max_new_tokens": number_of(body, "tokens") or 200,
        **{name: number_of(body, name) for name in ("top_k", "top_p", "seed")},
    }
