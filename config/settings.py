"""Every setting of a server with its meaning and its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)  # fmt: skip

from config.adapters import read_lora, read_lora_random
from config.keys import read_key, read_keys
from config.pool import in_todays_names, read_size
from config.shapes import SHAPES
from config.tables import of_tables, setting
from scheduling.policies.deadlines import EXAMPLE, read_slo_classes
from scheduling.policies.fair import read_user_weights
from scheduling.policies.lengths import predictor
from scheduling.policies.prefill import read_prefill
from scheduling.policies.priority import read_queue_policies
from scheduling.speculation import read_draft

ONLY_OVER_HTTP = (
    "request_timeout_s", "header_timeout_s", "body_timeout_s", "drain_timeout_s", "request_log",
    "record", "live", "live_prompts", "host", "port", "api_key", "api_keys", "allowed_hosts",
    "log_level",
)  # fmt: skip
NOT_SIMULATED = {*ONLY_OVER_HTTP, "weights_seed"} - {"request_timeout_s"}  # in virtual time
MAX_BODY_BYTES = 1_000_000  # of a request; a larger one is 413
SPARE_FILES = 128  # open files of a server beside its connections
DOOMED_FILES = 4096  # connections that may wait to be closed, where the system allows as many files
# how long Ctrl-C waits for clients; gunicorn kills the worker 2 s after a second signal
END_S = 1.5
BOOT_ERROR = 3  # exit code that gunicorn takes for a worker that is not to be started again
HANDOFF = "EFFECTIVE_BATCHING_CONFIG"  # the variable that hands the Config to gunicorn's worker
Count = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


READERS: dict[str, Callable[[str], object]] = {  # of settings that stay texts
    "length_predictor": predictor, "prefill": read_prefill, "queue_policy": read_queue_policies,
    "user_weights": read_user_weights, "slo_classes": read_slo_classes,
    "draft": read_draft, "lora_random": read_lora_random,
}  # fmt: skip


class ConfigError(Exception):
    """A setting that cannot be used; the message is one sentence that names the fix."""


class Settings(of_tables(), BaseModel):  # type: ignore[misc]  # the tables are known when it runs
    """Every setting, valid by itself; `Config` refuses those that do not fit together."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    # fmt: off
    max_batch_size: Count = setting(32, "rows in a batch at most", "32 on a CPU, 256 on a GPU",
        le=100_000)
    token_budget: Count = setting(256, "prefill tokens and draft tokens in an iteration at most",
        "256 on a CPU, 2048 on a GPU")
    loop_interval_ms: NotNegative = setting(0.0,
        "sleep between iterations; 10 reproduces the original experiment's loop")

    ahead: bool = setting(False,
        "plan an iteration while the engine computes the one before; for a GPU, since on a CPU "
        "both share the cores", "off")
    speculate: int = setting(0, "draft tokens that a row verifies in an iteration; 0: none")
    draft: str = setting("ngram",
        "draft tokens come from: ngram (what followed the same words before), model:FOLDER (a "
        "small GPT-2 of the same vocabulary, with KV blocks of its own beside kv_cache; for demo "
        "model:demo-draft), or acceptance:0.7 (anywhere, and so many are accepted: texts mean "
        "nothing, speed is real)")
    length_predictor: str = setting("exact",
        "lengths by which orders and bins sort: exact (the completion tokens that requests state), "
        "noisy:SIGMA (times a log-normal error), constant, or prompt (fitted on prompt lengths)")
    slo_classes: str = setting("",
        "classes with limits on time to first token and per output token, in ms, which requests "
        f"name as slo_class: {EXAMPLE}", "none")
    shed: bool = setting(False,
        "dynamic with --order fcfs, priority or edf: refuse requests that cannot meet their limit "
        "on time to first token any more (429), and end those that wait beyond it (504)", "off")
    preserve_ordering: bool = setting(False,
        "plain answers leave in the order in which their requests came", "off")

    kv_cache: str = setting("90%",
        "memory for keys and values: 4GB (of 10^9 bytes), 2048blocks, or 90% (of a GPU's memory, "
        "which weights and CUDA graphs fill, too)", "4GB on a CPU, 90% on a GPU")
    kv_dtype: Literal["auto", "int8"] = setting("auto",
        "CPU: type of keys and values, auto (as --dtype) or int8 with a scale for each token and "
        "head: half of bfloat16's memory")
    block_size: Count = setting(16,
        "tokens in a KV block; if as many as max_model_len, each request has one block")
    max_model_len: int = setting(1024, "prompt + completion tokens of a request at most", ge=2)
    prefix_caching: bool = setting(False,
        "keep computed KV blocks, and share them among requests that begin alike", "off")

    model: str = setting("", f"{', '.join(SHAPES)}, or the folder of a Hugging Face GPT-2",
        "auto: gpt2-medium on a GPU, demo on a CPU")
    weights: Literal["pretrained", "random"] = setting("pretrained",
        "pretrained, or random: seeded, no download of weights, the same speed")
    weights_seed: Seed = setting(0, "seed of random weights")
    tokenizer: Literal["r50k_base", "bytes"] = setting("bytes", "r50k_base (GPT-2's BPE) or bytes",
        "auto: the one whose ids are the vocabulary, 50,257 or 257")
    device: Literal["cpu", "cuda"] = setting("cpu", "cpu or cuda", "auto: cuda if there is a GPU")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "float32 or bfloat16",
        "auto: bfloat16 where the processor computes it natively, float32 for demo")
    threads: Count = setting(1, "torch threads", "auto: physical cores, 1 for demo")
    kernels: Literal["auto", "plain"] = setting("auto",
        "auto (the fastest parts that run here) or plain (PyTorch's own operations)")
    generator: Literal["cached", "padded", "naive"] = setting("cached",
        "cached; padded: rows as long as the longest, in PyTorch's own attention (BATON); or "
        "naive: recompute everything, no KV cache")
    padded_prefill: Literal["apart", "together"] = setting("apart",
        "with --generator padded: prompts are a rectangle of their own (apart, BATON), or one with "
        "the rows that decode, each as wide as the longest chunk (together)")
    padded_compact: float = setting(0.5,
        "with --generator padded: keys and values are copied to a tight rectangle as soon as more "
        "than this share of theirs would be saved", ge=0, le=1)
    fake_slowdown: Positive = setting(1.0,
        "with --model fake: factor by which its iterations take longer")
    lora: str = setting("",
        "LoRA adapters in PEFT's form, which requests name as their model: "
        "NAME=FOLDER,NAME=FOLDER", "none")
    lora_random: str = setting("",
        "random LoRA adapters, for measurements: N:RANK makes lora-0, lora-1, … of that rank",
        "none")
    max_loras: Count = setting(8,
        "adapters that the engine holds at once; the others are loaded when requests need them")
    lora_policy: Literal["mixed", "grouped", "skip", "drain"] = setting("mixed",
        "adapters of a batch: mixed (as many as the engine holds), grouped (one), skip (a request "
        "whose adapter must wait is overtaken) or drain (a running adapter gives way)")
    attention: Literal["kernel", "triton", "plain"] = setting("plain",
        "attention: kernel (our C++), triton (ours for GPUs) or plain (PyTorch's, a call a row)",
        "auto: kernel on a CPU with a C++ compiler, triton on a GPU")
    linear: Literal["kernel", "int8", "onednn", "triton", "plain"] = setting("plain",
        "linear layers: kernel (our C++), int8 (the same, weights and tokens rounded to 8 bits), "
        "onednn (weights packed once), triton (ours for GPUs up to 32 tokens, with norms, gelu and "
        "additions inside) or plain (PyTorch's)",
        "auto: kernel on a CPU with a C++ compiler; onednn for bfloat16 with AMX or on Arm; triton "
        "on a GPU, without adapters")
    sampler: Literal["kernel", "plain"] = setting("plain",
        "sampling: kernel (our C++) or plain (PyTorch's)",
        "auto: kernel on a CPU with a C++ compiler")
    norms: Literal["kernel", "triton", "plain"] = setting("plain",
        "additions and norms: kernel (our C++), triton (ours for GPUs) or plain (PyTorch's)",
        "auto: kernel on a CPU with a C++ compiler, triton on a GPU")
    decoder_batch_sizes: tuple[int, ...] = setting((),
        "decode iterations are filled up with padding rows to the smallest that holds them: "
        "32,8,4,1, or none",
        "none on a CPU; 256,128,64,32,16,8,4,2,1 on a GPU, where each has a CUDA graph")
    enforce_eager: bool = setting(False, "GPU: no CUDA graphs; slower, for comparison", "off")
    batch_invariant: bool = setting(False,
        "GPU: linear triton for any number of tokens, so that a request's text does not depend on "
        "what is computed beside it; slower for many tokens", "off")

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 listens to other machines too")
    port: int = setting(8500, "port to listen on", ge=1, le=65535)
    # keys are in no dump, repr or message: the launcher hands them on by `handoff`
    api_key: SecretStr | None = setting(None,
        "clients must send it: Authorization: Bearer KEY; EB_API_KEY hides it from ps", "none",
        exclude=True, repr=False)
    # the user of each key, by its digest
    api_keys: dict[str, str] | None = setting(None,
        "a key for each user: a file of lines NAME KEY; limits, fairness and logs go by that name",
        "none", exclude=True, repr=False)
    allowed_hosts: str = setting("",
        "without a key: names beside localhost by which clients may reach this server, separated "
        "by commas; *: any", "addresses and localhost")
    max_waiting: int = setting(1024,
        "requests that may wait beside max_batch_size running ones; beyond it 429", ge=0)
    user_requests_per_minute: Count | None = setting(None,
        "requests that each user may send in a minute; beyond it 429", "none")
    user_tokens_per_minute: Count | None = setting(None,
        "prompt and completion tokens that each user may ask for in a minute", "none")
    request_timeout_s: Positive | None = setting(None,
        "answer 504 after this long; a request may set its own", "none")
    header_timeout_s: Positive = setting(10.0,
        "answer 408 if a request's headers are not whole after this long")
    body_timeout_s: Positive = setting(30.0,
        "answer 408 if a request's body is not whole this long after its headers")
    drain_timeout_s: NotNegative = setting(3600.0,
        "SIGTERM finishes requests in flight; after this long they get an error")

    live: Literal["on", "off"] = setting("on",
        "GET /live shows the rows of the batch while a page is open: on or off")
    live_prompts: bool = setting(False,
        "show there the beginning of each prompt, which is its sender's data", "off")
    request_log: str | None = setting(None,
        "append a JSON line for every request that ended to this file", "none", min_length=1)
    record: str | None = setting(None,
        "append every call that changes the scheduler to this file, for ./simulate.sh --replay",
        "none", min_length=1)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info",
        "debug, info, warning or error")
    # fmt: on

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, settings: Any) -> Any:
        """Take the settings of an older run, too."""
        return in_todays_names(settings) if isinstance(settings, dict) else settings

    @field_validator("speculate", mode="before")
    @classmethod
    def _check_speculate(cls, value: Any) -> Any:
        if not str(value).isdecimal():
            raise ValueError(
                "must be a number of draft tokens, such as 4, or 0 for none; auto and numbers by "
                "rows have left, so compare --speculate 2 and 4 at your load"
            )
        return value

    @field_validator("kv_cache")
    @classmethod
    def _read_size(cls, text: str) -> str:
        return str(read_size(text))

    @field_validator("decoder_batch_sizes", "preferred_batch_sizes", mode="before")
    @classmethod
    def _read_sizes(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return () if value == "none" else tuple(int(size) for size in value.split(","))
        except ValueError:
            raise ValueError(
                "must be numbers separated by commas, such as 32,8,4,1, or none"
            ) from None

    @field_validator("api_key", "api_keys", mode="before")
    @classmethod
    def _read_keys(cls, value: Any, info: ValidationInfo) -> Any:
        read = read_key if info.field_name == "api_key" else read_keys
        return read(value) if isinstance(value, str) else value

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

    @field_validator("lora")
    @classmethod
    def _with_whole_paths(cls, text: str) -> str:
        """The server runs in a folder of its own."""
        return ",".join(f"{name}={source.folder}" for name, source in read_lora(text).items())
