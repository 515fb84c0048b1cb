"""Where an iteration's time goes: timers from outside around parts of scheduler and engine.

Layers are called one by one for it. Where serving computes them in one call
(generate/forward.py), most of "rest of the forward pass" is not there.
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
    """Seconds by part, with those of the parts inside it until `report` subtracts them."""

    def __init__(self, scheduler: Scheduler, engine: CachedGenerator) -> None:
        """Put timers around every part. They stay: measure without them before."""
        self.seconds: dict[str, float] = defaultdict(float)
        model: GPT2 = engine.model
        engine.one_call = None  # the same kernels, a call each, so that each has a time
        self._replace(scheduler, "schedule", "plan")
        self._replace(scheduler, "apply", "apply")
        self._replace(engine, "logits", "logits")
        self._replace(engine, "sample", "sample")
        self._replace(model, "forward", "forward")
        for module in model.modules():
            if isinstance(module, (Linear, *KINDS.values())):
                part = "LM head" if module is model.lm_head else "linear layers"
                self._replace(module, "forward", part)
        prepare = engine.attention.prepare
        engine.attention.prepare = lambda rows: self._timed("attention", prepare(rows))  # type: ignore[method-assign]

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - start
            return result

        return run

    def _replace(self, owner: Any, attribute: str, name: str) -> None:
        setattr(owner, attribute, self._timed(name, getattr(owner, attribute)))

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
