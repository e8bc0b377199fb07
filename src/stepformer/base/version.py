"""Which stepformer this is, for everything that writes it into a file: its version, and where its sources lie."""

from pathlib import Path

__version__ = "0.6.0"
PACKAGE = Path(__file__).parents[1]
