"""GET /live and what its page asks for."""

from __future__ import annotations

from flask import Blueprint, Response, request

from live import panel
from routes.responses import body, respond
from serving import Server


def blueprint(server: Server) -> Blueprint:
    routes = Blueprint("live", __name__)
    asked = panel.Panel(server)

    @routes.get("/live")
    def view() -> Response:
        return respond(panel.view())

    @routes.get("/live/events")
    def events() -> Response:
        return respond(asked.events(request.args))

    @routes.post("/live/load")
    def load() -> Response:
        return respond(asked.load(body()))

    @routes.get("/timeline")
    def timeline() -> Response:
        return respond(asked.timeline(request.args))

    return routes
