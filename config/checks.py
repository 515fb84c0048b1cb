"""What does not fit together, or into this machine; and what a user should know of a Config."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import psutil

import kernels
from config.resolve import VOCABULARIES, onednn_multiplies_bfloat16
from config.tables import flag
from scheduling.policies import MODES, chosen

if TYPE_CHECKING:
    from config.settings import Config


def refuse_what_does_not_fit(config: Config) -> None:
    """Raise ValueError, with a sentence that names the fix, for settings that contradict each
    other or the machine.
    """
    shape = config.shape
    if config.max_model_len > shape.n_ctx:
        raise ValueError(
            f"max_model_len {config.max_model_len} is beyond the {shape.n_ctx} positions of "
            f"{config.model}; lower it"
        )
    for name in ("attention", "linear", "sampler", "norms", "kv_dtype"):
        value = getattr(config, name)
        if value in ("kernel", "int8", "onednn") and config.device != "cpu":
            raise ValueError(
                f"{name} {value} runs on a CPU alone; leave {flag(name)} out, or use --device cpu"
            )
    if (config.linear, config.dtype) == ("onednn", "bfloat16") and not onednn_multiplies_bfloat16():
        raise ValueError(
            "linear onednn has no bfloat16 for this processor, which has neither AVX-512 nor "
            "bfloat16 of its own; leave --linear out, or use --dtype float32"
        )
    if config.decoder_batch_sizes and config.generator == "naive":
        raise ValueError(
            "decoder_batch_sizes are the cached engine's; leave --decoder-batch-sizes or "
            "--generator naive out"
        )
    for name in ("attention", "norms"):
        if getattr(config, name) == "triton" and config.device == "cpu":
            raise ValueError(f"{name} triton runs on a GPU alone; leave {flag(name)} out")
    if config.attention == "kernel" and shape.head_size > kernels.LARGEST_HEAD:
        raise ValueError(
            f"attention kernel takes heads of at most {kernels.LARGEST_HEAD}; use --attention plain"
        )
    if config.attention == "triton" and shape.head_size > kernels.LARGEST_TRITON_HEAD:
        raise ValueError(
            f"attention triton takes heads of at most {kernels.LARGEST_TRITON_HEAD}; use "
            f"--attention plain"
        )
    vocabulary = VOCABULARIES[config.tokenizer]
    if vocabulary > shape.vocab_size:
        raise ValueError(
            f"tokenizer {config.tokenizer} has {vocabulary} ids and {config.model} only "
            f"{shape.vocab_size}; "
            "choose another --tokenizer"
        )
    blocks = config.blocks_per_request
    if config.kv_blocks is not None and config.kv_blocks < blocks:
        raise ValueError(
            f"kv_blocks {config.kv_blocks} of {config.block_size} tokens hold "
            f"{config.kv_blocks * config.block_size} tokens, and one request of "
            f"{config.max_model_len} needs {blocks}; raise --kv-blocks or lower --max-model-len"
        )
    if config.budget_counts == "all" and config.token_budget < config.max_batch_size:
        raise ValueError(
            f"token_budget {config.token_budget} counts decoded tokens too, and a batch may have "
            f"{config.max_batch_size} of them; raise --token-budget, lower --max-batch-size, or "
            "leave --budget-counts out"
        )
    if config.record is not None and config.record == config.request_log:
        raise ValueError(
            f"record and request_log are both {config.record}; choose another --record"
        )
    if config.api_key is not None and config.api_keys is not None:
        raise ValueError(
            "--api-key and --api-keys both say who may ask; leave one of them out (where .env sets "
            "it, --api-key none does)"
        )
    if config.live_prompts and config.live == "off":
        raise ValueError(
            "live_prompts are shown on the page that live off leaves out; leave one of them out"
        )
    if config.model == "fake":
        return
    if config.kv_cache_gb is not None and config.n_blocks < blocks:
        token = config.shape.kv_bytes_per_token(config.kept_as)
        need = blocks * config.block_size * token
        raise ValueError(
            f"kv_cache_gb {config.kv_cache_gb:g} holds {config.n_blocks} blocks of "
            f"{config.block_size} tokens × {token:,} bytes, and one request of "
            f"{config.max_model_len} tokens needs {blocks} ({need / 1e9:.3f} GB); "
            f"raise --kv-cache-gb or lower --max-model-len"
        )
    if config.device == "cuda":  # what is free there is known once the weights are
        return
    weights, kv, memory = (
        shape.weight_bytes(config.dtype, config.multiplied_as),
        config.kv_bytes,
        psutil.virtual_memory().total,
    )
    if weights + kv > memory:
        raise ValueError(
            f"{config.model} needs {weights / 1e9:.2f} GB of weights + {kv / 1e9:.2f} GB of keys "
            f"and values "
            f"= {(weights + kv) / 1e9:.2f} GB, and this machine has {memory / 1e9:.2f} GB; "
            "lower --kv-cache-gb or choose a smaller --model"
        )


def warnings(config: Config) -> list[str]:
    """What the user of a Config should know but need not change."""
    found = []
    if not config.users_of_keys and not is_loopback(config.host):
        found.append(
            f"whoever reaches {config.host}:{config.port} may use this server; --api-key (or "
            f"EB_API_KEY) bars others"
        )
    if config.weights == "random" and config.model != "fake":
        found.append("the weights are random, so the text is noise; speed does not depend on them")
    cached = config.generator == "cached" and config.model != "fake"
    on_cpu = cached and config.device == "cpu"
    if on_cpu and config.attention == "plain" and (reason := kernels.why_unavailable()):
        found.append(
            f"attention and sampling run on PyTorch's own operations, a call a row, which is "
            f"slower: {reason}"
        )
    if (
        cached
        and config.device == "cuda"
        and config.attention == "plain"
        and (reason := kernels.why_no_triton(config.shape.head_size))
    ):
        found.append(
            f"attention calls PyTorch once a row, and without CUDA graphs, which is slower: "
            f"{reason}"
        )
    if config.request_timeout_s is not None and config.request_timeout_s > config.drain_timeout_s:
        found.append(
            f"request_timeout_s {config.request_timeout_s:g} is beyond drain_timeout_s "
            f"{config.drain_timeout_s:g}, after which "
            "SIGTERM ends requests that have time left; raise --drain-timeout-s"
        )
    found += chosen(MODES, config.mode, config).warnings(config.max_batch_size)
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
