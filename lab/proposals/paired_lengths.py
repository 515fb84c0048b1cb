"""vLLM RFC 55265: long and short requests side by side, so that blocks become free evenly.

Taken: of the requests in a window the longest and the shortest stated length by turns, and that a
request goes first once its wait ÷ its tokens exceeds 0.02 s. Not said in what was read: the size of
the window, and which of the two goes first; chosen here: 32 requests, and the long one, unless the
request that joined last is long. Lengths are those that --length-predictor gives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import Order, View, setting
from scheduling.queue import Queue


@dataclass(frozen=True)
class PairedLengths(Order):
    """The longest and the shortest by turns, of the requests that came first; before them those
    that have waited `pair_patience_s` for each of their tokens.
    """

    in_order: ClassVar[bool] = False
    by_length: ClassVar[bool] = True
    pair_window: int = setting(32, "requests that are paired", ge=2)
    pair_patience_s: float = setting(0.02, "wait per token after which one goes first", gt=0)

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        by_request = groupby(queue.by_key.values(), key=lambda i: i.group)
        requests: Iterator[Sequence[Inference]] = (list(members) for _, members in by_request)

        def tokens(members: Sequence[Inference]) -> int:
            return max(1, members[0].standing.predicted_tokens)

        def is_late(members: Sequence[Inference]) -> bool:
            return (view.now - members[0].arrived_at) / tokens(members) > self.pair_patience_s

        window = list(islice(requests, self.pair_window))
        others = sorted((each for each in window if not is_late(each)), key=tokens)
        last = [*view.running][-1:]  # the one that joined last
        middle = tokens(others[len(others) // 2]) if others else 0
        takes_long = not (last and tokens(last) >= middle)
        paired: list[Sequence[Inference]] = []
        while others:
            paired.append(others.pop(-1 if takes_long else 0))
            takes_long = not takes_long
        late = (each for each in window if is_late(each))
        return chain.from_iterable(chain(late, paired, requests))
