"""What the benchmarks share: an engine without HTTP, settings, and the record of a result."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from client.calls import ServerError
from client.machine import stamp
from config import (
    ONLY_OVER_HTTP,
    Config,
    ConfigError,
    Parser,
    add_settings,
    build,
    from_environment,
    has_effect,
    meaningful,
    refuse_unknown,
)
from generate import OutOfMemory, load_generator
from generate.cached import CachedGenerator
from kernels import KernelUnavailable
from scheduling.inference import Inference, IterationRecord, Sampling
from scheduling.prefix_cache import block_keys
from serving import Server
from weights import WeightsUnavailable

# settings without effect where prompts are ids and nobody is asked
NO_HTTP = frozenset({*ONLY_OVER_HTTP, "tokenizer"})
PREFIXES = frozenset({"prefix_caching", "order", "prefix_window"})


def asked(config: Config, prompt: list[int], tokens: int, sampling: Sampling) -> Inference:
    """A request as a server of this config queues it."""
    keys = block_keys(prompt, config.block_size) if config.prefix_caching else None
    return Inference(prompt, tokens, sampling, keys=keys)


class Engine:
    """A server without HTTP, with its engine in reach; it observes and keeps every iteration."""

    def __init__(self, config: Config):
        self.iterations: list[IterationRecord] = []
        self._config = config
        start = time.perf_counter()
        server = Server(config, self._load)
        self.scheduler, self.manager = server.scheduler, server.manager
        self.manager.observe(self)
        if not self.manager.wait_until_loaded():
            raise self.manager.failure or RuntimeError("the engine did not load")
        self.load_s = time.perf_counter() - start

    def _load(self, config: Config, path: Path | None, _: int) -> CachedGenerator:
        generator = load_generator(config, path, config.shape.vocab_size)
        assert isinstance(generator, CachedGenerator)
        self.generator = generator
        return generator

    def iteration(self, record: IterationRecord) -> None:
        self.iterations.append(record)

    def answered(self, inference: Inference) -> None:
        pass

    def serve(
        self, requests: Sequence[tuple[list[int], int]], sampling: Sampling
    ) -> tuple[float, list[Inference]]:
        """Serve (prompt ids, completion tokens), all at once; return seconds and inferences."""
        self.iterations.clear()
        inferences = [asked(self._config, ids, tokens, sampling) for ids, tokens in requests]
        start = time.perf_counter()
        self.manager.enqueue(inferences)
        wait_for(inferences)
        return time.perf_counter() - start, inferences


def wait_for(inferences: Sequence[Inference]) -> None:
    for inference in inferences:
        inference.done.wait()
        if inference.error:
            raise inference.error


def configs(*arguments: Any, **defaults: Any) -> tuple[Any, list[Config]]:
    """As `any_configs`; the fake engine and the naive one are refused, too."""
    known, built = any_configs(*arguments, **defaults)
    for config in built:
        if config.model == "fake" or config.generator != "cached":
            raise ConfigError(
                "this benchmark measures the engine: leave out --model fake and --generator naive"
            )
    return known, built


def any_configs(
    parser: Parser,
    argv: Sequence[str],
    modes: Callable[[Any], Sequence[str]],
    unused: Collection[str],
    **defaults: Any,
) -> tuple[Any, list[Config]]:
    """Parse a benchmark's command line: its own options, and a Config for each mode.

    `unused`: settings that have no effect here, which are not offered. `defaults`: settings where
    nothing is said, as functions of the parsed options. Raises ConfigError.
    """
    add_settings(parser, unused)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    flags = {name: value for name, value in vars(known).items() if name in Config.model_fields}
    values = {name: str(value(known)) for name, value in defaults.items()} | from_environment(
        os.environ
    )
    values = {name: value for name, value in values.items() if name not in unused}
    if "tokenizer" in unused:
        values["tokenizer"] = "bytes"  # which fits every vocabulary
    asked = list(modes(known))
    # `build` refuses them
    nowhere = {name for name in flags if not any(meaningful(name, mode) for mode in asked)}
    return known, [
        build(
            mode,
            {
                name: value
                for name, value in flags.items()
                if name in nowhere or meaningful(name, mode)
            },
            values,
        )
        for mode in asked
    ]


def record(built: Sequence[Config], unused: Collection[str]) -> dict[str, Any]:
    """A benchmark's last line besides its numbers; of the settings those that had an effect."""
    config = built[0]
    name = Path(config.model).name  # where the folder lay on this machine means nothing elsewhere
    settings = [one.model_dump() for one in built]
    used = {
        key for key in Config.model_fields if any(has_effect(key, each) for each in settings)
    } - {*unused}
    command = shlex.join(["python", "-m", *sys.orig_argv[2:]])
    return {
        "config": config.model_dump(include=used) | {"model": name},
        "command": command.replace(config.model, name),
    } | stamp()


def run(main: Callable[[], None]) -> None:
    """Call a benchmark's main; what the user can mend ends with a sentence and exit 2."""
    try:
        main()
    except (
        ConfigError,
        KernelUnavailable,
        OutOfMemory,
        ServerError,
        WeightsUnavailable,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
