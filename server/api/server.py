"""Handlers of the routes about one server: its measures, its state and its page. Knows no HTTP
server: `app` registers them with Flask, and `replicas.replica` serves them behind an ingress.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from server.api import own
from server.api.messages import Answer, answer
from server.api.own import Call, Handler
from server.live import panel
from server.serving import Server


def handlers(server: Server, pids: Sequence[int]) -> dict[str, Handler]:
    """Return handlers by their names in ROUTES. Each raises InvalidRequest for a wrong call.

    pids: of the server's processes.
    """
    manager = server.manager

    def reset(call: Call) -> Answer:
        server.stats.reset(manager.clock())
        return answer({"reset": True})

    def forget_prefixes(call: Call) -> Answer:
        manager.forget_prefixes()
        return answer({})

    def metrics(call: Call) -> Answer:
        # whatever the Accept header says: in OpenMetrics the library may turn the colons of vLLM's
        # names into underscores
        return Answer(
            generate_latest(server.metrics.registry), content_type=CONTENT_TYPE_PLAIN_0_0_4
        )

    result: dict[str, Handler] = {
        "GET /": lambda call: own.description(server.config, pids),
        "GET /ready": lambda call: own.readiness(manager.not_ready_because()),
        "GET /stats": lambda call: answer(server.report(own.iterations_since(call.query))),
        "GET /metrics": metrics,
        "POST /stats/reset": reset,
        "POST /reset_prefix_cache": forget_prefixes,
    }
    if server.config.live == "on":
        page = panel.Panel(server)
        result |= {
            "GET /live": lambda call: panel.view(),
            "GET /live/{name}": lambda call: panel.file(call.name),
            "GET /live/events": lambda call: page.events(call.query),
            "POST /live/load": lambda call: page.load(call.body),
        }
    return result
