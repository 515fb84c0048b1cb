"""Chapter 6: chunked prompts. As dynamic, but write what `share_budget` does: each row that decodes
gets its one token, and all prompts together get at most `view.limits.token_budget` tokens.
"""

from __future__ import annotations

from scheduling.policies.base import Plan, Policy, View


class Chunked(Policy):
    def plan(self, view: View) -> Plan:
        raise NotImplementedError("write plan: docs/course/06-chunks.md says what it returns")
