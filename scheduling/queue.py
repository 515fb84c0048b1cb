"""Who waits: by arrival, and by an order's key. Knows neither policies nor time."""

from __future__ import annotations

from typing import Any

from sortedcontainers import SortedDict

from scheduling.inference import Inference


class Queue:
    """Those that wait, of all or of one bin. Keys are unique, and do not change meanwhile."""

    def __init__(self) -> None:
        self.by_arrival: SortedDict[int, Inference] = SortedDict()
        self.by_key: SortedDict[tuple[Any, ...], Inference] = SortedDict()
        self.by_user: dict[str | None, SortedDict[int, Inference]] = {}

    def __len__(self) -> int:
        return len(self.by_arrival)

    def add(self, inference: Inference, by_user: bool) -> None:
        """`by_user`: also among its user's, which costs memory a user."""
        self.by_arrival[inference.id] = self.by_key[inference.key] = inference
        if by_user:
            self.by_user.setdefault(inference.user, SortedDict())[inference.id] = inference

    def remove(self, inference: Inference) -> None:
        del self.by_arrival[inference.id], self.by_key[inference.key]
        if inference.user in self.by_user:
            mine = self.by_user[inference.user]
            del mine[inference.id]
            if not mine:
                del self.by_user[inference.user]

    @property
    def oldest(self) -> list[Inference]:
        """The members that wait of the request that came first; none if nobody waits."""
        members: list[Inference] = []
        for inference in self.by_arrival.values():
            if members and inference.group != members[0].group:
                break
            members.append(inference)
        return members
