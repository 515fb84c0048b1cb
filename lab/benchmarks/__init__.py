"""Programs that measure. HELP: settings of a parser that shows its program's docstring as help."""

from __future__ import annotations

import argparse
from typing import Any

from config import environment  # noqa: F401 - where a package is missing

HELP: dict[str, Any] = {
    "usage": argparse.SUPPRESS,  # it would list up to a hundred flags
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}
