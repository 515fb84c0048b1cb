"""A scheduler of a server's settings, with the features that they need; and the inferences of a
request. The server, the simulator and replays have both from here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from scheduling.adapters import Adapters
from scheduling.admission import QueuePolicies, UserLimits
from scheduling.extensions import Extension, ResponseOrder
from scheduling.inference import CachedPrefix, Inference
from scheduling.policies import MODES, ORDERS, VICTIMS, Limits, Order, Policy, chosen
from scheduling.policies.lengths import LengthPrediction, predictor
from scheduling.prefix_cache import PrefixCache, block_keys
from scheduling.sampling import Sampling
from scheduling.scheduler import Scheduler
from scheduling.shedding import Shedding, SloClasses
from scheduling.speculation import Speculation


def build_scheduler(settings: Any, kind: Callable[..., Scheduler] = Scheduler) -> Scheduler:
    """Return the scheduler of a server's settings, which are attributes; a Config has them.

    `kind` takes what Scheduler takes.
    """
    policy = chosen(MODES, settings.mode, settings)
    order = chosen(ORDERS, settings.order, settings)
    victim = chosen(VICTIMS, settings.victim, settings)
    pool = PrefixCache(settings.n_blocks, settings.block_size)
    limits = Limits(
        settings.max_batch_size,
        settings.token_budget,
        settings.block_size,
        settings.max_in_flight,
        sorted(settings.decoder_batch_sizes),
        settings.padded_prefill if settings.generator == "padded" else "",
    )
    per_minute = settings.user_requests_per_minute, settings.user_tokens_per_minute
    user_limits = None if per_minute == (None, None) else UserLimits(*per_minute)
    stated = settings.length_predictor, settings.slo_classes, settings.shed
    slots, drafts = settings.lora_slots, settings.speculate
    return kind(
        policy,
        order,
        limits,
        pool,
        features(policy, order, *stated, settings.preserve_ordering, user_limits),
        victim,
        adapters=Adapters(slots, settings.lora_policy, settings.max_wait_s) if slots else None,
        speculation=Speculation(drafts) if drafts else None,
    )


def features(
    policy: Policy,
    order: Order,
    length_predictor: str = "exact",
    slo_classes: str = "",
    shed: bool = False,
    preserve_ordering: bool = False,
    user_limits: UserLimits | None = None,
) -> list[Extension]:
    """Return the extensions, which the scheduler knows by their hooks alone, in the order of their
    calls: the first that refuses a request is the one whose sentence it gets.
    """
    every = (
        SloClasses(slo_classes),
        QueuePolicies(order),
        LengthPrediction(predictor(length_predictor), policy.n_bins),
        Shedding() if shed else None,
        ResponseOrder() if preserve_ordering else None,
        user_limits,  # last: it counts what nothing else refuses
    )
    return [extension for extension in every if extension is not None]


def build_group(
    settings: Any,
    prompts: Sequence[Any],
    num_tokens: int,
    samplings: Sequence[Sampling] = (Sampling(),),
    *,
    adapter: str = "",
    salt: str = "",
    keys: Sequence[Sequence[bytes]] | None = None,
    **fields: Any,
) -> list[Inference]:
    """Return the inferences of a request, one for each of `samplings`: as many for each of its
    prompts, which are ids.

    With prefix caching requests of the same adapter and salt share KV blocks; without, only the
    completions of a prompt do. keys: of each prompt's blocks, in place of those that settings say.
    fields: others of all the inferences.
    """
    n, group = len(samplings) // len(prompts), list[Inference]()
    for k, ids in enumerate(prompts):
        shared: Sequence[bytes] = ()
        if keys is not None:
            shared = keys[k]
        elif settings.generator != "padded":  # rows of a rectangle share nothing
            if settings.prefix_caching:
                shared = block_keys(ids, settings.block_size, salt, adapter)
            elif n > 1:
                shared = block_keys(ids, settings.block_size, secrets.token_hex())
        leader = None
        for sampling in samplings[k * n : (k + 1) * n]:
            one = Inference(ids, num_tokens, sampling, adapter=adapter, leader=leader, **fields)
            one.prefix = CachedPrefix([*shared]) if shared else None
            leader = leader or one
            group.append(one)
    return group
