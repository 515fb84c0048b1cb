"""Virtual time is counted in picoseconds, so that sums of it are exact, in whatever order."""

from __future__ import annotations

PS = 10**12  # a second


def seconds(ps: int) -> float:
    """As the scheduler is told the time: the nearest float."""
    return ps / PS


def instant(at: float) -> int:
    """The picosecond nearest to so many seconds."""
    return round(at * PS)


def not_before(at: float) -> int:
    """The first picosecond at which the scheduler is told that it is so late."""
    numerator, denominator = at.as_integer_ratio()
    ps = -(-numerator * PS // denominator)
    while seconds(ps - 1) >= at:  # late in a long run a float is coarser than a picosecond
        ps -= 1
    return ps
