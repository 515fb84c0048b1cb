"""What every benchmark's last line holds besides its numbers."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from client.report import commit, hardware
from config import Config


def record(config: Config) -> dict[str, Any]:
    return {
        "config": config.model_dump(),
        "hardware": hardware(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }
