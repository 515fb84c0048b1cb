"""Virtual time: whole picoseconds, so that sums are exact in whatever order."""

from __future__ import annotations

PS = 10**12  # a second


def seconds(ps: int) -> float:
    """Return the nearest float, the time that a scheduler gets."""
    return ps / PS


def instant(at: float) -> int:
    """Return the picosecond nearest to so many seconds."""
    return round(at * PS)


def not_before(at: float) -> int:
    """Return the first picosecond whose `seconds` are `at` or more."""
    numerator, denominator = at.as_integer_ratio()
    ps = -(-numerator * PS // denominator)
    while seconds(ps - 1) >= at:  # late in a long run a float is coarser than a picosecond
        ps -= 1
    return ps
