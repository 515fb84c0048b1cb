"""Where an iteration's time goes: timers from outside around parts of scheduler and engine.

Layers are called one by one for it. Where serving computes them in one call
(generate/forward.py), what is told as the rest of the forward pass is mostly not there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from generate.cached import CachedGenerator
from generate.linear import KINDS
from model import GPT2, Linear
from scheduling.scheduler import Scheduler


class Phases:
    """Seconds by part, with those of the parts inside it until `report` takes them apart."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - start
            return result

        return run

    def watch(self, scheduler: Scheduler, generator: CachedGenerator) -> None:
        """Put timers around every part. They stay: what is measured without them comes before."""
        self._replace(scheduler, "schedule", "plan")
        self._replace(scheduler, "apply", "apply")
        self._replace(generator, "logits", "logits")
        model: GPT2 = generator.model
        generator.one_call = None  # the same kernels, a call each, so that each has a time
        self._replace(model, "forward", "forward")
        for module in model.modules():
            if isinstance(module, (Linear, *KINDS.values())):
                self._replace(
                    module, "forward", "LM head" if module is model.lm_head else "linear layers"
                )
        prepare = generator.attention.prepare
        generator.attention.prepare = lambda rows: self.timed("attention", prepare(rows))  # type: ignore[method-assign]
        self._replace(generator, "sample", "sample")

    def _replace(self, owner: Any, attribute: str, name: str) -> None:
        setattr(owner, attribute, self.timed(name, getattr(owner, attribute)))

    def report(self) -> dict[str, float]:
        """Seconds of each part without those inside it; together the time of all iterations."""
        s = self.seconds
        inside = s["linear layers"] + s["attention"] + s["LM head"]
        return {
            "plan": s["plan"],
            "ids to tensors": s["logits"] - s["forward"],
            "linear layers": s["linear layers"],
            "attention": s["attention"],
            "LM head": s["LM head"],
            "rest of the forward pass": s["forward"] - inside,
            "sample": s["sample"],
            "apply": s["apply"],
        }
