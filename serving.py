"""From a Config to a running manager: the policy, the scheduler, and the handler thread that loads the engine. No HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batching import BatchingManager, Scheduler
from config import Config
from scheduling.inference import Generator
from scheduling.policies import Dynamic, NoBatching, Policy, Static, Windowed


def policy_of(config: Config) -> Policy:
    match config.mode:
        case "nobatch":
            return NoBatching()
        case "static":
            return Static(config.compact_batches)
        case "windowed":
            delay_s = config.max_batch_delay_ms / 1e3
            return Windowed(delay_s, config.effective_target, config.batch_size_limit, config.compact_batches)
        case "dynamic":
            return Dynamic()


def create_scheduler(config: Config) -> Scheduler:
    return Scheduler(
        policy_of(config),
        max_batch_size=config.max_batch_size,
        token_budget=config.token_budget,
        n_blocks=config.n_blocks,
        block_size=config.block_size,
        max_in_flight=config.max_in_flight,
        decoder_batch_sizes=config.decoder_batch_sizes,
    )


def create_manager(config: Config, load: Callable[[], Generator], **extra: Any) -> BatchingManager:
    """Start the handler thread; `load` runs in it. `extra` goes to BatchingManager."""
    return BatchingManager(create_scheduler(config), load, loop_interval_s=config.loop_interval_ms / 1e3, **extra)
