"""A scheduler of a server's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduling.adapters import Adapters
from scheduling.admission import UserLimits
from scheduling.policies import MODES, ORDERS, Limits, chosen
from scheduling.scheduler import Scheduler


def build_scheduler(settings: Any, kind: Callable[..., Scheduler] = Scheduler) -> Scheduler:
    """Return the scheduler of a server's settings, which are attributes; a Config has them.

    `kind` takes what Scheduler takes.
    """
    adapters = None
    if settings.lora_slots:
        adapters = Adapters(settings.lora_slots, settings.lora_policy, settings.max_wait_s)
    return kind(
        chosen(MODES, settings.mode, settings),
        chosen(ORDERS, settings.order, settings),
        limits=Limits(settings.max_batch_size, settings.token_budget, settings.block_size),
        n_blocks=settings.n_blocks,
        max_in_flight=settings.max_in_flight,
        decoder_batch_sizes=settings.decoder_batch_sizes,
        padded=settings.padded_prefill if settings.generator == "padded" else "",
        length_predictor=settings.length_predictor,
        user_limits=UserLimits(settings.user_requests_per_minute, settings.user_tokens_per_minute),
        adapters=adapters,
        slo_classes=settings.slo_classes,
        shed=settings.shed,
        speculate=settings.speculate,
        preserve_ordering=settings.preserve_ordering,
    )
