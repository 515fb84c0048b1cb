"""Settings by what a user wants to do: the order of --help and of docs/settings.md."""

from __future__ import annotations

from dataclasses import fields

from config.config import Config
from config.tables import KINDS

GROUPS = {
    "How batches form": (
        "mode", "max_batch_size", "token_budget", "budget_counts", "prefill", "decode_floor",
        "tbt_ms", "compact_batches", "max_batch_delay_ms", "batch_size_target",
        "batch_size_limit", "preferred_batch_sizes", "bins", "loop_interval_ms", "ahead",
    ),
    "Order of the waiting requests": (
        "order", "max_wait_s", "priority_levels", "default_priority_level", "queue_policy",
        "length_predictor", "prefill_weight", "aging", "prefix_window", "user_weights",
        "mlfq_quantum", "mlfq_levels", "slo_classes", "shed", "preserve_ordering",
    ),
    "Memory": (
        "kv_cache", "kv_dtype", "kv_reservation", "victim", "watermark", "prefix_caching",
        "max_model_len", "block_size",
    ),
    "Model and engine": (
        "model", "weights", "weights_seed", "tokenizer", "device", "dtype", "threads", "kernels",
        "generator", "padded_prefill", "padded_compact", "fake_slowdown",
    ),
    "Speculative decoding": ("speculate", "draft"),
    "LoRA adapters": ("lora", "lora_random", "max_loras", "lora_policy"),
    "HTTP and limits": (
        "host", "port", "api_key", "api_keys", "allowed_hosts", "max_waiting",
        "user_requests_per_minute", "user_tokens_per_minute", "request_timeout_s",
        "header_timeout_s", "body_timeout_s", "drain_timeout_s",
    ),
    "Observing": ("live", "live_prompts", "request_log", "record", "log_level"),
    "For experts: parts of the engine, each before --kernels": (
        "attention", "linear", "sampler", "norms", "decoder_batch_sizes", "enforce_eager",
        "batch_invariant",
    ),
}  # fmt: skip
_GROUPED = {name for names in GROUPS.values() for name in names}
# of policies and orders that a user added
GROUPS["How batches form"] += tuple(
    dict.fromkeys(each.name for kind in KINDS for each in fields(kind) if each.name not in _GROUPED)
)


def meaning(name: str) -> tuple[str, str]:
    """Return what a setting means, and its default in words."""
    field = Config.model_fields[name]
    shown = field.json_schema_extra["shown"] if isinstance(field.json_schema_extra, dict) else ""
    return str(field.description), str(shown)
