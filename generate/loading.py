"""The engine that a Config names. Importing this loads no torch."""

from __future__ import annotations

from pathlib import Path

from config.config import Config
from generate.fake import FakeGenerator
from generate.forced import ForcedAcceptance
from generate.ngram import Ngram
from scheduling.inference import Generator


def load_generator(config: Config, path: Path | None, n_vocab: int) -> Generator:
    """Return the generator of a Config, loaded and warm. Raises OutOfMemory.

    `path`: the checkpoint, as `weights.locate` returned it. `n_vocab`: ids that the tokenizer can
    decode. torch is imported here, in the thread that will use it, and not at all for the fake.
    """
    generator: Generator
    if config.model == "fake":
        generator = FakeGenerator(slowdown=config.fake_slowdown, drafter=Ngram())
    else:
        from generate.assembly import assemble

        generator = assemble(config, path, n_vocab)
    if config.forced_rates:
        forced = ForcedAcceptance(generator.generate, config.forced_rates, generator.n_blocks)
        forced.adapters = generator.adapters
        return forced
    return generator
