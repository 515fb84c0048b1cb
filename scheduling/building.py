"""A scheduler of a server's settings, with the features that they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduling.adapters import Adapters
from scheduling.admission import QueuePolicies, UserLimits
from scheduling.extensions import Extension, ResponseOrder
from scheduling.history import History
from scheduling.ledger import Ledger
from scheduling.policies import MODES, ORDERS, VICTIMS, Limits, Order, Policy, Victim, chosen
from scheduling.policies.lengths import LengthPrediction, predictor
from scheduling.policies.victims import NEWEST
from scheduling.prefix_cache import PrefixCache
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
    adapters = None
    if settings.lora_slots:
        adapters = Adapters(settings.lora_slots, settings.lora_policy, settings.max_wait_s)
    per_minute = settings.user_requests_per_minute, settings.user_tokens_per_minute
    attached = features(
        policy,
        order,
        limits,
        pool,
        victim=victim,
        length_predictor=settings.length_predictor,
        user_limits=None if per_minute == (None, None) else UserLimits(*per_minute),
        adapters=adapters,
        slo_classes=settings.slo_classes,
        shed=settings.shed,
        speculate=settings.speculate,
        preserve_ordering=settings.preserve_ordering,
    )
    return kind(policy, order, limits, pool, attached, victim)


def features(
    policy: Policy,
    order: Order,
    limits: Limits,
    pool: PrefixCache,
    *,
    victim: Victim = NEWEST,
    length_predictor: str = "exact",
    user_limits: UserLimits | None = None,
    adapters: Adapters | None = None,
    slo_classes: str = "",
    shed: bool = False,
    speculate: int = 0,
    preserve_ordering: bool = False,
) -> list[Extension]:
    """Return the extensions that rules and settings need, in the order of their calls:
    the first that refuses a request is the one whose sentence it gets.
    """
    remembered = [kind for rule in (policy, order, victim) for kind in rule.remembers]
    memories = {kind: kind() for kind in [*remembered, *[History] * shed]}
    every = (
        SloClasses(slo_classes),
        QueuePolicies(order),
        LengthPrediction(predictor(length_predictor), policy.n_bins),
        Ledger(order.weights) if order.by_user else None,
        *memories.values(),
        Shedding(order, limits, pool, memories[History]) if shed else None,
        ResponseOrder() if preserve_ordering else None,
        Speculation(speculate) if speculate else None,
        adapters,
        user_limits,  # last: it counts what nothing else refuses
    )
    return [extension for extension in every if extension is not None]
