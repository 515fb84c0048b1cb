"""The HTTP server. `create_app` parses, validates, tokenizes, enqueues, waits and answers; nothing else.

    python app.py MODE [settings]    checks the settings, fetches what is missing, becomes gunicorn

The launcher resolves the Config once and hands it on; a bad setting ends with exit 2 before any worker boots.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

from flask import Flask, Response, jsonify, request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from batching import BatchingManager, Inference, Sampling
from config import HANDOFF, Config, ConfigError, parse
from errors import GenerationFailed, InvalidRequest, Overloaded, ServingError
from generate import load_generator
from kernels import KernelUnavailable
from serving import create_manager
from stats import DEFINITIONS, ServerStats, times_of
from tokenizer import LONGEST_TOKEN, TokenizerUnavailable, load_tokenizer
from watcher import Watcher
from weights import WeightsUnavailable, locate

MAX_BODY_BYTES = 1_000_000
ROUTES = {
    "POST /inference": "complete a prompt, or a group of prompts",
    "GET /stats": "measures of the current run; ?iterations=1 adds one entry per iteration",
    "POST /stats/reset": "start a new run",
    "GET /health": "the process answers",
    "GET /ready": "the model is loaded and the handler thread works",
    "GET /": "what this server is",
}
log = logging.getLogger("effective_batching")


_Strings = Annotated[list[str], Field(fail_fast=True)]
_Integers = Annotated[list[int], Field(fail_fast=True)]
_Lists = Annotated[list[_Integers], Field(fail_fast=True)]


class InferenceRequest(BaseModel):
    """The body of POST /inference. Types are strict: no "10", no true, no NaN; unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="allow")  # `_parse` refuses the first unknown field

    # fail_fast: a list with 100,000 mistakes ends at the first, instead of holding the GIL while each is described
    prompt: Annotated[str, StringConstraints(min_length=1)] | _Strings | None = None
    prompt_ids: _Integers | _Lists | None = None
    num_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    echo: bool = False
    stream: bool = False

    @property
    def alone(self) -> bool:
        """One prompt, and not a group of them (which a list of one is too)."""
        return isinstance(self.prompt, str) or bool(self.prompt_ids and isinstance(self.prompt_ids[0], int))

    @model_validator(mode="after")
    def _one_prompt(self) -> InferenceRequest:
        if self.prompt is None and self.prompt_ids is None:
            raise ValueError("give a prompt or prompt_ids")
        if self.prompt is not None and self.prompt_ids is not None:
            raise ValueError("give prompt or prompt_ids, not both")
        if self.stream:
            raise ValueError("stream is not offered yet; leave it out or set it to false")
        return self


def create_app(config: Config, manager: BatchingManager | None = None, stats: ServerStats | None = None) -> Flask:
    """Return the app of a server. Without a manager it starts its own, which `app.extensions["manager"]` holds.

    Raises TokenizerUnavailable and WeightsUnavailable.
    """
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES + 1  # where Flask stops reading a body without a Content-Length
    tokenizer = load_tokenizer(config.tokenizer)
    stats = stats or ServerStats(config.max_batch_size)
    if manager is None:
        path = locate(config)
        manager = create_manager(config, lambda: load_generator(config, path, tokenizer.n_vocab), [stats])
    app.extensions["manager"] = manager
    seeds, watcher = _Seeds(config.seed), Watcher(manager)

    @app.post("/inference")
    def inference() -> Response:
        raw = request.get_data()
        if len(raw) > MAX_BODY_BYTES:
            raise RequestEntityTooLarge
        body = _parse(raw)
        prompts = _prompts(body)
        seed = seeds.next() if body.seed is None else body.seed
        sampling = Sampling(body.temperature, body.top_k, body.top_p, seed)
        timeout_s = body.timeout_s or config.request_timeout_s
        deadline = None if timeout_s is None else manager.clock() + timeout_s
        group = [Inference(ids, body.num_tokens, sampling, deadline) for ids in prompts]
        manager.enqueue(group)
        with watcher.watching(request.environ.get("gunicorn.socket"), group):
            for member in group:
                member.done.wait()
        for member in group:
            if member.error is not None:
                raise member.error
        shown = [member.prompt_ids + member.tokens if body.echo else member.tokens for member in group]
        texts = [tokenizer.decode(ids) for ids in shown]
        timings = [_timings(member) for member in group]
        prompt_tokens = sum(len(ids) for ids in prompts)
        completion_tokens = sum(len(member.tokens) for member in group)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        usage["total_tokens"] = prompt_tokens + completion_tokens
        return jsonify(
            completion=texts[0] if body.alone else texts, usage=usage, timings=timings[0] if body.alone else timings, seed=seed
        )

    def _prompts(body: InferenceRequest) -> list[list[int]]:
        """The ids of every prompt, each checked to fit. Refuses a text too long to tokenize before tokenizing it."""
        field = "prompt" if body.prompt is not None else "prompt_ids"
        room = config.max_model_len - body.num_tokens
        if not body.alone and len(body.prompt or body.prompt_ids or []) > config.max_in_flight:
            raise InvalidRequest(f"This server holds {config.max_in_flight} prompts at most; send fewer at once.", param=field)
        if body.prompt is not None:
            texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            for text in texts:
                if len(text.encode()) > config.max_model_len * LONGEST_TOKEN[config.tokenizer]:
                    raise InvalidRequest(
                        f"The prompt is longer than the context of {config.max_model_len} tokens; shorten it.", param=field
                    )
            prompts = [tokenizer.encode_ordinary(text) for text in texts]
        else:
            prompts = [body.prompt_ids] if body.alone else body.prompt_ids  # type: ignore[assignment,list-item]
        if not prompts or not all(prompts):
            raise InvalidRequest("A prompt must not be empty.", param=field)
        for ids in prompts:
            if len(ids) > room:
                raise InvalidRequest(
                    f"{len(ids)} prompt tokens + {body.num_tokens} completion tokens is beyond the context of "
                    f"{config.max_model_len}; shorten the prompt or lower num_tokens.",
                    param="num_tokens" if len(ids) < config.max_model_len else field,
                )
            if not 0 <= min(ids) <= max(ids) < tokenizer.n_vocab:
                raise InvalidRequest(f"Every prompt id must be in 0 … {tokenizer.n_vocab - 1}.", param=field)
        return prompts

    def _timings(member: Inference) -> dict[str, Any]:
        times = times_of(member)
        seconds = {name: round(getattr(times, name), 6) for name in ("queue_s", "ttft_s", "decode_s", "held_s", "e2e_s")}
        arrived_at = times.arrived_at + manager.epoch_offset
        return {"arrived_at": arrived_at, **seconds, "itl_s": [round(gap, 6) for gap in times.itl_s]}

    @app.get("/stats")
    def get_stats() -> Response:
        result = {"mode": config.mode, "model": config.model} | stats.snapshot()
        if request.args.get("iterations"):
            result["iterations"] = stats.iterations()
        return jsonify(result)

    @app.post("/stats/reset")
    def reset_stats() -> Response:
        stats.reset(manager.clock())
        return jsonify(reset=True)

    @app.get("/health")
    def health() -> Response:
        return jsonify(status="ok")

    @app.get("/ready")
    def ready() -> tuple[Response, int]:
        reason = manager.not_ready_because()
        return (jsonify(status="ready"), 200) if reason is None else (jsonify(status="not ready", reason=reason), 503)

    @app.get("/")
    def describe() -> Response:
        return jsonify(
            name="effective-batching",
            mode=config.mode,
            model=config.model,
            config=config.model_dump(),
            routes=ROUTES,
            definitions=DEFINITIONS,
            pids=[os.getpid(), os.getppid()],  # a client that started a server can tell that it talks to it
        )

    @app.errorhandler(ServingError)
    def serving_error(error: ServingError) -> tuple[Response, int, dict[str, str]]:
        if isinstance(error, (InvalidRequest, Overloaded)):
            stats.count("invalid" if isinstance(error, InvalidRequest) else "refused")
        headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
        return _error(str(error), type(error).__name__, error.param, error.code), error.status, headers

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> tuple[Response, int]:
        code = (error.name or "error").lower().replace(" ", "_")
        message = error.description or error.name
        if error.code == 404:
            message = f"There is no {request.method} {request.path} here; routes: {', '.join(ROUTES)}."
        if error.code == 413:
            message = f"The body is larger than {MAX_BODY_BYTES:,} bytes."
        return _error(message, "HTTPError", None, code), error.code or 500

    @app.errorhandler(Exception)
    def defect(error: Exception) -> tuple[Response, int, dict[str, str]]:
        log.error("unexpected error", exc_info=error)
        return serving_error(GenerationFailed(f"Unexpected error: {type(error).__name__}"))

    return app


class _Seeds:
    """A seed for each request that brings none: config.seed, config.seed + 1, …"""

    def __init__(self, first: int):
        self._next = first
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            seed, self._next = self._next, (self._next + 1) % 2**63
            return seed


def _parse(raw: bytes) -> InferenceRequest:
    try:
        body = InferenceRequest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{field}: {message}" if field else message, param=field) from None
    for field in body.model_extra or ():
        valid = ", ".join(InferenceRequest.model_fields)
        raise InvalidRequest(f"{field[:100]}: unknown field; valid ones are {valid}", param=field[:100])
    return body


def _error(message: str, kind: str, param: str | None, code: str) -> Response:
    return jsonify(error={"message": message, "type": kind, "param": param, "code": code})


# ---- gunicorn


def serve() -> Flask:
    """gunicorn's entry point, in the worker: the app of the Config that the launcher handed on."""
    config = Config.model_validate_json(os.environ[HANDOFF])
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    # A thread that runs Python makes every torch operation wait for the GIL this long: 5 ms, the default, is
    # longer than a whole iteration.
    sys.setswitchinterval(1e-4)
    tokenizer, stats = load_tokenizer(config.tokenizer), ServerStats(config.max_batch_size)

    def give_up(error: Exception) -> None:
        log.error(
            "the model could not be loaded: %s", error, exc_info=not isinstance(error, (WeightsUnavailable, KernelUnavailable))
        )
        os._exit(3)  # gunicorn's code for a worker that cannot boot: it stops instead of trying again

    path = locate(config)
    manager = create_manager(config, lambda: load_generator(config, path, tokenizer.n_vocab), [stats], on_load_failure=give_up)
    threading.Thread(target=_announce, args=(config, manager), daemon=True).start()
    return create_app(config, manager, stats)


def _announce(config: Config, manager: BatchingManager) -> None:
    if manager.wait_until_loaded():
        log.info("ready: %s mode on http://%s:%d", config.mode, config.host, config.port)


def main() -> None:
    try:
        config = parse(sys.argv[1:])
        load_tokenizer(config.tokenizer)
        locate(config)
        _check_port(config)
    except (ConfigError, TokenizerUnavailable, WeightsUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    kv = f"{config.n_blocks} KV blocks of {config.block_size} tokens" if config.generator == "cached" else "no KV cache"
    print(
        f"serving {config.model} ({config.shape.parameters / 1e6:.1f}M parameters, {config.dtype}, {config.device}, "
        f"{config.threads} threads, attention {config.attention}, linear {config.linear}) in mode {config.mode}: "
        f"at most {config.max_batch_size} rows, {kv}",
        file=sys.stderr,
    )
    if config.host == "127.0.0.1":
        print("listening to this machine alone; --host 0.0.0.0 listens to others too", file=sys.stderr)
    # every request in flight is an open socket; many systems allow 1,024 files unless asked
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * config.http_threads + 256
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(soft, wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)), hard)
    )
    root = Path(__file__).resolve().parent
    os.environ[HANDOFF] = json.dumps(config.model_dump())
    command = [sys.executable, "-m", "gunicorn", "--config", str(root / "gunicorn_conf.py"), "app:serve()"]
    os.chdir(root)
    os.execv(sys.executable, command)


def _check_port(config: Config) -> None:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another --port or --host"
            ) from None


if __name__ == "__main__":
    main()
