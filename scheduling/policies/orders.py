"""Who goes first: the key by which requests wait, smallest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduling.inference import Inference


@dataclass(frozen=True)
class Order:
    """Its fields are settings.

    A key never changes while a request waits; among equal ones who came first goes first.
    """

    def key(self, group: Sequence[Inference]) -> Any:
        """The key of a request's members, which wait side by side.

        They have their arrival already.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Fcfs(Order):
    """First come, first served."""

    def key(self, group: Sequence[Inference]) -> float:
        return group[0].arrived_at
