"""The limit of open files, of which every connection is one: often 1,024 unless more is asked."""

from __future__ import annotations

import contextlib
import resource
import sys

OPEN_MAX = 10_240  # macOS can refuse more, though it names no limit


def allow_open_files(n: int) -> int:
    """Let this process and its children open n files, or as many as they may; return how many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if each == resource.RLIM_INFINITY else each for each in limits)
    for most in (min(n, hard), min(n, hard, OPEN_MAX)):
        if soft < most:
            with contextlib.suppress(ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
                return most
    return soft
