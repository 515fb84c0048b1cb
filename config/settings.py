"""Every setting of a server, validated. A field holds what will be used, and other files compute
from it.
"""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import psutil
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

import kernels
from config.resolve import VOCABULARIES
from scheduling.policies import MODES, ORDERS, Order, Policy, chosen
from shapes import SHAPES, Shape, shape_of

# of each setting that is a field of policies, the modes that have it
ONLY_IN = {
    each.name: tuple(
        mode for mode, kind in MODES.items() if each.name in {its.name for its in fields(kind)}
    )
    for policy in MODES.values()
    for each in fields(policy)
}
ONLY_OVER_HTTP = (
    "request_timeout_s",
    "header_timeout_s",
    "body_timeout_s",
    "drain_timeout_s",
    "request_log",
    "host",
    "port",
    "api_key",
    "log_level",
)
ONLY_ON_GPU = ("gpu_memory_utilization", "enforce_eager")
MAX_BODY_BYTES = 1_000_000  # of a request; a larger one is 413
SPARE_FILES = 128  # open files of a server beside its connections
DOOMED_FILES = 4096  # connections that may wait to be closed, where the system allows as many files
# how long Ctrl-C waits for clients; after a second signal gunicorn's master kills the worker within
# 2 s
END_S = 1.5
HANDOFF = (
    "EFFECTIVE_BATCHING_CONFIG"  # how the launcher gives the resolved Config to gunicorn's worker
)


class ConfigError(Exception):
    """A setting that cannot be used; the message is one sentence that names the fix."""


def flag(name: str) -> str:
    """How a setting is named on a command line."""
    return "--" + name.replace("_", "-")


def _setting(default: Any, meaning: str, shown: str | None = None, **checks: Any) -> Any:
    return Field(
        default, description=meaning, json_schema_extra={"shown": shown or str(default)}, **checks
    )


def _of_tables() -> type[BaseModel]:
    """What the tables of policies and orders say: a mode, an order, and the fields of all of them,
    which are settings.
    """
    *most, last = MODES
    found: dict[str, Any] = {
        "mode": (
            Literal[tuple(MODES)],
            Field(description=f"batching mode: {', '.join(most)} or {last}"),
        ),
        "order": (
            Literal[tuple(ORDERS)],
            _setting("fcfs", f"who goes first among those that wait: {', '.join(ORDERS)}"),
        ),
    }
    kinds: list[type[Policy] | type[Order]] = [*MODES.values(), *ORDERS.values()]
    for kind in kinds:
        types = get_type_hints(kind)
        for each in fields(kind):
            told = each.metadata
            modes = (
                f"{', '.join(ONLY_IN[each.name])}: "
                if len(ONLY_IN.get(each.name, MODES)) < len(MODES)
                else ""
            )
            setting = _setting(
                each.default, modes + told["meaning"], told["shown"], **told["limits"]
            )
            found[each.name] = (types[each.name], setting)
    return create_model("OfTables", **found)


class Config(_of_tables(), BaseModel):  # type: ignore[misc]  # the tables are known when it runs
    """Every setting of a server. Raises pydantic's ValidationError; `parse` turns that into a
    ConfigError.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    model: str = _setting(
        "",
        f"{', '.join(SHAPES)}, or the folder of a Hugging Face GPT-2",
        "auto: gpt2-medium on a GPU, demo on a CPU",
    )
    weights: Literal["pretrained", "random"] = _setting(
        "pretrained", "pretrained, or random: seeded, no download of weights, the same speed"
    )
    tokenizer: Literal["r50k_base", "bytes"] = _setting(
        "bytes",
        "r50k_base (GPT-2's BPE) or bytes",
        "auto: the one whose ids are the vocabulary, 50,257 or 257",
    )
    device: Literal["cpu", "cuda"] = _setting("cpu", "cpu or cuda", "auto: cuda if there is a GPU")
    dtype: Literal["float32", "bfloat16"] = _setting(
        "float32",
        "float32 or bfloat16",
        "auto: bfloat16 where the processor computes it natively, float32 for demo",
    )
    threads: int = _setting(1, "torch threads", "auto: physical cores, 1 for demo", ge=1)
    generator: Literal["cached", "naive"] = _setting(
        "cached", "cached, or naive: recompute everything, no KV cache"
    )
    attention: Literal["kernel", "triton", "plain"] = _setting(
        "plain",
        "attention: kernel (our C++, sampling too), triton (ours for GPUs) or plain (PyTorch's, a "
        "call a row)",
        "auto: kernel on a CPU with a C++ compiler, triton on a GPU",
    )
    linear: Literal["kernel", "onednn", "plain"] = _setting(
        "plain", "linear layers: kernel (our C++) or onednn, weights packed once, or plain "
                 "(PyTorch's)",
        "auto: kernel on a CPU, onednn where it computes bfloat16 natively",
    )  # fmt: skip
    max_batch_size: int = _setting(32, "rows in a batch at most", "32 on a CPU, 256 on a GPU", ge=1)
    decoder_batch_sizes: tuple[int, ...] = _setting(
        (), "decode iterations are filled up with padding rows to the smallest that holds them: "
            "32,8,4,1, or none",
        "none on a CPU; 256,128,64,32,16,8,4,2,1 on a GPU, where each has a CUDA graph",
    )  # fmt: skip
    enforce_eager: bool = _setting(
        False, "GPU: capture no CUDA graphs; slower, for comparison", "off"
    )
    max_waiting: int = _setting(
        1024, "requests that may wait beside max_batch_size running ones; beyond it 429", ge=0
    )
    max_model_len: int = _setting(1024, "prompt + completion tokens of a request at most", ge=2)
    block_size: int = _setting(
        16, "tokens in a KV block; max_model_len gives one slot per request", ge=1
    )
    kv_cache_gb: float | None = _setting(
        None, "memory for keys and values, in 10^9 bytes", "4 on a CPU; on a GPU what "
                                                           "gpu_memory_utilization leaves",
        gt=0, allow_inf_nan=False,
    )  # fmt: skip
    gpu_memory_utilization: float = _setting(
        0.9,
        "GPU: share of its memory that weights, CUDA graphs and the KV cache may fill together",
        gt=0,
        le=1,
    )
    token_budget: int = _setting(
        256, "prefill tokens in an iteration at most", "256 on a CPU, 2048 on a GPU", ge=1
    )
    loop_interval_ms: float = _setting(
        0.0,
        "sleep between iterations; 10 reproduces the original experiment's loop",
        ge=0,
        allow_inf_nan=False,
    )
    request_timeout_s: float | None = _setting(
        None,
        "answer 504 after this long; a request may set its own",
        "none",
        gt=0,
        allow_inf_nan=False,
    )
    header_timeout_s: float = _setting(
        10.0,
        "answer 408 if a request's headers are not whole after this long",
        gt=0,
        allow_inf_nan=False,
    )
    body_timeout_s: float = _setting(
        30.0, "the same for its body, once the headers are there", gt=0, allow_inf_nan=False
    )
    drain_timeout_s: float = _setting(
        3600.0,
        "SIGTERM finishes requests in flight, those that take longer than this get an error",
        ge=0,
        allow_inf_nan=False,
    )
    request_log: str | None = _setting(
        None, "append a JSON line for every request that ended to this file", "none", min_length=1
    )
    seed: int = _setting(0, "of random weights, and of requests that bring none", ge=0, lt=2**63)
    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 listens to other machines too")
    port: int = _setting(8500, "port to listen on", ge=1, le=65535)
    # in no dump, repr or message: the launcher hands it on by `handoff`
    api_key: SecretStr | None = _setting(
        None,
        "clients must send it: Authorization: Bearer KEY; EB_API_KEY hides it from ps",
        "none",
        exclude=True,
        repr=False,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "debug, info, warning or error"
    )

    @field_validator("decoder_batch_sizes", mode="before")
    @classmethod
    def _read_sizes(cls, value: Any) -> Any:
        """A flag's text, to numbers."""
        if not isinstance(value, str):
            return value
        try:
            return () if value == "none" else tuple(int(size) for size in value.split(","))
        except ValueError:
            raise ValueError(
                "must be numbers separated by commas, such as 32,8,4,1, or none"
            ) from None

    @field_validator("api_key", mode="before")
    @classmethod
    def _read_key(cls, value: Any) -> Any:
        return read_key(value) if isinstance(value, str) else value

    @field_validator("decoder_batch_sizes")
    @classmethod
    def _order_sizes(cls, sizes: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        """As in RBLN: sorted descending, and max_batch_size is one of them."""
        most = info.data.get("max_batch_size")
        if not sizes or most is None:  # max_batch_size is wrong itself, and says so
            return sizes
        if max(sizes) > most:
            raise ValueError(
                f"{max(sizes)} is beyond max_batch_size {most}; leave it out, or raise "
                f"--max-batch-size"
            )
        if min(sizes) < 1:
            raise ValueError(f"{min(sizes)} is no batch size; every one must be 1 or more")
        return tuple(sorted({*sizes, most}, reverse=True))

    @model_validator(mode="after")
    def _fits(self) -> Config:
        shape = self.shape
        if self.max_model_len > shape.n_ctx:
            raise ValueError(
                f"max_model_len {self.max_model_len} is beyond the {shape.n_ctx} positions of "
                f"{self.model}; lower it"
            )
        for name in ("attention", "linear"):
            if (value := getattr(self, name)) in ("kernel", "onednn") and self.device != "cpu":
                raise ValueError(
                    f"{name} {value} runs on a CPU alone; leave {flag(name)} out, or use --device "
                    f"cpu"
                )
        if self.decoder_batch_sizes and self.generator == "naive":
            raise ValueError(
                "decoder_batch_sizes are the cached engine's; leave --decoder-batch-sizes or "
                "--generator naive out"
            )
        if self.attention == "triton" and self.device == "cpu":
            raise ValueError("attention triton runs on a GPU alone; leave --attention out")
        if self.attention == "kernel" and shape.head_size > kernels.LARGEST_HEAD:
            raise ValueError(
                f"attention kernel takes heads of at most {kernels.LARGEST_HEAD}; use --attention "
                f"plain"
            )
        if self.attention == "triton" and shape.head_size > kernels.LARGEST_TRITON_HEAD:
            raise ValueError(
                f"attention triton takes heads of at most {kernels.LARGEST_TRITON_HEAD}; use "
                f"--attention plain"
            )
        vocabulary = VOCABULARIES[self.tokenizer]
        if vocabulary > shape.vocab_size:
            raise ValueError(
                f"tokenizer {self.tokenizer} has {vocabulary} ids and {self.model} only "
                f"{shape.vocab_size}; "
                "choose another --tokenizer"
            )
        if self.model == "fake":
            return self
        token = shape.kv_bytes_per_token(self.dtype)
        if self.kv_cache_gb is not None and self.n_blocks < self.blocks_per_request:
            need = self.blocks_per_request * self.block_size * token
            raise ValueError(
                f"kv_cache_gb {self.kv_cache_gb:g} holds {self.n_blocks} blocks of "
                f"{self.block_size} tokens × {token:,} bytes, "
                f"and one request of {self.max_model_len} tokens needs {self.blocks_per_request} "
                f"({need / 1e9:.3f} GB); "
                "raise --kv-cache-gb or lower --max-model-len"
            )
        if self.device == "cuda":  # what is free there is known once the weights are
            return self
        weights, kv, memory = (
            shape.weight_bytes(self.dtype),
            self.kv_bytes,
            psutil.virtual_memory().total,
        )
        if weights + kv > memory:
            raise ValueError(
                f"{self.model} needs {weights / 1e9:.2f} GB of weights + {kv / 1e9:.2f} GB of keys "
                f"and values "
                f"= {(weights + kv) / 1e9:.2f} GB, and this machine has {memory / 1e9:.2f} GB; "
                "lower --kv-cache-gb or choose a smaller --model"
            )
        return self

    @property
    def shape(self) -> Shape:
        return shape_of(self.model)

    @property
    def model_name(self) -> str:
        """What clients call the model. A folder goes by its own name: where it lies on this machine
        is nothing to them.
        """
        return Path(self.model).name

    @property
    def blocks_per_request(self) -> int:
        """KV blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)

    @property
    def n_blocks(self) -> int:
        """KV blocks in the pool: what kv_cache_gb holds, but never more than max_batch_size rows
        can use.

        Without kv_cache_gb, on a GPU, as many as they can use; the engine may find that its memory
        holds fewer.
        """
        usable = self.max_batch_size * self.blocks_per_request
        if self.model == "fake" or self.kv_cache_gb is None:
            return usable
        return min(usable, int(self.kv_cache_gb * 1e9 / self.block_bytes))

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.shape.kv_bytes_per_token(self.dtype)

    @property
    def kv_bytes(self) -> int:
        return self.n_blocks * self.block_bytes

    @property
    def captures(self) -> bool:
        """Whether there is anything to capture as CUDA graphs: PyTorch's attention, a call a row,
        has no shape of its own.
        """
        triton = self.attention == "triton" and self.generator == "cached"
        return triton and not self.enforce_eager and bool(self.decoder_batch_sizes)

    @property
    def max_in_flight(self) -> int:
        """Requests running and waiting at most; beyond it 429."""
        return self.max_batch_size + self.max_waiting

    @property
    def http_threads(self) -> int:
        """One for each request that may be in flight, and some for /health, /stats and refusals."""
        return self.max_in_flight + 16

    @property
    def http_connections(self) -> int:
        """Open at most, if the system allows as many files: kept-alive ones, and slow senders, need
        no thread.
        """
        return 2 * self.http_threads

    def connections_within(self, files: int) -> int:
        """How many of them, in a process that may open so many files."""
        return max(16, min(self.http_connections, files - SPARE_FILES))

    def handoff(self) -> str:
        """All of it as JSON, the key too, for the worker that gunicorn starts and nobody else."""
        return json.dumps(
            self.model_dump() | {"api_key": self.api_key and self.api_key.get_secret_value()}
        )

    def warnings(self) -> list[str]:
        """What the user should know but need not change."""
        found = []
        if self.api_key is None and not is_loopback(self.host):
            found.append(
                f"whoever reaches {self.host}:{self.port} may use this server; --api-key (or "
                f"EB_API_KEY) bars others"
            )
        if self.weights == "random" and self.model != "fake":
            found.append(
                "the weights are random, so the text is noise; speed does not depend on them"
            )
        cached_on_cpu = self.device == "cpu" and self.model != "fake" and self.generator == "cached"
        if cached_on_cpu and self.attention == "plain" and (reason := kernels.why_unavailable()):
            found.append(
                f"attention and sampling run on PyTorch's own operations, a call a row, which is "
                f"slower: {reason}"
            )
        cached_on_gpu = self.device == "cuda" and self.generator == "cached"
        if (
            cached_on_gpu
            and self.attention == "plain"
            and (reason := kernels.why_no_triton(self.shape.head_size))
        ):
            found.append(
                f"attention calls PyTorch once a row, and without CUDA graphs, which is slower: "
                f"{reason}"
            )
        if self.request_timeout_s is not None and self.request_timeout_s > self.drain_timeout_s:
            found.append(
                f"request_timeout_s {self.request_timeout_s:g} is beyond drain_timeout_s "
                f"{self.drain_timeout_s:g}, after which "
                "SIGTERM ends requests that have time left; raise --drain-timeout-s"
            )
        found += chosen(MODES, self.mode, self).warnings(self.max_batch_size)
        return found


def read_key(text: str) -> str | None:
    """An API key, or None for "none". Raises ValueError, which does not show it."""
    if not re.fullmatch("[!-~]+", text):
        raise ValueError("a key is letters, digits and signs of ASCII without spaces, or none")
    return None if text == "none" else text


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def meaningful(name: str, mode: str) -> bool:
    """Whether a setting has a meaning in a mode."""
    return mode in ONLY_IN.get(name, MODES)
