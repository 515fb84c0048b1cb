"""Single calls of a server, beside a load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import requests

from client.wire import DONE, Unreadable, cut_off, data_of, event_of, refusal, utf8
from config.reading import parse

NONE: Mapping[str, str] = MappingProxyType({})
SHORTEST_SECRET = 8  # characters of a word that is hidden: shorter ones are words of sentences


class ServerError(Exception):
    """The server could not be reached, or did not answer as this client expects."""


def headers(key: str | None) -> dict[str, str]:
    """Return every request's headers. Both libraries take the key off a redirect elsewhere."""
    return {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )


def get(
    url: str, timeout_s: float = 30.0, key: str | None = None, secrets: Mapping[str, str] = NONE
) -> dict[str, Any]:
    """GET a JSON object. Raises ServerError, also after `timeout_s` without an answer. secrets:
    more headers, which no error shows.
    """
    with _exchange("GET", url, None, timeout_s, key, secrets) as response:
        return _object(response.content)


def get_text(url: str, timeout_s: float = 30.0) -> str:
    """GET a text, such as /metrics. Raises ServerError as `get` does."""
    with _exchange("GET", url, None, timeout_s, None) as response:
        return response.text


def post(
    url: str, body: Any = None, timeout_s: float = 3600.0, key: str | None = None
) -> dict[str, Any]:
    """POST a JSON object. Raises ServerError, with the server's own message where it gave one."""
    with _exchange("POST", url, {} if body is None else body, timeout_s, key) as response:
        return _object(response.content)


def stream(
    url: str,
    body: dict[str, Any],
    timeout_s: float,
    show: Callable[[str], None],
    key: str | None = None,
) -> None:
    """POST to /inference at `url`; `show` each piece of text as it comes. Raises ServerError."""
    with _exchange("POST", f"{url}/inference", body | {"stream": True}, timeout_s, key) as response:
        other = b""
        for line in response.iter_lines(1):  # else 512 bytes are waited for
            if (content := data_of(line)) == DONE:
                return
            if content is None:
                other += line
            else:
                show(utf8(event_of(content).get("text", "")))
        raise cut_off(other)


def _object(content: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for all else."""
    if not isinstance(value := parse(content), dict):
        raise ValueError
    return value


def hidden(text: str, key: str | None, secrets: Mapping[str, str]) -> str:
    """Return a text without the key and the words of secret headers, which a server may repeat."""
    for word in " ".join([key or "", *secrets.values()]).split():
        text = text.replace(word, "…") if len(word) >= SHORTEST_SECRET else text
    return text


@contextlib.contextmanager
def _exchange(
    method: str,
    url: str,
    body: Any,
    timeout_s: float,
    key: str | None,
    secrets: Mapping[str, str] = NONE,
) -> Iterator[requests.Response]:
    """Send a request and yield its answer; failures become a ServerError."""
    try:
        with requests.Session() as session:
            session.trust_env = False  # no proxy between a client and a server that it measures
            session.verify = os.environ.get("SSL_CERT_FILE", True)  # as the load's library does
            with session.request(
                method, url, headers=headers(key) | dict(secrets), timeout=timeout_s, stream=True,
                json=body, allow_redirects=not secrets,
            ) as response:  # fmt: skip
                if response.status_code != 200:
                    location = response.headers.get("Location", "")
                    why = refusal(response.status_code, response.content, location)
                    raise ServerError(f"{url} answered {hidden(why, key, secrets)}")
                yield response
    except requests.exceptions.SSLError as error:
        raise ServerError(
            f"no answer from {url} ({_cause(error)}); of an authority of your own SSL_CERT_FILE "
            "names the certificate"
        ) from None
    except (requests.ConnectionError, requests.Timeout, OSError) as error:
        raise ServerError(
            f"no answer from {url} ({_cause(error)}); is it running? "
            "./server.sh MODE starts one of ours"
        ) from None
    except Unreadable as error:
        raise ServerError(f"{url}: {hidden(str(error), key, secrets)}") from None
    except (ValueError, AttributeError):
        raise ServerError(
            f"{url} did not answer with JSON in the form expected; is it an effective-batching "
            f"server?"
        ) from None


def _cause(error: BaseException) -> str:
    """Return the system's own message, below those of libraries."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return type(error).__name__
