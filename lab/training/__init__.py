from pathlib import Path

from config import environment  # noqa: F401 - where a package is missing

HELD_OUT = Path(__file__).parent / "held_out.txt"  # text that training has not seen
