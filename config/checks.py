"""Settings that do not go together: predicates, each with the sentence that refuses what it finds.

Of the machine it knows the memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import psutil

from config.config import Config
from config.reading import read_lora, read_lora_random
from config.settings import NEEDS, ONLY_IN, PARTS, VOCABULARIES, flag, has_effect, meaningful
from config.shapes import LARGEST_HEAD, LARGEST_RANK
from scheduling.policies import ORDERS, chosen
from scheduling.policies.priority import read_queue_policies
from scheduling.user_policies import misfit

SHEDDING = ("fcfs", "priority", "edf")  # orders in which a request has its place when it comes
MOST_BLOCKS = 10**8  # KV blocks; the scheduler has a number for each, 0.8 GB in all
# settings without a meaning with engines but the cached one, and with none at all
UNUSED = {
    ("generator", "naive"): ("kernels", *PARTS),
    ("generator", "padded"): ("attention",),
    ("model", "fake"): ("kernels", *PARTS, "kv_dtype"),
}


def refusals(config: Config, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each flag without a meaning, and for each contradiction of settings.

    given: the flags that a user typed; what the environment sets may have no meaning here.
    """
    yield from _without_meaning(config, given)
    if why := misfit(config):
        yield why
    for sentence, found in CONTRADICTIONS.items():
        if it := found(config):
            yield sentence.format(c=config, it=it)
    yield from _excluded(config)


def _without_meaning(config: Config, given: Mapping[str, Any]) -> Iterator[str]:
    settings = dict(config)
    for name in given:
        if not meaningful(name, config.mode):
            modes = " and ".join(ONLY_IN[name])
            yield f"{flag(name)} has no meaning in mode {config.mode}; it belongs to {modes}"
        elif not has_effect(name, settings):
            other, values = NEEDS[name]
            needed = f"{flag(other)} {' or '.join(values)}"
            yield f"{flag(name)} has no meaning without {needed}; add that, or leave it out"
        elif name in ("max_loras", "lora_policy") and not config.lora_slots:
            needed = "--lora or --lora-random"
            yield f"{flag(name)} has no meaning without {needed}; add one of them, or leave it out"
        for (other, value), names in UNUSED.items():
            if name in names and settings[other] == value:
                where = f"{flag(other)} {value}"
                yield f"{flag(name)} has no meaning with {where}; leave one of them out"
    by_length = [name for name, each in ORDERS.items() if each.by_length]
    drains = config.lora_slots and config.lora_policy == "drain"
    goes_by = config.order in by_length or config.mode == "multibin" or config.shed or drains
    if "length_predictor" in given and not goes_by:
        yield (
            f"--length-predictor has no meaning without --order {' or '.join(by_length)}, mode "
            "multibin, --shed or --lora-policy drain, which go by lengths; add one of them, or "
            "leave it out"
        )
    if config.preferred_batch_sizes and "batch_size_target" in given:
        yield (
            "--preferred-batch-sizes and --batch-size-target both say when a batch is large "
            "enough; leave one of them out"
        )
    if config.device == "cpu" and (size := str(given.get("kv_cache"))).endswith("%"):
        yield (
            f"--kv-cache {size} is a share of a GPU's memory; on a CPU give a size such as 4GB or "
            "2048blocks"
        )
    if config.model == "fake" and "kv_cache" in given and config.pool.unit == "GB":
        yield (
            f"--kv-cache {config.kv_cache}: the model fake does not say how large keys and values "
            "are; give a number of blocks, such as 2048blocks"
        )


# ---- features that do not go together; docs/settings.md has them as a table


class Feature(NamedTuple):
    """A feature, its flag, and whether settings choose it."""

    name: str
    flag: str
    chosen: Callable[[Config], bool]


NAIVE = Feature("no KV cache", "--generator naive", lambda c: c.generator == "naive")
PADDED = Feature("padded engine", "--generator padded", lambda c: c.generator == "padded")
PREFIXES = Feature("prefix caching", "--prefix-caching", lambda c: c.prefix_caching)
DRAFTS = Feature("speculative decoding", "--speculate", lambda c: c.speculate > 0)
ADAPTERS = Feature("LoRA adapters", "--lora…", lambda c: c.lora_slots > 0)
INT8_KV = Feature("int8 keys and values", "--kv-dtype", lambda c: c.kv_dtype == "int8")
INT8 = Feature("int8 weights", "--linear int8", lambda c: c.linear == "int8")
SIZES = Feature(
    "decoder batch sizes", "--decoder-batch-sizes", lambda c: bool(c.decoder_batch_sizes)
)
AHEAD = Feature("planned ahead", "--ahead", lambda c: c.ahead)
# settings that iterations planned ahead exclude, and their values without effect: a recording has
# none, and shedding and `prefill` go by the time from an iteration's plan to its end, which another
# one shares
AHEAD_WITHOUT = {"record": None, "shed": False, "prefill": "mixed"}
ENGINES = (NAIVE, PADDED)  # a server has one of these
FEATURES = (*ENGINES, PREFIXES, DRAFTS, ADAPTERS, INT8_KV, INT8, SIZES, AHEAD)
_BY_CACHED_ENGINE = {
    PREFIXES: "KV blocks are shared",
    DRAFTS: "draft tokens are verified",
    ADAPTERS: "adapters are added",
    INT8_KV: "keys and values are rounded to 8 bits",
    SIZES: "iterations are filled up to fixed sizes",
    AHEAD: "iterations are planned ahead",
}
# why two features do not go together
EXCLUDED = {
    **{
        (engine, feature): f"{what} by the cached engine alone"
        for engine in ENGINES
        for feature, what in _BY_CACHED_ENGINE.items()
    },
    (NAIVE, INT8): "without a KV cache the linear layers are PyTorch's",
    (DRAFTS, AHEAD): "draft tokens follow from the ids of the iteration before",
}


def _excluded(config: Config) -> Iterator[str]:
    for (one, other), why in EXCLUDED.items():
        if one.chosen(config) and other.chosen(config):
            yield f"{why}; leave {other.flag} or {one.flag} out"
    for name, value in AHEAD_WITHOUT.items() if config.ahead else ():
        if getattr(config, name) != value and meaningful(name, config.mode):
            yield f"iterations planned ahead exclude {flag(name)}; leave it or --ahead out"


# ---- contradictions


ONLY_ON = {"cpu": ("kernel", "int8", "onednn"), "cuda": ("triton",)}


def _without(device: str, part: str, c: Config) -> str | None:
    """Return a part's value if it runs on this device alone, and the server is on the other one."""
    value = str(getattr(c, part))
    return value if c.device != device and value in ONLY_ON[device] else None


def _draft(c: Config, differs: Callable[[Config], bool]) -> Config | None:
    """Return the settings of the draft model if there is one that differs."""
    return draft if (draft := c.draft_model) is not None and differs(draft) else None


def _heads(c: Config) -> int:
    """Return the largest size of a head, of the model and of the draft model."""
    return max(each.shape.head_size for each in (c, c.draft_model) if each is not None)


def beyond_memory(c: Config, servers: int = 1) -> str | None:
    """Return why this machine's memory does not hold so many servers; None if it does. A GPU's free
    memory is known once the weights are there.
    """
    models = [each for each in (c, c.draft_model) if each is not None]
    weights = sum(each.shape.weight_bytes(each.dtype, each.multiplied_as) for each in models)
    kv = sum(each.n_blocks * each.block_bytes for each in models)
    weights, kv, memory = servers * weights, servers * kv, psutil.virtual_memory().total
    if c.model == "fake" or c.device != "cpu" or weights + kv <= memory:
        return None
    names = " and ".join(each.model for each in models)
    several, lower = (f"{servers} replicas of ", "--replicas or ") if servers > 1 else ("", "")
    need = "need" if several or len(models) > 1 else "needs"
    return (
        f"{several}{names} {need} {weights / 1e9:.2f} GB of weights + {kv / 1e9:.2f} GB of keys "
        f"and values = {(weights + kv) / 1e9:.2f} GB, and this machine has {memory / 1e9:.2f} GB; "
        f"lower {lower}--kv-cache or choose a smaller --model"
    )


def _alike(c: Config) -> str:
    """Return what tells requests apart by predicted lengths, if all are the same."""
    by = "mode multibin" if c.mode == "multibin" else "--order sjf" * (c.order == "sjf")
    return by if c.length_predictor == "constant" else ""


def _overtaking(c: Config) -> str:
    """Return the setting by which a later request is answered first, if there is one (Triton
    refuses several levels, and delays, with preserve_ordering).
    """
    if ORDERS[c.order].preemptive:
        return f"--order {c.order}"
    if c.order == "priority":
        if c.priority_levels > 1:
            return "--order priority with several levels"
        policies = chosen(ORDERS, c.order, c).queue_policies.values()
        if any(policy.action == "delay" for policy in policies):
            return "--queue-policy with action=delay"
    return ""


# each sentence, in which {c} is the Config and {it} what was found, and what finds it
CONTRADICTIONS: dict[str, Callable[[Config], Any]] = {
    "max_model_len {c.max_model_len} is beyond the {c.shape.n_ctx} positions of {c.model}; "
    "lower it": lambda c: c.max_model_len > c.shape.n_ctx,
    **{
        f"{part} {{it}} runs on a CPU alone; leave {flag(part)} out, or use --device cpu": (
            partial(_without, "cpu", part)
        )
        for part in (*PARTS, "kv_dtype")
    },
    **{
        f"{part} {{it}} runs on a GPU alone; leave {flag(part)} out": partial(
            _without, "cuda", part
        )
        for part in PARTS
    },
    "attention {c.attention} takes heads of at most {it}; use --attention plain": lambda c: (
        (most := LARGEST_HEAD.get(c.attention)) and _heads(c) > most and most
    ),
    "--draft proposes tokens for --speculate; state --speculate 4, or leave it out": lambda c: (
        c.draft != "ngram" and not c.speculate
    ),
    "{c.speculate} draft tokens do not fit into max_model_len {c.max_model_len} and "
    "token_budget {c.token_budget}, which counts them; lower --speculate": lambda c: (
        c.speculate and c.speculate >= min(c.max_model_len, c.token_budget)
    ),
    "--draft {c.draft} guesses for a model, and fake is none; use --draft ngram": lambda c: _draft(
        c, lambda draft: "fake" in (c.model, draft.model)
    ),
    "{it.model} has a vocabulary of {it.shape.vocab_size:,} ids and {c.model} one of "
    "{c.shape.vocab_size:,}; choose a --draft model with the same": lambda c: _draft(
        c, lambda draft: draft.shape.vocab_size != c.shape.vocab_size
    ),
    "max_model_len {c.max_model_len} is beyond the {it.shape.n_ctx} positions of {it.model}; "
    "lower it, or choose another --draft": lambda c: _draft(
        c, lambda draft: draft.shape.n_ctx < c.max_model_len
    ),
    "--lora's folders hold weights, and the model fake has none; use --lora-random": lambda c: (
        c.lora and c.model == "fake"
    ),
    f"--lora-random {{c.lora_random}}: a rank is 1 … {LARGEST_RANK}; lower it": lambda c: (
        max([each.rank for each in c.adapters.values()], default=0) > LARGEST_RANK
    ),
    "--lora names an adapter {it[0]}, which is another model's name; choose another "
    "name": lambda c: sorted(
        {c.model_name, *read_lora_random(c.lora_random)} & read_lora(c.lora).keys()
    ),
    "tokenizer {c.tokenizer} has {it} ids and {c.model} only {c.shape.vocab_size}; choose "
    "another --tokenizer": lambda c: (n := VOCABULARIES[c.tokenizer]) > c.shape.vocab_size and n,
    "token_budget {c.token_budget} counts decoded tokens too, and a batch may have "
    "{c.max_batch_size} of them; raise --token-budget, lower --max-batch-size, or leave "
    "--budget-counts out": lambda c: (
        meaningful("budget_counts", c.mode)
        and c.budget_counts == "all"
        and c.token_budget < c.max_batch_size
    ),
    "record and request_log are both {c.record}; choose another --record": lambda c: (
        c.record is not None and c.record == c.request_log
    ),
    "--api-key and --api-keys both set who may send requests; leave one of them out (where "
    ".env sets it, --api-key none does)": lambda c: (
        c.api_key is not None and c.api_keys is not None
    ),
    "kv_cache {c.pool} of {c.block_size} tokens hold {it} tokens, and one request "
    "of {c.max_model_len} needs {c.blocks_per_request}; raise --kv-cache or lower "
    "--max-model-len": lambda c: (
        c.pool.unit == "blocks" and c.n_blocks < c.blocks_per_request and c.n_blocks * c.block_size
    ),
    "kv_cache {c.pool} holds {c.n_blocks} blocks of {c.block_size} tokens × {c.token_bytes:,} "
    "bytes, and one request of {c.max_model_len} tokens needs {c.blocks_per_request} "
    "({it:.3f} GB); raise --kv-cache or lower --max-model-len": lambda c: (
        c.model != "fake"
        and c.pool.unit == "GB"
        and c.n_blocks < c.blocks_per_request
        and c.blocks_per_request * c.block_bytes / 1e9
    ),
    "{it:,} KV blocks are more than a scheduler has numbers for; lower --kv-cache, "
    "--max-batch-size or --max-model-len, or raise --block-size": lambda c: (
        c.n_blocks > MOST_BLOCKS and c.n_blocks
    ),
    "{it}": beyond_memory,
    "--order {c.order} pauses rows, and in mode {c.mode} a batch runs to its end; use mode "
    "dynamic, or one of the orders {it}": lambda c: (
        c.mode != "dynamic"
        and ORDERS[c.order].preemptive
        and ", ".join(name for name, each in ORDERS.items() if not each.preemptive)
    ),
    "--order prefix goes by what the prefix cache holds; add --prefix-caching": lambda c: (
        c.order == "prefix" and not c.prefix_caching
    ),
    "{it} tells requests apart by predicted lengths, and --length-predictor constant gives all "
    "the same; use exact, noisy:SIGMA or prompt": _alike,
    "--preferred-batch-sizes {it[0]} is no batch size: a batch has 1 … {c.max_batch_size} "
    "rows; leave it out, or raise --max-batch-size": lambda c: (
        meaningful("preferred_batch_sizes", c.mode)
        and [n for n in c.preferred_batch_sizes if not 1 <= n <= c.max_batch_size]
    ),
    "--default-priority-level {c.default_priority_level} is beyond the {c.priority_levels} "
    "levels; lower it, or raise --priority-levels": lambda c: (
        c.order == "priority" and (c.default_priority_level or 0) > c.priority_levels
    ),
    "--queue-policy names level {it[0]}, and there are levels 1 … {c.priority_levels}; name "
    "one of them, or raise --priority-levels": lambda c: (
        c.order == "priority"
        and [n for n in read_queue_policies(c.queue_policy) if not 1 <= n <= c.priority_levels]
    ),
    "--shed can estimate a request's first token only in mode dynamic with --order "
    f"{', '.join(SHEDDING)}; use one of these, or leave it out": lambda c: (
        c.shed and (c.mode != "dynamic" or c.order not in SHEDDING)
    ),
    "{it} lets later requests be answered first, and --preserve-ordering holds their answers "
    "until those before them are done; leave one of them out": lambda c: (
        c.preserve_ordering and _overtaking(c)
    ),
}
