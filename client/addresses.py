"""The server that client.py measures: its address, its API key, and its mode or model."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from dotenv import dotenv_values

from client.calls import ServerError, get
from client.formats import words_and_signs
from client.machine import ROOT
from client.measure import Target, openai_model
from client.quoting import named
from client.trace_file import Context
from client.wire import wire
from config import ConfigError, read_key


def server_url(given: str | None) -> str:
    """Return --url, else IP of the environment or .env, else this machine. Raises ConfigError."""
    address = given or _setting("IP") or "127.0.0.1"
    if "//" not in address:
        address = f"http://{address}"
    address = base_url(address, "--url" if given else "IP")
    parts = urlsplit(address)
    if parts.port is None and parts.scheme == "http" and not parts.path:
        address += ":8500"
    return address


def base_url(url: str, flag: str) -> str:
    """Return an address without the /v1 that OpenAI clients write. Raises ConfigError."""
    try:
        urlsplit(url).port  # noqa: B018
    except ValueError as error:
        fix = "write http://HOST:PORT, with an IPv6 address in brackets"
        raise ConfigError(f"{flag} {url}: {error}; {fix}") from None
    return url.rstrip("/").removesuffix("/v1")


def _setting(name: str) -> str | None:
    value = os.environ.get(name)
    for path in (ROOT / "client" / ".env", ROOT / ".env"):
        value = value or (dotenv_values(path).get(name) if path.is_file() else None)
    return value


def api_key(given: str | None) -> str | None:
    """Return --api-key, else EB_API_KEY as for `server_url`. Raises ConfigError."""
    try:
        return read_key((_setting("EB_API_KEY") or "none") if given is None else given)
    except ValueError as error:
        raise ConfigError(f"--api-key: {error}") from None


def target_of(url: str, arguments: argparse.Namespace) -> Target:
    """Return the server to measure. Raises ServerError, and ConfigError for an invalid key."""
    key = api_key(arguments.api_key)
    if arguments.api == "openai":
        model = arguments.model or openai_model(url, key)
        return Target(named(Path(model).name), url, wire("openai", model), ours=False, key=key)
    try:
        about = get(url, key=key)
    except ServerError as error:
        raise ServerError(f"{error} (others than ours are asked with --api openai)") from None
    if about.get("name") != "effective-batching":
        raise ServerError(f"{url} is no effective-batching server; ask others with --api openai")
    # the mode may be of a file that this client has not loaded: FILE.py:NAME
    name = named(str(about.get("mode")).rpartition(":")[2])
    return Target(name, url, wire("inference", stream=arguments.stream), key=key)


def context_of(url: str, arguments: argparse.Namespace) -> Context | None:
    """Return the longest request of a server; None where it does not say."""
    route = "/v1/models" if arguments.api == "openai" else ""
    with contextlib.suppress(ServerError, LookupError, TypeError, ValueError, AttributeError):
        about = get(url + route, key=api_key(arguments.api_key))
        config = about["data"][0] if route else about["config"]
        by_bytes = config.get("tokenizer") == "bytes"
        count = (lambda text: len(text.encode())) if by_bytes else words_and_signs
        return Context(int(config["max_model_len"]), count)
    return None
