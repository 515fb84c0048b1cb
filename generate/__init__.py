"""The engines behind one interface, `inference.Generator`: generate(iteration) returns one id per
row that samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from generate.forced import ForcedAcceptance
from scheduling.inference import Generator

if TYPE_CHECKING:
    from config import Config

FEW = 32  # tokens of a pass, up to which a product on a GPU takes as long as reading its weights


class OutOfMemory(Exception):
    """A GPU's memory is too small; the message names the settings to lower."""


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raise OutOfMemory, with a sentence, where the GPU's memory does not hold `what`."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):
            raise
        raise OutOfMemory(
            f"this GPU's memory does not hold {what}; lower --token-budget, --max-batch-size or "
            "--kv-cache, or end what else runs on the GPU"
        ) from None


def load_generator(config: Config, path: Path | None, n_vocab: int) -> Generator:
    """Return the generator of a Config, loaded and warm. Raises OutOfMemory.

    `path`: the checkpoint, as `weights.locate` returned it. `n_vocab`: ids that the tokenizer can
    decode. torch is imported here, in the thread that will use it, and not at all for the fake.
    """
    generator: Generator
    if config.model == "fake":
        from generate.fake import FakeGenerator
        from generate.ngram import Ngram

        generator = FakeGenerator(slowdown=config.fake_slowdown, drafter=Ngram())
    else:
        from generate.loading import load

        generator = load(config, path, n_vocab)
    if config.forced_rates:
        forced = ForcedAcceptance(generator.generate, config.forced_rates, generator.n_blocks)
        forced.adapters = generator.adapters
        return forced
    return generator
