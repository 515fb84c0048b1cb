"""Virtual time: what an ending brings about, and in which order things come."""

from __future__ import annotations

from collections.abc import Iterable

from scheduling.errors import DeadlinePassed, Overloaded
from scheduling.inference import Inference, Iteration
from scheduling.policies import Dynamic, Windowed
from scheduling.scheduler import Scheduler
from simulate import Arrival, drive
from tests.virtual import make_scheduler

# A worked example: one row, an iteration a second. A has two turns, the second comes 2 s after the
# answer to the first; B and C are one request each, C comes while B runs.
#
#     request   arrives   tokens
#     A1        0         2
#     A2        2 + 2     1            at 4, with B
#     B         4         2            goes first: it is of the trace
#     C         5         1
#
#     t   0  1  2  3  4  5  6  7
#         A1 A1       B  B  A2 C


End = tuple[float, Inference, type[BaseException] | None]


def serve(
    scheduler: Scheduler,
    trace: list[Arrival],
    follows: Inference,
    after_s: float,
    following: Inference,
) -> list[End]:
    """Serve a trace, in which a request comes after the end of another one; return all ends."""
    ends: list[End] = []

    def ended(now: float, inference: Inference) -> Iterable[Arrival]:
        ends.append((now, inference, type(inference.error) if inference.error else None))
        return [(now + after_s, [following])] if inference is follows else []

    end = drive(scheduler, trace, lambda _: 1.0, ended=ended)
    assert end == ends[-1][0]
    return ends


def test_a_turn_comes_a_thinking_time_after_the_answer_before_it() -> None:
    a1, a2, b, c = (Inference([0], tokens) for tokens in (2, 1, 2, 1))
    scheduler = make_scheduler(Dynamic(), max_batch_size=1)
    ends = serve(scheduler, [(0.0, [a1]), (4.0, [b]), (5.0, [c])], a1, 2.0, a2)
    assert [i.arrived_at for i in (a1, b, a2, c)] == [0.0, 4.0, 4.0, 5.0]
    assert ends == [(2.0, a1, None), (6.0, b, None), (7.0, a2, None), (8.0, c, None)]


def test_a_refused_request_has_ended_and_may_come_back() -> None:
    """One in flight at most: B, which comes at 0.5, is back 2 s later."""
    a, b, again = Inference([0], 2), Inference([0], 1), Inference([0], 1)
    ends = serve(
        make_scheduler(Dynamic(), max_in_flight=1), [(0.0, [a]), (0.5, [b])], b, 2.0, again
    )
    assert ends == [(0.5, b, Overloaded), (2.0, a, None), (3.5, again, None)]


def test_a_late_request_has_ended_and_may_come_back_at_once() -> None:
    """A and B wait for a third; A's deadline passes at 3, another comes for it then, and
    B has waited for ten seconds before anything runs.
    """
    policy = Windowed(max_batch_delay_ms=10_000, batch_size_target=3)
    a, b, again = Inference([0], 1, deadline=3.0), Inference([0], 1), Inference([0], 1)
    ends = serve(make_scheduler(policy, max_batch_size=3), [(0.0, [a, b])], a, 0.0, again)
    assert ends == [(3.0, a, DeadlinePassed), (11.0, b, None), (11.0, again, None)]
    assert again.arrived_at == 3.0


def test_a_trace_is_drawn_as_it_comes() -> None:
    drawn = []

    def trace() -> Iterable[Arrival]:
        for at in (0.0, 5.0, 6.0):
            drawn.append(at)
            yield at, [Inference([0], 1)]

    seen: list[int] = []

    def planned(now: float, iteration: Iteration) -> None:
        seen.append(len(drawn))

    drive(make_scheduler(Dynamic()), trace(), lambda _: 1.0, planned=planned)
    assert seen[0] == 2, "the first, and the one that is waited for"
