"""Config: all settings of a server, which fit together and to this machine, and what follows."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
from pydantic import model_validator

from config import features
from config.adapters import Source, read_lora, read_lora_random, unfit_adapters
from config.keys import digest
from config.pool import PoolSize, read_size
from config.resolve import VOCABULARIES, onednn_multiplies_bfloat16
from config.settings import SPARE_FILES, Settings
from config.shapes import Shape, shape_of
from config.tables import flag
from generate import kernels
from scheduling.policies import MODES, ORDERS, chosen
from scheduling.speculation import read_draft, read_rates


class Config(Settings):
    """Every setting of a server, and what other files compute from it. Raises pydantic's
    ValidationError; `build` turns that into a ConfigError.
    """

    @model_validator(mode="after")
    def _check(self) -> Config:
        for contradiction in _contradictions(self):
            raise ValueError(contradiction)
        return self

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
    def block_bytes(self) -> int:
        return self.block_size * self.shape.kv_bytes_per_token(self.kept_as)

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
        return triton and not self.enforce_eager and bool(self.decoder_batch_sizes)

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

    def warnings(self) -> list[str]:
        """Return what the user should know but need not change."""
        return list(_warnings(self))


def _contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence for each contradiction among settings, or with the machine."""
    shape = config.shape
    if config.max_model_len > shape.n_ctx:
        yield (
            f"max_model_len {config.max_model_len} is beyond the {shape.n_ctx} positions of "
            f"{config.model}; lower it"
        )
    yield from _unfit_parts(config)
    yield from features.contradictions(config)
    yield from _unfit_drafts(config)
    yield from unfit_adapters(config)
    vocabulary = VOCABULARIES[config.tokenizer]
    if vocabulary > shape.vocab_size:
        yield (
            f"tokenizer {config.tokenizer} has {vocabulary} ids and {config.model} only "
            f"{shape.vocab_size}; choose another --tokenizer"
        )
    if config.budget_counts == "all" and config.token_budget < config.max_batch_size:
        yield (
            f"token_budget {config.token_budget} counts decoded tokens too, and a batch may have "
            f"{config.max_batch_size} of them; raise --token-budget, lower --max-batch-size, or "
            "leave --budget-counts out"
        )
    if config.record is not None and config.record == config.request_log:
        yield f"record and request_log are both {config.record}; choose another --record"
    if config.api_key is not None and config.api_keys is not None:
        yield (
            "--api-key and --api-keys both set who may send requests; leave one of them out (where "
            ".env sets it, --api-key none does)"
        )
    if config.live_prompts and config.live == "off":
        yield "--live-prompts shows prompts on a page, and --live off has none; leave one out"
    yield from _too_large(config)


def _unfit_drafts(config: Config) -> Iterator[str]:
    """Yield a sentence for each contradiction of speculative decoding."""
    if not config.speculate:
        if config.draft != "ngram":
            yield "--draft proposes tokens for --speculate; state --speculate 4, or leave it out"
        return
    if config.speculate >= min(config.max_model_len, config.token_budget):
        yield (
            f"{config.speculate} draft tokens do not fit into max_model_len {config.max_model_len} "
            f"and token_budget {config.token_budget}, which counts them; lower --speculate"
        )
    if (draft := config.draft_model) is None:
        return
    if "fake" in (config.model, draft.model):
        yield f"--draft {config.draft} guesses for a model, and fake is none; use --draft ngram"
        return
    if draft.shape.vocab_size != config.shape.vocab_size:
        yield (
            f"{draft.model} has a vocabulary of {draft.shape.vocab_size:,} ids and {config.model} "
            f"one of {config.shape.vocab_size:,}; choose a --draft model with the same"
        )
    if draft.shape.n_ctx < config.max_model_len:
        yield (
            f"max_model_len {config.max_model_len} is beyond the {draft.shape.n_ctx} positions of "
            f"{draft.model}; lower it, or choose another --draft"
        )
    yield from _unfit_parts(draft)


def _unfit_parts(config: Config) -> Iterator[str]:
    """Yield a sentence for each part of the engine that this device or model excludes."""
    for name in ("attention", "linear", "sampler", "norms", "kv_dtype"):
        value = getattr(config, name)
        if value in ("kernel", "int8", "onednn") and config.device != "cpu":
            yield (
                f"{name} {value} runs on a CPU alone; leave {flag(name)} out, or use --device cpu"
            )
        if value == "triton" and config.device == "cpu":
            yield f"{name} triton runs on a GPU alone; leave {flag(name)} out"
    if (config.linear, config.dtype) == ("onednn", "bfloat16") and not onednn_multiplies_bfloat16():
        yield (
            "linear onednn has no bfloat16 for this processor, which has neither AVX-512 nor "
            "bfloat16 of its own; leave --linear out, or use --dtype float32"
        )
    ours = config.attention == config.linear == "triton"
    if config.batch_invariant and config.device != "cpu" and not ours:
        fix = "leave --attention, --linear, --kernels, --generator and adapters out"
        yield (
            "--batch-invariant needs attention and linear triton, which add in one order: "
            f"{kernels.why_no_triton(config.shape.head_size) or fix}"
        )
    largest = {"kernel": kernels.LARGEST_HEAD, "triton": kernels.LARGEST_TRITON_HEAD}
    if config.shape.head_size > (most := largest.get(config.attention, config.shape.head_size)):
        yield f"attention {config.attention} takes heads of at most {most}; use --attention plain"


def _too_large(config: Config) -> Iterator[str]:
    """Yield a sentence for each size that the pool of KV blocks, or the machine, cannot hold."""
    pool, shape, needed = config.pool, config.shape, config.blocks_per_request
    if pool.unit == "blocks" and pool.amount < needed:
        yield (
            f"kv_cache {pool} of {config.block_size} tokens hold "
            f"{config.n_blocks * config.block_size} tokens, and one request of "
            f"{config.max_model_len} needs {needed}; raise --kv-cache or lower --max-model-len"
        )
    if config.model == "fake":
        return
    token = shape.kv_bytes_per_token(config.kept_as)
    if pool.unit == "GB" and config.n_blocks < needed:
        yield (
            f"kv_cache {pool} holds {config.n_blocks} blocks of {config.block_size} tokens × "
            f"{token:,} bytes, and one request of {config.max_model_len} tokens needs {needed} "
            f"({needed * config.block_size * token / 1e9:.3f} GB); raise --kv-cache or lower "
            "--max-model-len"
        )
    models = [each for each in (config, config.draft_model) if each is not None]
    weights = sum(each.shape.weight_bytes(each.dtype, each.multiplied_as) for each in models)
    kv = sum(each.n_blocks * each.block_bytes for each in models)
    memory = psutil.virtual_memory().total
    # a GPU's free memory is known once the weights are there
    if config.device == "cpu" and weights + kv > memory:
        names = " and ".join(each.model for each in models)
        yield (
            f"{names} need {weights / 1e9:.2f} GB of weights + {kv / 1e9:.2f} GB of keys and "
            f"values = {(weights + kv) / 1e9:.2f} GB, and this machine has {memory / 1e9:.2f} GB; "
            "lower --kv-cache or choose a smaller --model"
        )


def _warnings(config: Config) -> Iterator[str]:
    if not config.users_of_keys and not is_loopback(config.host):
        yield (
            f"any client that reaches {config.address} may use this server; --api-key "
            f"(or EB_API_KEY) makes it ask for a key"
        )
    if config.shed and not config.slo_classes:
        yield (
            "--shed goes by limits, and here only requests state them (slo_ttft_ms); --slo-classes "
            "defines classes of requests that have limits"
        )
    if config.weights == "random" and config.model != "fake":
        yield "the weights are random, so the text is noise; speed does not depend on them"
    cached = config.generator == "cached" and config.model != "fake"
    if cached and config.attention == "plain" and config.kernels == "auto":
        if config.device == "cpu":
            reason = kernels.why_unavailable()
            slower = "attention and sampling run on PyTorch's own operations, a call a row"
        else:
            reason = kernels.why_no_triton(config.shape.head_size)
            slower = "attention calls PyTorch once a row, and without CUDA graphs"
        if reason:
            yield f"{slower}, which is slower: {reason}"
    if config.request_timeout_s is not None and config.request_timeout_s > config.drain_timeout_s:
        yield (
            f"request_timeout_s {config.request_timeout_s:g} is beyond drain_timeout_s "
            f"{config.drain_timeout_s:g}, after which SIGTERM ends requests that have time left; "
            "raise --drain-timeout-s"
        )
    yield from chosen(MODES, config.mode, config).warnings(config.max_batch_size)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
