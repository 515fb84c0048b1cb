"""A strict reader of server-sent events, as the pickiest client would be: anything but the stated
form is an error.
"""

from __future__ import annotations

import json
from typing import Any


def events(raw: bytes) -> list[Any]:
    """The JSON of every event of a whole stream, which must end with [DONE]."""
    *blocks, done, rest = raw.split(b"\n\n")
    assert done == b"data: [DONE]" and rest == b"", raw[-200:]
    found = []
    for block in blocks:
        assert block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block, block
        assert block.isascii(), "some clients take U+2028 for the end of a line"
        found.append(json.loads(block.removeprefix(b"data: ")))
    return found
