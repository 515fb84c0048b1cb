"""Rows over time of a simulated run, of all replicas, exactly and in memory that does not grow."""

from __future__ import annotations

from client.results import Json
from scheduling.records import IterationRecord
from simulate.loop import PS
from simulate.replica import Stretch
from stats import ROW_KINDS

BINS = 800  # at most; half as many at least, once a run is long enough
NARROWEST = PS // 10**6


class Occupancy:
    """Sums of rows × time, in picoseconds, in bins that double their width as a run grows longer.

    Whole numbers: iterations add the same together as one by one.
    """

    def __init__(self) -> None:
        self._width = NARROWEST
        self._bins: dict[str, list[int]] = {kind: [] for kind in ROW_KINDS}
        self.busy = self.occupied = 0  # time of iterations, and of their live rows

    def add(self, stretch: Stretch, record: IterationRecord) -> None:
        rows = record.rows
        end = stretch.end(stretch.n - 1)
        while end > BINS * self._width:
            self._width *= 2
            for kind, bins in self._bins.items():
                bins += [0] * (len(bins) % 2)
                self._bins[kind] = [a + b for a, b in zip(bins[::2], bins[1::2])]
        done, bin_ = 0, stretch.begun // self._width
        while (edge := (bin_ + 1) * self._width) < end:
            n = stretch.ended_by(edge)
            current = max(0, edge - stretch.begins(n)) if n < stretch.n else 0
            done += self._add(bin_, rows, stretch.busy(n) + current - done)
            bin_ += 1
        done += self._add(bin_, rows, stretch.busy(stretch.n) - done)
        self.busy += done
        self.occupied += done * record.live

    def over_time(self) -> Json:
        """Return means of each bin, in the format of `client.analysis.occupancy_over_time`."""
        means = {kind: [round(n / self._width, 4) for n in b] for kind, b in self._bins.items()}
        return {"started_at": 0.0, "bin_s": self._width / PS if self.busy else 0.0} | means

    def _add(self, bin_: int, rows: dict[str, int], time: int) -> int:
        for kind, n in rows.items():
            bins = self._bins[kind]
            if bin_ >= len(bins):
                bins += [0] * (bin_ + 1 - len(bins))
            bins[bin_] += n * time
        return time
