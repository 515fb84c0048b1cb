"""Requests with limits on their latency: the classes that name limits."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.errors import InvalidRequest
from scheduling.extensions import Extension, Group
from scheduling.policies.deadlines import Slo


class SloClasses(Extension):
    """Limits of the classes, for requests that name one; a request's own limit wins."""

    def __init__(self, classes: Mapping[str, Slo]):
        self._classes = classes

    def check(self, group: Group, now: float) -> None:
        """Fill in the limits of the class. Raises InvalidRequest for a class that is not defined.

        Without any classes a name is a mere label, where the request states its limits itself.
        """
        name, stated = group[0].slo_class, group[0].slo_ttft_ms or group[0].slo_tpot_ms
        if name is None or (stated and not self._classes):
            return
        if name not in self._classes:
            known = ", ".join(self._classes) or "none; start it with --slo-classes"
            raise InvalidRequest(
                f"slo_class: there is no class {name[:100]!r} here; name one of those that this "
                f"server has ({known}), or state slo_ttft_ms and slo_tpot_ms.",
                param="slo_class",
            )
        slo = self._classes[name]
        for member in group:
            member.slo_ttft_ms = member.slo_ttft_ms or slo.ttft_ms
            member.slo_tpot_ms = member.slo_tpot_ms or slo.tpot_ms
