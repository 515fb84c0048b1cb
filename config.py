"""One validated Config, parsed once by the launcher: flags, then EB_* in the environment, then .env, then defaults.

`build` resolves `auto` and what was left out once, in the launcher (defaults.py); every field of a `Config` holds what will be
used, and other files compute from it instead of repeating a number. Flags are strict:
one that has no meaning in the chosen mode is refused. The environment and a .env file may be shared
between modes, so there only unknown names are.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import psutil
from dotenv import dotenv_values
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

import kernels
from defaults import VOCABULARIES, resolve
from shapes import SHAPES, Shape, shape_of

Mode = Literal["nobatch", "static", "windowed", "dynamic"]
MODES: tuple[str, ...] = get_args(Mode)
ONLY_IN = {
    "batch_size_target": ("windowed",),
    "batch_size_limit": ("windowed",),
    "max_batch_delay_ms": ("windowed",),
    "compact_batches": ("static", "windowed"),
}
ONLY_OVER_HTTP = (
    "request_timeout_s", "header_timeout_s", "body_timeout_s", "drain_timeout_s", "request_log", "host", "port", "api_key",
    "log_level",
)  # fmt: skip
ONLY_ON_GPU = ("gpu_memory_utilization", "enforce_eager")
DOTENV = Path(__file__).with_name(".env")
MAX_BODY_BYTES = 1_000_000  # of a request; a larger one is 413
SPARE_FILES = 128  # open files of a server beside its connections
END_S = 1.5  # how long Ctrl-C waits for clients; after a second signal gunicorn's master kills the worker within 2 s
HANDOFF = "EFFECTIVE_BATCHING_CONFIG"  # how the launcher gives the resolved Config to gunicorn's worker


class ConfigError(Exception):
    """A setting that cannot be used; the message is one sentence that names the fix."""


def _setting(default: Any, meaning: str, shown: str | None = None, **checks: Any) -> Any:
    return Field(default, description=meaning, json_schema_extra={"shown": shown or str(default)}, **checks)


class Config(BaseModel):
    """Every setting of a server. Raises pydantic's ValidationError; `parse` turns that into a ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    mode: Mode = Field(description="batching mode: nobatch, static, windowed or dynamic")
    model: str = _setting(
        "", f"{', '.join(SHAPES)}, or the folder of a Hugging Face GPT-2", "auto: gpt2-medium on a GPU, demo on a CPU"
    )
    weights: Literal["pretrained", "random"] = _setting(
        "pretrained", "pretrained, or random: seeded, no download of weights, the same speed"
    )
    tokenizer: Literal["r50k_base", "bytes"] = _setting(
        "bytes", "r50k_base (GPT-2's BPE) or bytes", "auto: the one whose ids are the vocabulary, 50,257 or 257"
    )
    device: Literal["cpu", "cuda"] = _setting("cpu", "cpu or cuda", "auto: cuda if there is a GPU")
    dtype: Literal["float32", "bfloat16"] = _setting(
        "float32", "float32 or bfloat16", "auto: bfloat16 where the processor computes it natively, float32 for demo"
    )
    threads: int = _setting(1, "torch threads", "auto: physical cores, 1 for demo", ge=1)
    generator: Literal["cached", "naive"] = _setting("cached", "cached, or naive: recompute everything, no KV cache")
    attention: Literal["kernel", "triton", "plain"] = _setting(
        "plain",
        "attention: kernel (our C++, sampling too), triton (ours for GPUs) or plain (PyTorch's, a call a row)",
        "auto: kernel on a CPU with a C++ compiler, triton on a GPU",
    )
    linear: Literal["kernel", "onednn", "plain"] = _setting(
        "plain", "linear layers: kernel (our C++) or onednn, weights packed once, or plain (PyTorch's)",
        "auto: kernel on a CPU, onednn where it computes bfloat16 natively",
    )  # fmt: skip
    max_batch_size: int = _setting(32, "rows in a batch at most", "32 on a CPU, 256 on a GPU", ge=1)
    decoder_batch_sizes: tuple[int, ...] = _setting(
        (), "decode iterations are filled up with padding rows to the smallest that holds them: 32,8,4,1, or none",
        "none on a CPU; 256,128,64,32,16,8,4,2,1 on a GPU, where each has a CUDA graph",
    )  # fmt: skip
    enforce_eager: bool = _setting(False, "GPU: capture no CUDA graphs; slower, for comparison", "off")
    max_waiting: int = _setting(1024, "requests that may wait beside max_batch_size running ones; beyond it 429", ge=0)
    max_model_len: int = _setting(1024, "prompt + completion tokens of a request at most", ge=2)
    block_size: int = _setting(16, "tokens in a KV block; max_model_len gives one slot per request", ge=1)
    kv_cache_gb: float | None = _setting(
        None, "memory for keys and values, in 10^9 bytes", "4 on a CPU; on a GPU what gpu_memory_utilization leaves",
        gt=0, allow_inf_nan=False,
    )  # fmt: skip
    gpu_memory_utilization: float = _setting(
        0.9, "GPU: share of its memory that weights, CUDA graphs and the KV cache may fill together", gt=0, le=1
    )
    token_budget: int = _setting(256, "prefill tokens in an iteration at most", "256 on a CPU, 2048 on a GPU", ge=1)
    max_batch_delay_ms: float = _setting(
        10.0, "windowed: a batch forms when the oldest request has waited this long", gt=0, allow_inf_nan=False
    )
    batch_size_target: int = _setting(4, "windowed: a batch forms when this many rows wait", ge=1)
    batch_size_limit: int | None = _setting(None, "windowed: rows in a batch at most", "none", ge=1)
    compact_batches: bool = _setting(False, "static, windowed: drop rows that are done instead of computing them idly", "off")
    loop_interval_ms: float = _setting(
        0.0, "sleep between iterations; 10 reproduces the original experiment's loop", ge=0, allow_inf_nan=False
    )
    request_timeout_s: float | None = _setting(
        None, "answer 504 after this long; a request may set its own", "none", gt=0, allow_inf_nan=False
    )
    header_timeout_s: float = _setting(
        10.0, "answer 408 if a request's headers are not whole after this long", gt=0, allow_inf_nan=False
    )
    body_timeout_s: float = _setting(30.0, "the same for its body, once the headers are there", gt=0, allow_inf_nan=False)
    drain_timeout_s: float = _setting(
        3600.0, "SIGTERM finishes requests in flight, those that take longer than this get an error", ge=0, allow_inf_nan=False
    )
    request_log: str | None = _setting(
        None, "append a JSON line for every request that ended to this file", "none", min_length=1
    )
    seed: int = _setting(0, "of random weights, and of requests that bring none", ge=0, lt=2**63)
    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 listens to other machines too")
    port: int = _setting(8500, "port to listen on", ge=1, le=65535)
    # in no dump, repr or message: the launcher hands it on by `handoff`
    api_key: SecretStr | None = _setting(
        None, "clients must send it: Authorization: Bearer KEY; EB_API_KEY hides it from ps", "none", exclude=True, repr=False
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "debug, info, warning or error")

    @field_validator("decoder_batch_sizes", mode="before")
    @classmethod
    def _read_sizes(cls, value: Any) -> Any:
        """A flag's text, to numbers."""
        if not isinstance(value, str):
            return value
        try:
            return () if value == "none" else tuple(int(size) for size in value.split(","))
        except ValueError:
            raise ValueError("must be numbers separated by commas, such as 32,8,4,1, or none") from None

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
            raise ValueError(f"{max(sizes)} is beyond max_batch_size {most}; leave it out, or raise --max-batch-size")
        if min(sizes) < 1:
            raise ValueError(f"{min(sizes)} is no batch size; every one must be 1 or more")
        return tuple(sorted({*sizes, most}, reverse=True))

    @model_validator(mode="after")
    def _fits(self) -> Config:
        shape = self.shape
        if self.max_model_len > shape.n_ctx:
            raise ValueError(
                f"max_model_len {self.max_model_len} is beyond the {shape.n_ctx} positions of {self.model}; lower it"
            )
        for name in ("attention", "linear"):
            if (value := getattr(self, name)) in ("kernel", "onednn") and self.device != "cpu":
                raise ValueError(f"{name} {value} runs on a CPU alone; leave {flag(name)} out, or use --device cpu")
        if self.decoder_batch_sizes and self.generator == "naive":
            raise ValueError(
                "decoder_batch_sizes are the cached engine's; leave --decoder-batch-sizes or --generator naive out"
            )
        if self.attention == "triton" and self.device == "cpu":
            raise ValueError("attention triton runs on a GPU alone; leave --attention out")
        if self.attention == "kernel" and shape.head_size > kernels.LARGEST_HEAD:
            raise ValueError(f"attention kernel takes heads of at most {kernels.LARGEST_HEAD}; use --attention plain")
        if self.attention == "triton" and shape.head_size > kernels.LARGEST_TRITON_HEAD:
            raise ValueError(f"attention triton takes heads of at most {kernels.LARGEST_TRITON_HEAD}; use --attention plain")
        vocabulary = VOCABULARIES[self.tokenizer]
        if vocabulary > shape.vocab_size:
            raise ValueError(
                f"tokenizer {self.tokenizer} has {vocabulary} ids and {self.model} only {shape.vocab_size}; "
                "choose another --tokenizer"
            )
        if self.model == "fake":
            return self
        token = shape.kv_bytes_per_token(self.dtype)
        if self.kv_cache_gb is not None and self.n_blocks < self.blocks_per_request:
            need = self.blocks_per_request * self.block_size * token
            raise ValueError(
                f"kv_cache_gb {self.kv_cache_gb:g} holds {self.n_blocks} blocks of {self.block_size} tokens × {token:,} bytes, "
                f"and one request of {self.max_model_len} tokens needs {self.blocks_per_request} ({need / 1e9:.3f} GB); "
                "raise --kv-cache-gb or lower --max-model-len"
            )
        if self.device == "cuda":  # what is free there is known once the weights are
            return self
        weights, kv, memory = shape.weight_bytes(self.dtype), self.kv_bytes, psutil.virtual_memory().total
        if weights + kv > memory:
            raise ValueError(
                f"{self.model} needs {weights / 1e9:.2f} GB of weights + {kv / 1e9:.2f} GB of keys and values "
                f"= {(weights + kv) / 1e9:.2f} GB, and this machine has {memory / 1e9:.2f} GB; "
                "lower --kv-cache-gb or choose a smaller --model"
            )
        return self

    @property
    def shape(self) -> Shape:
        return shape_of(self.model)

    @property
    def model_name(self) -> str:
        """What clients call the model. A folder goes by its own name: where it lies on this machine is nothing to them."""
        return Path(self.model).name

    @property
    def blocks_per_request(self) -> int:
        """KV blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)

    @property
    def n_blocks(self) -> int:
        """KV blocks in the pool: what kv_cache_gb holds, but never more than max_batch_size rows can use.

        Without kv_cache_gb, on a GPU, as many as they can use; the engine may find that its memory holds fewer.
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
        """Whether there is anything to capture as CUDA graphs: PyTorch's attention, a call a row, has no shape of its own."""
        triton = self.attention == "triton" and self.generator == "cached"
        return triton and not self.enforce_eager and bool(self.decoder_batch_sizes)

    @property
    def effective_target(self) -> int:
        """Rows that flush a window: a batch can never be larger than its limits, so neither can the target."""
        return min(self.batch_size_target, self.batch_size_limit or self.batch_size_target, self.max_batch_size)

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
        """Open at most, if the system allows as many files: kept-alive ones, and slow senders, need no thread."""
        return 2 * self.http_threads

    def connections_within(self, files: int) -> int:
        """How many of them, in a process that may open so many files."""
        return max(16, min(self.http_connections, files - SPARE_FILES))

    def handoff(self) -> str:
        """All of it as JSON, the key too, for the worker that gunicorn starts and nobody else."""
        return json.dumps(self.model_dump() | {"api_key": self.api_key and self.api_key.get_secret_value()})

    def warnings(self) -> list[str]:
        """What the user should know but need not change."""
        found = []
        if self.api_key is None and not is_loopback(self.host):
            found.append(f"whoever reaches {self.host}:{self.port} may use this server; --api-key (or EB_API_KEY) bars others")
        if self.weights == "random" and self.model != "fake":
            found.append("the weights are random, so the text is noise; speed does not depend on them")
        cached_on_cpu = self.device == "cpu" and self.model != "fake" and self.generator == "cached"
        if cached_on_cpu and self.attention == "plain" and (reason := kernels.why_unavailable()):
            found.append(f"attention and sampling run on PyTorch's own operations, a call a row, which is slower: {reason}")
        cached_on_gpu = self.device == "cuda" and self.generator == "cached"
        if cached_on_gpu and self.attention == "plain" and (reason := kernels.why_no_triton(self.shape.head_size)):
            found.append(f"attention calls PyTorch once a row, and without CUDA graphs, which is slower: {reason}")
        if self.request_timeout_s is not None and self.request_timeout_s > self.drain_timeout_s:
            found.append(
                f"request_timeout_s {self.request_timeout_s:g} is beyond drain_timeout_s {self.drain_timeout_s:g}, after which "
                "SIGTERM ends requests that have time left; raise --drain-timeout-s"
            )
        if self.mode == "windowed" and self.effective_target != self.batch_size_target:
            found.append(
                f"batch_size_target {self.batch_size_target} can never be reached with batch_size_limit "
                f"{self.batch_size_limit or 'none'} and max_batch_size {self.max_batch_size}: "
                f"batches form at {self.effective_target}"
            )
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


# ---- parsing


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_settings(parser: argparse.ArgumentParser, unused: Collection[str] = ()) -> None:
    """Add a flag for every setting but the mode and those `unused`. Values stay strings: Config checks them."""
    group = parser.add_argument_group("settings (flag, or EB_NAME in the environment or in .env)")
    for name, field in Config.model_fields.items():
        if name == "mode" or name in unused:
            continue
        assert isinstance(field.json_schema_extra, dict)
        text = f"{field.description} (default: {field.json_schema_extra['shown']})"
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if field.annotation is bool else {"metavar": "X"}
        group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **kind)


def from_environment(environ: Mapping[str, str], dotenv: Path | None = DOTENV) -> dict[str, str]:
    """Return the settings of .env, overridden by EB_* variables. Raises ConfigError for an unknown EB_* name."""
    values: dict[str, str] = {}
    try:
        in_file = dotenv_values(dotenv) if dotenv and dotenv.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{dotenv} cannot be read ({error}); it must be a text file of NAME=value lines") from None
    for source in (in_file, environ):
        for key, value in source.items():
            if not key.startswith("EB_") or value is None:
                continue
            name = key[3:].lower()
            if name not in Config.model_fields or key != key.upper():
                known = [f"EB_{field.upper()}" for field in Config.model_fields]
                raise ConfigError(f"unknown variable {key}{_suggest(key, known)}; valid ones are {', '.join(known)}")
            values[name] = value
    return values


def build(mode: str | None, flags: Mapping[str, Any], values: Mapping[str, str]) -> Config:
    """Return the Config of a mode from flags over environment values. Raises ConfigError."""
    mode = mode or values.get("mode")
    if mode not in MODES:
        what = f"unknown mode {mode!r}{_suggest(mode, MODES)}" if mode else "no mode given"
        raise ConfigError(f"{what}; valid modes are {', '.join(MODES)}")
    for name in flags:
        if not meaningful(name, mode):
            raise ConfigError(f"{flag(name)} has no meaning in mode {mode}; it belongs to {' and '.join(ONLY_IN[name])}")
    if flags.get("api_key", values.get("api_key")) == "":  # left out it would be open to everyone
        raise ConfigError("--api-key is empty; give a key, or none")
    try:
        config = Config(**resolve({**values, **flags, "mode": mode}))
        if config.device == "cpu" and (unused := [name for name in flags if name in ONLY_ON_GPU]):
            raise ConfigError(f"{flag(unused[0])} has no meaning on a CPU; leave it out")
        if flags.get("enforce_eager") and (config.attention != "triton" or config.generator != "cached"):
            raise ConfigError("--enforce-eager has no meaning without attention triton, which alone is captured; leave it out")
        if {"kv_cache_gb", "gpu_memory_utilization"} <= flags.keys():
            raise ConfigError("--kv-cache-gb and --gpu-memory-utilization both size the KV cache; leave one of them out")
        return config
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            name = str(first["loc"][0])
            given = "" if name == "api_key" else f" {first['input']!r}"
            message = f"{flag(name)}{given}: {message[0].lower()}{message[1:]}"
        raise ConfigError(message) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ, dotenv: Path | None = DOTENV) -> Config:
    """Parse a server's command line. Raises ConfigError; exits 0 after --help."""
    parser = Parser(
        prog="./server.sh", description="Serve GPT-2 in one batching mode.", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )  # fmt: skip
    parser.add_argument("mode", nargs="?", metavar="MODE", help=Config.model_fields["mode"].description)
    add_settings(parser)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    flags = vars(known)
    return build(flags.pop("mode"), flags, from_environment(environ, dotenv))


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Raise ConfigError, naming the valid flags, if argparse left anything over."""
    if unknown:
        valid = [option for option in parser._option_string_actions if option.startswith("--")]
        name = unknown[0].split("=")[0]
        kind = "flag" if name.startswith("-") else "argument"
        raise ConfigError(f"unknown {kind} {name}{_suggest(name, valid)}; valid flags are {', '.join(valid)}")


def _suggest(word: str | None, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(word or "", valid, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
