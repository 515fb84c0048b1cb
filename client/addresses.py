"""The server that client.py measures: its address, its API key, and its mode or model."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from dotenv import dotenv_values

from client.arguments import asked_of
from client.calls import ServerError, get
from client.formats import about_tokens
from client.machine import ROOT
from client.measure import Target, openai_model
from client.quoting import named
from client.trace_file import Context
from client.wire import OTHERS, Asked, wire
from config.reading import read_key
from config.settings import ConfigError


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
    """Return an address without the /v1 that OpenAI clients write. Raises ConfigError, also for one
    that may have a secret, which reports would show.
    """
    if {*"@?#"} & {*url}:
        raise ConfigError(
            f"{flag}: an address is saved and shown, so it has no user, password, query or "
            "fragment; write http://HOST:PORT/PATH, and send a secret with --api-key or --header"
        )
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


def other_target(
    url: str, asked: Asked, name: str = "", model: str | None = None, key: str | None = None
) -> Target:
    """Return a server that is none of ours; its name and model as given, else of what it lists.
    Raises ServerError.
    """
    model = str(model or asked.extra.get("model") or openai_model(url, key, asked.headers))
    by = wire(asked.api, model, asked=asked)
    return Target(name or named(Path(model).name), url, by, ours=False, key=key)


def target_of(url: str, arguments: argparse.Namespace) -> Target:
    """Return the server to measure. Raises ServerError, and ConfigError for an invalid key."""
    key, asked = api_key(arguments.api_key), asked_of(arguments)
    if asked.api in OTHERS:
        return other_target(url, asked, model=arguments.model, key=key)
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
    asked = asked_of(arguments)
    route = "/v1/models" if asked.api in OTHERS else ""
    with contextlib.suppress(ServerError, LookupError, TypeError, ValueError, AttributeError):
        about = get(url + route, key=api_key(arguments.api_key), secrets=asked.headers)
        model = arguments.model or asked.extra.get("model")
        models = about["data"] if route else [about["config"] | {"id": model}]
        [config, *_] = [each for each in models if model in (None, each["id"])]
        by_bytes = config.get("tokenizer") == "bytes"
        count = (lambda text: len(text.encode())) if by_bytes else about_tokens
        return Context(int(config["max_model_len"]), count)
    return None
