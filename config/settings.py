"""Every setting of a server, validated. A field holds what will be used, and other files compute
from it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)  # fmt: skip

from config import checks
from config.keys import digest, read_key, read_keys
from config.tables import of_tables, setting
from scheduling.door import read_queue_policies, read_user_weights
from scheduling.lengths import predictor
from scheduling.policies import ORDERS
from shapes import SHAPES, Shape, shape_of

ONLY_OVER_HTTP = (
    "request_timeout_s",
    "header_timeout_s",
    "body_timeout_s",
    "drain_timeout_s",
    "request_log",
    "record",
    "live",
    "live_prompts",
    "sampling_seed",
    "host",
    "port",
    "api_key",
    "api_keys",
    "allowed_hosts",
    "log_level",
)
POOL_SIZES = ("kv_blocks", "kv_cache_gb", "gpu_memory_utilization")  # one of them alone
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
READERS: dict[str, Callable[[str], object]] = {  # of settings that are a text of several values
    "length_predictor": predictor,
    "queue_policy": read_queue_policies,
    "user_weights": read_user_weights,
}


class ConfigError(Exception):
    """A setting that cannot be used; the message is one sentence that names the fix."""


class Config(of_tables(), BaseModel):  # type: ignore[misc]  # the tables are known when it runs
    """Every setting of a server. Raises pydantic's ValidationError; `parse` turns that into a
    ConfigError.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    model: str = setting(
        "",
        f"{', '.join(SHAPES)}, or the folder of a Hugging Face GPT-2",
        "auto: gpt2-medium on a GPU, demo on a CPU",
    )
    weights: Literal["pretrained", "random"] = setting(
        "pretrained", "pretrained, or random: seeded, no download of weights, the same speed"
    )
    tokenizer: Literal["r50k_base", "bytes"] = setting(
        "bytes",
        "r50k_base (GPT-2's BPE) or bytes",
        "auto: the one whose ids are the vocabulary, 50,257 or 257",
    )
    device: Literal["cpu", "cuda"] = setting("cpu", "cpu or cuda", "auto: cuda if there is a GPU")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "float32 or bfloat16",
        "auto: bfloat16 where the processor computes it natively, float32 for demo",
    )
    threads: int = setting(1, "torch threads", "auto: physical cores, 1 for demo", ge=1)
    generator: Literal["cached", "naive"] = setting(
        "cached", "cached, or naive: recompute everything, no KV cache"
    )
    attention: Literal["kernel", "triton", "plain"] = setting(
        "plain",
        "attention: kernel (our C++), triton (ours for GPUs) or plain (PyTorch's, a call a row)",
        "auto: kernel on a CPU with a C++ compiler, triton on a GPU",
    )
    linear: Literal["kernel", "int8", "onednn", "plain"] = setting(
        "plain", "linear layers: kernel (our C++), int8 (the same, weights and tokens rounded to "
                 "8 bits) or onednn, weights packed once, or plain (PyTorch's)",
        "auto: kernel on a CPU with a C++ compiler; onednn for bfloat16 with AMX or on Arm",
    )  # fmt: skip
    sampler: Literal["kernel", "plain"] = setting(
        "plain",
        "sampling: kernel (our C++) or plain (PyTorch's)",
        "auto: kernel on a CPU with a C++ compiler",
    )
    norms: Literal["kernel", "triton", "plain"] = setting(
        "plain",
        "additions and norms: kernel (our C++), triton (ours for GPUs) or plain (PyTorch's)",
        "auto: kernel on a CPU with a C++ compiler, triton on a GPU",
    )
    fake_slowdown: float = setting(
        1.0,
        "with --model fake: its iterations take so many times as long",
        gt=0,
        allow_inf_nan=False,
    )
    max_batch_size: int = setting(32, "rows in a batch at most", "32 on a CPU, 256 on a GPU", ge=1)
    decoder_batch_sizes: tuple[int, ...] = setting(
        (), "decode iterations are filled up with padding rows to the smallest that holds them: "
            "32,8,4,1, or none",
        "none on a CPU; 256,128,64,32,16,8,4,2,1 on a GPU, where each has a CUDA graph",
    )  # fmt: skip
    enforce_eager: bool = setting(
        False, "GPU: capture no CUDA graphs; slower, for comparison", "off"
    )
    max_waiting: int = setting(
        1024, "requests that may wait beside max_batch_size running ones; beyond it 429", ge=0
    )
    max_model_len: int = setting(1024, "prompt + completion tokens of a request at most", ge=2)
    block_size: int = setting(
        16, "tokens in a KV block; max_model_len gives one slot per request", ge=1
    )
    kv_cache_gb: float | None = setting(
        None, "memory for keys and values, in 10^9 bytes", "4 on a CPU; on a GPU what "
                                                           "gpu_memory_utilization leaves",
        gt=0, allow_inf_nan=False,
    )  # fmt: skip
    kv_dtype: Literal["auto", "int8"] = setting(
        "auto",
        "CPU: keys and values are kept as --dtype says (auto), or as int8 with a scale for each "
        "token and head: half of bfloat16's memory",
    )
    kv_blocks: int | None = setting(
        None, "KV blocks in the pool, instead of what kv_cache_gb holds", "none", ge=1
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "GPU: share of its memory that weights, CUDA graphs and the KV cache may fill together",
        gt=0,
        le=1,
    )
    prefix_caching: bool = setting(
        False,
        "keep the KV blocks of what was computed, and share them among requests that begin alike",
        "off",
    )
    length_predictor: str = setting(
        "exact",
        "completion tokens that orders and bins by length go by: exact (the stated ones), "
        "noisy:SIGMA (times a log-normal error), constant, or prompt (fitted on prompt lengths)",
    )
    user_requests_per_minute: int | None = setting(
        None, "requests that each user may send in a minute; beyond it 429", "none", ge=1
    )
    user_tokens_per_minute: int | None = setting(
        None, "the same of tokens, prompt and completion as stated", "none", ge=1
    )
    preserve_ordering: bool = setting(
        False, "plain answers leave in the order in which their requests came", "off"
    )
    token_budget: int = setting(
        256, "prefill tokens in an iteration at most", "256 on a CPU, 2048 on a GPU", ge=1
    )
    loop_interval_ms: float = setting(
        0.0,
        "sleep between iterations; 10 reproduces the original experiment's loop",
        ge=0,
        allow_inf_nan=False,
    )
    request_timeout_s: float | None = setting(
        None,
        "answer 504 after this long; a request may set its own",
        "none",
        gt=0,
        allow_inf_nan=False,
    )
    header_timeout_s: float = setting(
        10.0,
        "answer 408 if a request's headers are not whole after this long",
        gt=0,
        allow_inf_nan=False,
    )
    body_timeout_s: float = setting(
        30.0, "the same for its body, once the headers are there", gt=0, allow_inf_nan=False
    )
    drain_timeout_s: float = setting(
        3600.0,
        "SIGTERM finishes requests in flight, those that take longer than this get an error",
        ge=0,
        allow_inf_nan=False,
    )
    request_log: str | None = setting(
        None, "append a JSON line for every request that ended to this file", "none", min_length=1
    )
    record: str | None = setting(
        None,
        "append every call that changes the scheduler to this file, for ./simulate.sh --replay",
        "none",
        min_length=1,
    )
    live: Literal["on", "off"] = setting(
        "on", "GET /live shows the rows of the batch while somebody looks: on or off"
    )
    live_prompts: bool = setting(
        False, "show there the beginning of each prompt, which is data of whoever sent it", "off"
    )
    weights_seed: int = setting(0, "of random weights", ge=0, lt=2**63)
    sampling_seed: int = setting(
        0, "of the first request that brings no seed; the next gets one more", ge=0, lt=2**63
    )
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 listens to other machines too")
    port: int = setting(8500, "port to listen on", ge=1, le=65535)
    # in no dump, repr or message: the launcher hands it on by `handoff`
    api_key: SecretStr | None = setting(
        None,
        "clients must send it: Authorization: Bearer KEY; EB_API_KEY hides it from ps",
        "none",
        exclude=True,
        repr=False,
    )
    api_keys: dict[str, str] | None = setting(  # the user of each, by its digest
        None,
        "the same with a key for each user: a file of lines NAME KEY; limits, fairness and logs go "
        "by that name",
        "none",
        exclude=True,
        repr=False,
    )
    allowed_hosts: str = setting(
        "",
        "without a key: names beside localhost by which clients may reach this server, separated "
        "by commas; *: any",
        "addresses and localhost",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "debug, info, warning or error"
    )

    @field_validator("decoder_batch_sizes", "preferred_batch_sizes", mode="before")
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

    @field_validator("api_keys", mode="before")
    @classmethod
    def _read_keys(cls, value: Any) -> Any:
        return read_keys(value) if isinstance(value, str) else value

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

    @field_validator(*READERS)
    @classmethod
    def _reads(cls, text: str, info: ValidationInfo) -> str:
        """What reads it says what is wrong with it."""
        READERS[str(info.field_name)](text)
        return text

    @model_validator(mode="after")
    def _fits(self) -> Config:
        checks.refuse_what_does_not_fit(self)
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
        """KV blocks in the pool: kv_blocks, or what kv_cache_gb holds, but never more than
        max_batch_size rows can use, unless prefix_caching or paused rows use more.

        Without kv_cache_gb, on a GPU, as many as they can use; the engine may find that its memory
        holds fewer.
        """
        if self.kv_blocks is not None:
            return self.kv_blocks
        usable = self.max_batch_size * self.blocks_per_request
        if self.model == "fake" or self.kv_cache_gb is None:
            return usable
        held = int(self.kv_cache_gb * 1e9 / self.block_bytes)
        more = self.prefix_caching or ORDERS[self.order].preemptive
        return held if more else min(usable, held)

    @property
    def pool_is_known(self) -> bool:
        """Whether n_blocks is what there will be; else a GPU's memory says how many it holds."""
        return self.kv_blocks is not None or self.kv_cache_gb is not None

    @property
    def multiplied_as(self) -> str:
        """The type of the linear layers' weights."""
        return "int8" if self.linear == "int8" else self.dtype

    @property
    def kept_as(self) -> str:
        """The type of keys and values in the cache."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.shape.kv_bytes_per_token(self.kept_as)

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
        no thread. However few may wait, all who come at once are to be told that they may not.
        """
        return 2 * max(self.http_threads, 1024)

    def connections_within(self, files: int) -> int:
        """How many of them, in a process that may open so many files."""
        return max(16, min(self.http_connections, files - SPARE_FILES))

    def warnings(self) -> list[str]:
        """What the user should know but need not change."""
        return checks.warnings(self)

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names that a request's Host may have, beside addresses; None: any, since whoever asks has
        a key, or since the user says so.
        """
        named = {name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()}
        if self.users_of_keys or "*" in named:
            return None
        return frozenset(named | {"localhost", self.host.lower(), socket.gethostname().lower()})

    @property
    def users_of_keys(self) -> dict[str, str | None]:
        """The user whom each key names, by the key's digest; api_key names none. Empty: whoever
        asks needs no key.
        """
        if self.api_key is not None:
            return {digest(self.api_key.get_secret_value()): None}
        return {**(self.api_keys or {})}

    def handoff(self) -> str:
        """All of it as JSON, keys too, for the worker that gunicorn starts and nobody else."""
        key = self.api_key and self.api_key.get_secret_value()
        return json.dumps(self.model_dump() | {"api_key": key, "api_keys": self.api_keys})
