"""Config: all settings of a server, and what follows from them; and whether its address is free."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from config.reading import PoolSize, Source, digest, read_lora, read_lora_random, read_size
from config.settings import ConfigError, Settings, varying_parts
from config.shapes import Shape, shape_of
from scheduling.policies import MODES, ORDERS, chosen
from scheduling.policies.deadlines import read_slo_classes
from scheduling.speculation import read_draft, read_rates

MAX_BODY_BYTES = 1_000_000  # a request's; a larger one is 413
SPARE_FILES = 128  # open files of a server beside its connections
DOOMED_FILES = 4096  # connections that may wait to be closed, where the system allows as many files
# how long Ctrl-C waits for clients; gunicorn kills the worker 2 s after a second signal
END_S = 1.5
BOOT_ERROR = 3  # exit code that gunicorn takes for a worker that is not to be started again
# variables that hand the Config, and the name of what loads the engine, to gunicorn's workers
HANDOFF, LOADER = "EFFECTIVE_BATCHING_CONFIG", "EFFECTIVE_BATCHING_LOADER"


class Config(Settings):
    """Every setting of a server, and what other files compute from it.

    `build` refuses settings that do not fit together; those of a saved run, or that the launcher
    hands on, fitted once.
    """

    @property
    def shape(self) -> Shape:
        return shape_of(self.model)

    @property
    def model_name(self) -> str:
        """The name by which clients call the model: of a folder its own, without its path."""
        return Path(self.model).name

    @property
    def blocks_per_request(self) -> int:
        """KV blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)

    @property
    def pool(self) -> PoolSize:
        return read_size(self.kv_cache)

    @property
    def pool_is_known(self) -> bool:
        """False if a GPU's memory decides on n_blocks, once the weights are there."""
        return self.pool.unit != "%"

    @property
    def n_blocks(self) -> int:
        """KV blocks in the pool: those that kv_cache states, or that its GB hold, but no more than
        max_batch_size rows can use, unless prefix_caching or paused rows use more.

        For a share of a GPU's memory as many as the rows can use; fewer may fit.
        """
        if self.pool.unit == "blocks":
            return int(self.pool.amount)
        usable = self.max_batch_size * self.blocks_per_request
        if self.model == "fake" or not self.pool_is_known:
            return usable
        fitting = int(self.pool.amount * 1e9 / self.block_bytes)
        more = self.prefix_caching or ORDERS[self.order].preemptive
        return fitting if more else min(usable, fitting)

    @property
    def multiplied_as(self) -> str:
        """Type of the linear layers' weights."""
        return "int8" if self.linear == "int8" else self.dtype

    @property
    def kept_as(self) -> str:
        """Type of keys and values in the cache."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return self.shape.kv_bytes_per_token(self.kept_as)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def forced_rates(self) -> list[float]:
        """Chances that draft tokens are accepted, where they are stated."""
        kind, rates = read_draft(self.draft)
        return read_rates(rates) if kind == "acceptance" else []

    @property
    def max_tokens(self) -> int:
        """Tokens of an iteration at most."""
        return self.max_batch_size + self.token_budget

    @property
    def draft_model(self) -> Config | None:
        """Settings of the draft model: the server's own, and KV blocks for all rows; or None."""
        kind, model = read_draft(self.draft)
        if kind != "model":
            return None
        kv_cache = f"{self.max_batch_size * self.blocks_per_request}blocks"
        ours = {"model": model, "kv_cache": kv_cache, "draft": "ngram", "speculate": 0}
        ours |= {"lora": "", "lora_random": ""}
        return self.model_copy(update=ours)

    @property
    def adapters(self) -> dict[str, Source]:
        """Source of each LoRA adapter, by its name."""
        return read_lora(self.lora) | read_lora_random(self.lora_random)

    @property
    def lora_slots(self) -> int:
        """Adapters that the engine holds at once; 0: there are none."""
        return self.max_loras * bool(self.lora or self.lora_random)

    @property
    def captures(self) -> bool:
        """True if forward passes become CUDA graphs; with PyTorch's attention they cannot."""
        triton = self.attention == "triton" and self.generator == "cached"
        return triton and bool(self.decoder_batch_sizes)

    @property
    def norms(self) -> Literal["kernel", "triton", "plain"]:
        """Additions and norms: ours where attention or linear layers are."""
        if "triton" in (self.attention, self.linear):
            return "triton"
        ours = self.attention == "kernel" or self.linear in ("kernel", "int8")
        return "kernel" if ours else "plain"

    @property
    def sampler(self) -> Literal["kernel", "triton", "plain"]:
        """Sampling: our C++ beside our other kernels for CPUs, our Triton beside our products."""
        if self.linear == "triton":
            return "triton"
        return "kernel" if self.norms == "kernel" else "plain"

    @property
    def max_in_flight(self) -> int:
        """Requests running and waiting at most; beyond it 429."""
        return self.max_batch_size + self.max_waiting

    @property
    def http_threads(self) -> int:
        """A thread for each request in flight, and some for /health, /stats and refusals."""
        return self.max_in_flight + 16

    @property
    def http_connections(self) -> int:
        """Open connections at most; idle ones need no thread, and all that come get an answer."""
        return 2 * max(self.http_threads, 1024)

    def connections_within(self, files: int) -> int:
        """Return the connections of a process that may open so many files."""
        return max(16, min(self.http_connections, files - SPARE_FILES))

    @property
    def address(self) -> str:
        """Host and port as in a URL: an IPv6 address has brackets (RFC 3986, 3.2.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names that a Host header may have, beside addresses; None: any, with keys or with *."""
        names = {name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()}
        if self.users_of_keys or "*" in names:
            return None
        return frozenset(names | {"localhost", self.host.lower(), socket.gethostname().lower()})

    @property
    def users_of_keys(self) -> dict[str, str | None]:
        """The user of each key, by the key's digest; None for api_key. Empty: no key is needed."""
        if self.api_key is not None:
            return {digest(self.api_key.get_secret_value()): None}
        return {**(self.api_keys or {})}

    def handoff(self) -> str:
        """Return all of it as JSON, keys too, for the worker that gunicorn starts and no reader."""
        key = self.api_key and self.api_key.get_secret_value()
        return json.dumps(self.model_dump() | {"api_key": key, "api_keys": self.api_keys})

    def warnings(self) -> Iterator[str]:
        """Yield what the user should know but need not change."""
        if not self.users_of_keys and not _is_loopback(self.host):
            yield (
                f"any client that reaches {self.address} may use this server; --api-key "
                f"(or EB_API_KEY) makes it ask for a key"
            )
        limited = [each for each in read_slo_classes(self.slo_classes).values() if each.ttft_ms]
        if self.shed and not limited:
            yield (
                "--shed goes by limits on the first token, and here only requests state them "
                "(slo_ttft_ms); --slo-classes defines classes of requests that have limits"
            )
        if self.weights == "random" and self.model != "fake":
            yield "the weights are random, so the text is noise; speed does not depend on them"
        if varying := varying_parts(self.model_dump()):
            yield f"a request's text may depend on what is computed beside it: {varying}"
        if (self.request_timeout_s or 0) > self.drain_timeout_s:
            yield (
                f"request_timeout_s {self.request_timeout_s:g} is beyond drain_timeout_s "
                f"{self.drain_timeout_s:g}, after which SIGTERM ends requests that have time left; "
                "raise --drain-timeout-s"
            )
        yield from chosen(MODES, self.mode, self).warnings(self.max_batch_size)


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(config: Config) -> None:
    """Raise ConfigError if a server could not listen on its host and port."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.address} ({error.strerror}); choose another "
                "--port or --host"
            ) from None


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
