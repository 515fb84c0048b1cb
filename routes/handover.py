"""Prompts that another server computes: the request of a decode server (--prefill-url), and the
answer of a prefill server (--prefill-only). The answer is a line of JSON with first tokens and the
form of keys and values, and then the keys and values of one inference after another.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from urllib.parse import urlsplit

from config import Config
from scheduling.errors import DeadlinePassed, InvalidRequest
from scheduling.handover import Handover, begin
from scheduling.inference import Inference
from serving import Exchange, Server
from wire.messages import Answer, to_json
from wire.refusals import Refused

BYTES = "application/octet-stream"
LIKE = ("model_name", "weights", "weights_seed", "kept_as", "block_size")  # of both servers


def packed(config: Config, exchange: Exchange) -> Answer:
    """Return the answer to a request whose first tokens are computed."""
    group, goes_on = exchange.group, exchange.request.num_tokens > 1
    firsts = [
        (member.tokens[0], member.sampling.seed, (member.admitted_at or 0.0) - member.arrived_at)
        for member in group
    ]
    head = {"of": {name: getattr(config, name) for name in LIKE}, "firsts": firsts}
    data = [
        member.handed.data if member.handed else bytes(_size(config, member))  # the fake model's
        for member in group
        if goes_on and not member.stopped
    ]
    return Answer(b"".join((to_json(head).encode(), b"\n", *data)), content_type=BYTES)


def unpack(
    config: Config, body: bytes, group: Sequence[Inference], arrived_at: float, now: float
) -> None:
    """Begin a group by such an answer. arrived_at: at this server.

    Raises Refused for keys and values of another model or form, and ValueError, KeyError or
    TypeError for what is no such answer.
    """
    line, _, data = body.partition(b"\n")
    head, at = json.loads(line), 0
    for name in LIKE:
        if (theirs := head["of"][name]) != (ours := getattr(config, name)):
            message = f"The prefill server has {name} {theirs!r} and this one {ours!r}"
            message += "; start both with the same settings."
            raise Refused("prefill_server_differs", message)
    for member, (token, seed, queue_s) in zip(group, head["firsts"], strict=True):
        end = at + _size(config, member)
        handover = Handover(bytearray(data[at:end]), arrived_at)
        begin(member, token, seed, handover, queue_s, now)
        at = at if member.is_over else end
    if at != len(data):
        raise ValueError(f"{len(data)} bytes of keys and values instead of {at}")


def _size(config: Config, inference: Inference) -> int:
    """Return the bytes of the keys and values of a prompt's KV blocks."""
    return -(-len(inference.prompt_ids) // config.block_size) * config.block_bytes


class PrefillServer:
    """The server that computes prompts and first tokens for this one."""

    def __init__(self, server: Server, url: str):
        self._server, self._url, self._host = server, url, urlsplit(url).netloc

    def begin(
        self, group: Sequence[Inference], path: str, body: bytes, headers: Mapping[str, str]
    ) -> list[Inference]:
        """Forward a request to it; return the inferences to queue, without those that end with
        their first tokens.

        Raises the prefill server's refusals, InvalidRequest for log-probabilities, DeadlinePassed,
        and Refused for any other failure. No prompt is computed here instead: measurements would
        not be of the stated settings.
        """
        if group[0].scores is not None:
            message = "logprobs: a decode server (--prefill-url) has none; leave it out."
            raise InvalidRequest(message, param="logprobs")
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
                raise Refused(error["code"], error["message"], response.status, **again)
            if response.getheader("Content-Type") != BYTES:
                message = f"{self._url} is no prefill server; start it with --prefill-only."
                raise Refused("no_prefill_server", message)
            unpack(self._server.config, answer, group, arrived_at, clock())
        except TimeoutError:
            raise DeadlinePassed("The request's deadline passed before its answer.") from None
        except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError) as error:
            message = f"The prefill server {self._url} did not answer ({type(error).__name__}); "
            message += "send the request again, or check that it runs."
            raise Refused("prefill_server_failed", message) from None
        for member in group:
            member.done = threading.Event()
            member.done.set()  # if it is queued, it gets another one
            member.notify()
        return [member for member in group if not member.is_over]
