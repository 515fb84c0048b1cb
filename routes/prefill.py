"""The way to the server that computes prompts and first tokens for this one (--prefill-url)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from urllib.parse import urlsplit

from scheduling.errors import DeadlinePassed
from scheduling.inference import Inference
from serving import Server
from wire.handover import BYTES, unpack
from wire.refusals import Refused


class PrefillServer:
    """It is asked what this server was asked, and answers with first tokens, keys and values."""

    def __init__(self, server: Server, url: str):
        self._server, self._url, self._host = server, url, urlsplit(url).netloc

    def compute(
        self, group: Sequence[Inference], path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        """Have the prompts of a group computed, which is then to be queued, but for those that are
        over with their first tokens.

        Raises what it answers if it refuses, DeadlinePassed, and Refused if it does not answer or
        its keys and values do not fit. Nothing is computed here instead: whatever is measured
        would not be what the settings say.
        """
        clock = self._server.manager.clock
        arrived_at, patience_s = clock(), self._server.seconds_until(group[0].deadline)
        try:
            with closing(http.client.HTTPConnection(self._host, timeout=patience_s)) as connection:
                connection.request("POST", path, body, headers)
                response = connection.getresponse()
                answer = response.read()
            if response.status != 200:
                error, wait = json.loads(answer)["error"], response.getheader("Retry-After")
                again = {"Retry-After": wait} if wait else {}
                raise Refused(response.status, error["code"], error["message"], **again)
            if response.getheader("Content-Type") != BYTES:
                message = f"{self._url} is no prefill server; start it with --prefill-only."
                raise Refused(502, "no_prefill_server", message)
            unpack(self._server.config, answer, group, arrived_at, clock())
        except TimeoutError:
            raise DeadlinePassed("The request's deadline passed before its answer.") from None
        except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError) as error:
            message = (
                f"The prefill server {self._url} did not answer ({type(error).__name__}); send "
                "the request again, or look whether it runs."
            )
            raise Refused(502, "prefill_server_failed", message) from None
        for member in group:
            member.notify()
