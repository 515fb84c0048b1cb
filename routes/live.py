"""GET /live and what its page asks for."""

from __future__ import annotations

import json
import re

from flask import Blueprint, Response, jsonify, request

from live import page, timeline
from live.observer import Live
from routes.bodies import LoadRequest
from routes.completions import read
from routes.made_load import MadeLoad
from scheduling.errors import InvalidRequest
from serving import Server

CURSOR = re.compile("[0-9]{1,18}")
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def blueprint(server: Server, live: Live) -> Blueprint:
    routes = Blueprint("live", __name__)
    loads = MadeLoad(server)

    @routes.get("/live")
    def view() -> Response:
        safe = {"Content-Security-Policy": page.security_policy()}
        return Response(page.empty(), mimetype="text/html", headers=HEADERS | safe)

    @routes.get("/live/events")
    def events() -> Response:
        since = request.args.get("since")
        if since is not None and not CURSOR.fullmatch(since):
            raise InvalidRequest("since: give the cursor of an earlier answer", param="since")
        load = loads.told(request.args.get("load"))
        text = live.events(None if since is None else int(since), load=load)
        return Response(text, mimetype="application/json", headers=HEADERS)

    @routes.post("/live/load")
    def make_load() -> Response:
        return jsonify(id=loads.start(read(LoadRequest)))

    @routes.get("/timeline")
    def get_timeline() -> Response:
        last = request.args.get("last", "500")
        if not (CURSOR.fullmatch(last) and int(last)):
            raise InvalidRequest("last: give a number of iterations, from 1 on", param="last")
        try:
            text = timeline.text(json.loads(live.events(None)), int(last))
        except ValueError as error:
            raise InvalidRequest(f"{error}; ask for fewer iterations", param="last") from None
        return Response(text, mimetype="application/json", headers=HEADERS)

    return routes
