"""GET /metrics."""

from __future__ import annotations

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest


def blueprint(registry: CollectorRegistry) -> Blueprint:
    routes = Blueprint("metrics", __name__)

    @routes.get("/metrics")
    def metrics() -> Response:
        # whatever is accepted: in OpenMetrics the library may turn the colons of vLLM's names into
        # underscores
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes
