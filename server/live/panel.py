"""Routes of the page, whatever HTTP server carries them."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.inference import Inference
from server.api import own
from server.api.bodies import LoadRequest
from server.api.messages import Answer, answer
from server.api.refusals import Refused
from server.api.request import parse
from server.live import page
from server.live.made_load import MadeLoad
from server.live.observer import Live, about
from server.serving import Server

SHOWN = 80  # characters of a prompt
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def view() -> Answer:
    """GET /live: the page, which holds no data."""
    safe = {"Content-Security-Policy": page.security_policy()}
    return Answer(page.read().encode(), 200, HEADERS | safe, "text/html; charset=utf-8")


def file(name: str) -> Answer:
    """GET /live/{name}: the page's style, or one of its scripts. Raises Refused for another name.

    Browsers keep none, as they keep no page: after an update of the server all files fit together.
    """
    if name not in page.FILES:
        files = ", ".join(page.FILES)
        raise Refused("not_found", f"The page has no file {name[:100]!r}; its files: {files}.")
    kind = "text/css" if name == page.STYLE else "text/javascript"
    safe = {"X-Content-Type-Options": "nosniff"}
    return Answer(page.read(name).encode(), 200, HEADERS | safe, f"{kind}; charset=utf-8")


class Panel:
    """Routes of a server's page, for which it observes iterations. All raise InvalidRequest."""

    def __init__(self, server: Server):
        config, decode = server.config, server.tokenizer.decode

        def beginning(inference: Inference) -> str | None:
            """Return the first characters of a prompt, if the server may show them."""
            if not config.live_prompts:
                return None
            return decode(inference.prompt_ids[: 4 * SHOWN])[:SHOWN]

        self._live = Live(server.manager, about(config, config.model_name), beginning)
        server.manager.observe(self._live)
        self._loads = MadeLoad(server)

    def events(self, query: Mapping[str, str]) -> Answer:
        """GET /live/events"""
        since = own.number(query, "since", "give the cursor of an earlier answer")
        text = self._live.events(since, load=self._loads.status(query.get("load")))
        return Answer(text.encode(), headers=HEADERS)

    def load(self, raw: bytes) -> Answer:
        """POST /live/load"""
        return answer({"id": self._loads.start(parse(LoadRequest, raw))})
