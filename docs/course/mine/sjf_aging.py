"""Chapter 8: the shortest job first, with aging. A second of waiting is worth `aging_rate` tokens:
the smallest work − aging_rate · (seconds waited) goes first, and keys must not change meanwhile.
"""

from __future__ import annotations

from typing import ClassVar

from scheduling.inference import Inference
from scheduling.policies.base import setting
from scheduling.policies.orders import Order


class SjfAging(Order):
    in_order: ClassVar[bool] = False  # later requests may go before earlier ones
    by_length: ClassVar[bool] = True  # inference.standing.predicted_tokens is known
    aging_rate: float = setting(15.0, "completion tokens that a second is worth", ge=0)

    def key(self, inference: Inference) -> float:
        raise NotImplementedError("write key: docs/course/08-order.md says what it returns")
