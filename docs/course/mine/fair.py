"""Chapter 8: fair queueing. The user that was served least goes first; the requests of one user go
in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import View
from scheduling.policies.orders import Order
from scheduling.queue import Queue


class Fair(Order):
    in_order: ClassVar[bool] = False
    by_user: ClassVar[bool] = True  # view.ledger counts what each user was served
    by_service: ClassVar[bool] = True  # what is computed may change the order

    def ordered(self, queue: Queue, view: View) -> Iterator[Inference]:
        raise NotImplementedError("write ordered: docs/course/08-order.md says what it returns")
