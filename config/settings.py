"""Every setting of a server with its meaning and its limits. A policy's fields are settings of the
modes and orders that have it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    create_model,
    field_validator,
)

from config.reading import read_key, read_keys, read_lora, read_lora_random, read_size, read_sizes
from config.shapes import SHAPES
from scheduling import user_policies
from scheduling.policies import MODES, ORDERS, VICTIMS, Order, Policy, Victim
from scheduling.policies.deadlines import EXAMPLE, read_slo_classes
from scheduling.policies.fair import read_user_weights
from scheduling.policies.lengths import predictor
from scheduling.policies.prefill import read_prefill
from scheduling.policies.priority import read_queue_policies
from scheduling.speculation import read_draft

ONLY_OVER_HTTP = (
    *("request_timeout_s", "header_timeout_s", "body_timeout_s", "drain_timeout_s", "request_log"),
    *("record", "live", "host", "port", "http_processes", "api_key", "api_keys", "allowed_hosts"),
)
NOT_SIMULATED = {*ONLY_OVER_HTTP} - {"request_timeout_s"}  # in virtual time
VOCABULARIES = {"r50k_base": 50257, "bytes": 257}  # ids of each tokenizer
PARTS = ("attention", "linear")  # engine parts; their flags override --kernels


class ConfigError(Exception):
    """A setting that cannot be used; the message is one sentence that names the fix."""


# ---- settings of the tables of modes and orders

# before the tables are read: fields of users' policies are settings, too
user_policies.load(user_policies.words(sys.argv[1:], os.environ), os.environ)
KINDS: list[type[Policy | Order | Victim]] = [*MODES.values(), *ORDERS.values(), *VICTIMS.values()]


def _having(table: Mapping[str, type[Policy | Order | Victim]]) -> dict[str, tuple[str, ...]]:
    """Return for each field of a table's classes the names of the rows that have it."""
    names = {each.name for kind in table.values() for each in fields(kind)}
    return {
        name: tuple(row for row, kind in table.items() if name in kind.__dataclass_fields__)
        for name in names
    }


# the modes that have each setting that is a field of policies
ONLY_IN = _having(MODES)
# settings that have a meaning only with some values of another one: that one and the values
NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{
        each.name: (each.metadata["needs"][0], (each.metadata["needs"][1],))
        for kind in KINDS
        for each in fields(kind)
        if each.metadata["needs"]
    },
    "fake_slowdown": ("model", ("fake",)),
    "padded_prefill": ("generator", ("padded",)),
    **{name: ("order", orders) for name, orders in _having(ORDERS).items()},
    **{name: ("victim", victims) for name, victims in _having(VICTIMS).items()},
}


def flag(name: str) -> str:
    """Return a setting's name on a command line."""
    return "--" + name.replace("_", "-")


def setting(default: Any, shown: str, meaning: str | None = None, **limits: Any) -> Any:
    """Return a field of Config. shown: the default in words. meaning: if no text below it says."""
    about: dict[str, Any] = {"shown": shown}
    return Field(default, description=meaning, json_schema_extra=about, **limits)


def of_tables() -> type[BaseModel]:
    """Return a model of the settings in the tables: a mode, an order, and the fields of all."""
    *most, last = MODES
    found: dict[str, Any] = {
        "mode": (
            Literal[tuple(MODES)],
            Field(description=f"batching mode: {', '.join(most)} or {last}"),
        ),
        "order": (
            Literal[tuple(ORDERS)],
            setting("fcfs", "fcfs", f"order of the waiting requests: {', '.join(ORDERS)}"),
        ),
    }
    for kind in KINDS:
        types = get_type_hints(kind)
        for each in fields(kind):
            about, modes = each.metadata, ONLY_IN.get(each.name, tuple(MODES))
            scope = f"{', '.join(modes)}: " if len(modes) < len(MODES) else ""
            if (needs := NEEDS.get(each.name)) and needs[0] in ("order", "victim"):
                scope = f"with --{needs[0]} {' or '.join(needs[1])}: "
            meaning = scope + about["meaning"]
            field = setting(each.default, about["shown"], meaning, **about["limits"])
            type_ = Literal[tuple(VICTIMS)] if each.name == "victim" else types[each.name]
            found[each.name] = (Sizes if type_ == tuple[int, ...] else type_, field)
    return create_model("OfTables", **found)


def varying_parts(config: Mapping[str, Any]) -> str | None:
    """Return a clause that names the parts of a server's engine with which a request's text depends
    on what is computed beside it: the products of libraries, which add in another order for another
    number of tokens. In float32 that decides near-ties at most. None: there are none.
    """
    libraries = {"attention": ("plain",), "linear": ("plain", "onednn")}
    names = [name for name, kinds in libraries.items() if config.get(name) in kinds]
    ours = config.get("generator") == "naive" or config.get("model") == "fake"
    if ours or config.get("dtype") != "bfloat16" or not names:
        return None
    parts = " and ".join(f"{flag(name)} {config[name]}" for name in names)
    return f"in bfloat16 the sums of {parts} depend on how many tokens are computed at once"


def meaningful(name: str, mode: str) -> bool:
    """Return whether a setting has a meaning in a mode."""
    return name not in ONLY_IN or mode in ONLY_IN[name]


def has_effect(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a setting has a meaning beside the others of a config."""
    other, values = NEEDS.get(name, ("mode", (config["mode"],)))
    needed = config.get(other, values[0]) in values
    # in every order it limits how long a request is overtaken
    skips = name == "max_wait_s" and config.get("lora_policy") in ("skip", "drain")
    return (needed or skips) and meaningful(name, config["mode"])


# ---- types


def of_text(read: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that reads what a command line gives; other values stay."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


Count = Annotated[int, Field(ge=1, le=10**9)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Sizes = Annotated[tuple[int, ...], of_text(read_sizes)]
FileName = Annotated[str, Field(min_length=1)]
READERS: dict[str, Callable[[str], object]] = {  # readers of settings that stay texts
    "length_predictor": predictor,
    "prefill": read_prefill,
    "queue_policy": read_queue_policies,
    "user_weights": read_user_weights,
    "slo_classes": read_slo_classes,
    "draft": read_draft,
    "lora_random": read_lora_random,
}


def _draft_tokens(value: Any) -> Any:
    if not str(value).isdecimal():
        raise ValueError(
            "must be a number of draft tokens, such as 4, or 0 for none; auto and numbers by rows "
            "have left, so compare --speculate 2 and 4 at your load"
        )
    return value


def _with_whole_paths(text: str) -> str:
    """The server runs in a folder of its own."""
    return ",".join(f"{name}={source.folder}" for name, source in read_lora(text).items())


class Settings(of_tables(), BaseModel):  # type: ignore[misc]  # the tables are known when it runs
    """Every setting, valid by itself; `checks` has those that do not fit together."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True
    )

    max_batch_size: Annotated[Count, Field(le=100_000)] = setting(32, "32 on a CPU, 256 on a GPU")
    """rows in a batch at most"""
    token_budget: Count = setting(256, "256 on a CPU, 2048 on a GPU")
    """prefill tokens and draft tokens in an iteration at most"""
    loop_interval_ms: NotNegative = 0.0
    """sleep between iterations; 10 reproduces the original experiment's loop"""

    ahead: bool = setting(
        False, "no on a CPU, where both share the cores; yes on a GPU, unless a setting excludes it"
    )
    """plan an iteration while the engine computes the one before"""
    speculate: Annotated[int, BeforeValidator(_draft_tokens)] = 0
    """draft tokens that a row verifies in an iteration; 0: none"""
    draft: str = "ngram"
    """draft tokens come from: ngram (what followed the same words before), model:FOLDER (a small
    GPT-2 of the same vocabulary, with KV blocks of its own beside kv_cache; for demo
    model:demo-draft), or acceptance:0.7 (anywhere, and so many are accepted: texts mean nothing,
    speed is real)"""
    length_predictor: str = "exact"
    """lengths by which orders, bins, --shed and --lora-policy drain go: exact (the completion
    tokens that requests state), noisy:SIGMA (times a log-normal error), constant, or prompt (fitted
    on prompt lengths)"""
    slo_classes: str = setting(
        "",
        "none",
        "classes with limits on time to first token and per output token, in ms, which requests "
        f"name as slo_class: {EXAMPLE}",
    )
    shed: bool = False
    """dynamic with --order fcfs, priority or edf: refuse requests that cannot meet their limit on
    time to first token any more (429), and end those that wait beyond it (504)"""
    preserve_ordering: bool = False
    """plain answers leave in the order in which their requests came"""

    kv_cache: Annotated[str, AfterValidator(lambda text: str(read_size(text)))] = setting(
        "90%", "4GB on a CPU, 90% on a GPU"
    )
    """memory for keys and values: 4GB (of 10^9 bytes), 2048blocks, or 90% (of a GPU's memory, which
    weights and CUDA graphs fill, too)"""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """CPU: type of keys and values, auto (as --dtype) or int8 with a scale for each token and head:
    half of bfloat16's memory"""
    block_size: Count = 16
    """tokens in a KV block; if as many as max_model_len, each request has one block"""
    max_model_len: Annotated[Count, Field(ge=2)] = 1024
    """prompt + completion tokens of a request at most"""
    prefix_caching: bool = False
    """keep computed KV blocks, and share them among requests that begin alike"""

    model: str = setting(
        "",
        "auto: gpt2-medium on a GPU, demo on a CPU",
        f"{', '.join(SHAPES)}, or the folder of a Hugging Face GPT-2",
    )
    weights: Literal["pretrained", "random"] = "pretrained"
    """pretrained, or random: seeded, no download of weights, the same speed"""
    tokenizer: Literal["r50k_base", "bytes"] = setting(
        "bytes", "auto: the one whose ids are the vocabulary, 50,257 or 257"
    )
    """r50k_base (GPT-2's BPE) or bytes"""
    device: Literal["cpu", "cuda"] = setting("cpu", "auto: cuda if there is a GPU")
    """cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "auto: bfloat16 where the processor computes it natively, float32 for demo"
    )
    """float32 or bfloat16"""
    threads: Annotated[Count, Field(le=1024)] = setting(1, "auto: physical cores, 1 for demo")
    """torch threads"""
    kernels: Literal["auto", "plain"] = "auto"
    """auto (the fastest parts that run here) or plain (PyTorch's own operations)"""
    generator: Literal["cached", "padded", "naive"] = "cached"
    """cached; padded: rows as long as the longest, in PyTorch's own attention (BATON); or naive:
    recompute everything, no KV cache"""
    padded_prefill: Literal["apart", "together"] = "apart"
    """with --generator padded: prompts are a rectangle of their own (apart, BATON), or one with the
    rows that decode, each as wide as the longest chunk (together)"""
    fake_slowdown: Positive = 1.0
    """with --model fake: factor by which its iterations take longer"""
    lora: Annotated[str, AfterValidator(_with_whole_paths)] = ""
    """LoRA adapters in PEFT's form, which requests name as their model: NAME=FOLDER,NAME=FOLDER"""
    lora_random: str = ""
    """random LoRA adapters, for measurements: N:RANK makes lora-0, lora-1, … of that rank"""
    max_loras: Annotated[Count, Field(le=10_000)] = 8
    """adapters that the engine holds at once; the others are loaded when requests need them"""
    lora_policy: Literal["mixed", "grouped", "skip", "drain"] = "mixed"
    """adapters of a batch: mixed (as many as the engine holds), grouped (one), skip (a request
    whose adapter must wait is overtaken) or drain (a running adapter gives way)"""
    attention: Literal["kernel", "triton", "plain"] = setting(
        "plain", "auto: kernel on a CPU with a C++ compiler, triton on a GPU"
    )
    """attention: kernel (our C++), triton (ours for GPUs) or plain (PyTorch's, a call a row)"""
    linear: Literal["kernel", "int8", "onednn", "triton", "plain"] = setting(
        "plain",
        "auto: kernel on a CPU with a C++ compiler (by AMX's tiles where it and Linux allow them); "
        "triton on a GPU in bfloat16 without adapters",
    )
    """linear layers: kernel (our C++), int8 (the same, weights and tokens rounded to 8 bits),
    onednn (weights packed once), triton (ours for GPUs: a request's text does not depend on what is
    computed beside it) or plain (PyTorch's)"""
    decoder_batch_sizes: Sizes = setting(
        (), "none on a CPU; 256,128,64,32,16,8,4,2,1 on a GPU, where each has a CUDA graph"
    )
    """decode iterations are filled up with padding rows to the smallest that holds them: 32,8,4,1,
    or none, which makes no CUDA graphs either"""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 listens to other machines too"""
    port: Annotated[int, Field(ge=1, le=65535)] = 8500
    """port to listen on"""
    http_processes: Annotated[int, Field(ge=1, le=64)] = setting(
        1, "auto: 1 on a CPU, a quarter of the cores (1 to 8) beside a GPU"
    )
    """processes that speak HTTP; with several the engine has one of its own beside them"""
    # keys are in no dump, repr or message: the launcher hands them on by `handoff`
    api_key: Annotated[SecretStr | None, of_text(read_key)] = setting(
        None, "none", exclude=True, repr=False
    )
    """clients must send it: Authorization: Bearer KEY; EB_API_KEY hides it from ps"""
    # the user of each key, by its digest
    api_keys: Annotated[dict[str, str] | None, of_text(read_keys)] = setting(
        None, "none", exclude=True, repr=False
    )
    """a key for each user: a file of lines NAME KEY; limits, fairness and logs go by that name"""
    allowed_hosts: str = setting("", "addresses and localhost")
    """without a key: names beside localhost by which clients may reach this server, separated by
    commas; *: any"""
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """requests that may wait beside max_batch_size running ones; beyond it 429"""
    user_requests_per_minute: Count | None = None
    """requests that each user may send in a minute; beyond it 429"""
    user_tokens_per_minute: Count | None = None
    """prompt and completion tokens that each user may ask for in a minute"""
    request_timeout_s: Positive | None = None
    """answer 504 after this long; a request may set its own"""
    header_timeout_s: Positive = 10.0
    """answer 408 if a request's headers are not whole after this long"""
    body_timeout_s: Positive = 30.0
    """answer 408 if a request's body is not whole this long after its headers"""
    drain_timeout_s: NotNegative = 3600.0
    """SIGTERM finishes requests in flight; after this long they get an error"""

    live: Literal["on", "off", "prompts"] = "on"
    """GET /live shows the rows of the batch while a page is open: on, off, or prompts (with the
    beginning of each prompt, which is its sender's data)"""
    request_log: FileName | None = None
    """append a JSON line for every request that ended to this file"""
    record: FileName | None = None
    """append every call that changes the scheduler to this file, for ./simulate.sh --replay"""

    @field_validator("decoder_batch_sizes")
    @classmethod
    def _order_sizes(cls, sizes: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        """As in RBLN: sorted descending, and max_batch_size is one of them."""
        most = info.data.get("max_batch_size")
        if not sizes or most is None:  # a wrong max_batch_size has its own error
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
    def _read_list(cls, text: str, info: ValidationInfo) -> str:
        """Refuse a text that its reader cannot read, with the reader's sentence."""
        READERS[str(info.field_name)](text)
        return text
