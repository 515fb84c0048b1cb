"""Routes of the page, whatever HTTP server carries them."""

from __future__ import annotations

from scheduling.inference import Inference
from server.api.about import number
from server.api.bodies import LoadRequest
from server.api.messages import HTML, Answer, answer
from server.api.reader import parse
from server.api.refusals import Refused
from server.api.routes import EVENTS, FILE, LOAD, PAGE, Call, Handlers
from server.live import page
from server.live.made_load import MadeLoad
from server.live.observer import Live, about
from server.serving import Server

SHOWN = 80  # characters of a prompt
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def _page(call: Call) -> Answer:
    """Return the page, which holds no data."""
    safe = {"Content-Security-Policy": page.security_policy()}
    return Answer(page.read().encode(), 200, HEADERS | safe, HTML)


def _file(call: Call) -> Answer:
    """Return the page's style or one of its scripts. Raises Refused for another name.

    Browsers keep none, as they keep no page: after an update of the server all files fit together.
    """
    name = call.name
    if name not in page.FILES:
        files = ", ".join(page.FILES)
        raise Refused("not_found", f"The page has no file {name[:100]!r}; its files: {files}.")
    kind = "text/css" if name == page.STYLE else "text/javascript"
    safe = {"X-Content-Type-Options": "nosniff"}
    return Answer(page.read(name).encode(), 200, HEADERS | safe, f"{kind}; charset=utf-8")


class PageRoutes:
    """Handlers of the routes of a server's page, for which it observes iterations."""

    def __init__(self, server: Server):
        config, decode = server.config, server.tokenizer.decode

        def beginning(inference: Inference) -> str | None:
            """Return the first characters of a prompt, if the server may show them."""
            if config.live != "prompts":
                return None
            return decode(inference.prompt_ids[: 4 * SHOWN])[:SHOWN]

        self._live = Live(server.manager, about(config, config.model_name), beginning)
        server.manager.observe(self._live)
        self._loads = MadeLoad(server)

    def handlers(self) -> Handlers:
        return {PAGE: _page, FILE: _file, EVENTS: self._events, LOAD: self._load}

    def _events(self, call: Call) -> Answer:
        since = number(call.query, "since", "give the cursor of an earlier answer")
        text = self._live.events(since, load=self._loads.status(call.query.get("load")))
        return Answer(text.encode(), headers=HEADERS)

    def _load(self, call: Call) -> Answer:
        return answer({"id": self._loads.start(parse(LoadRequest, call.body))})
