"""The servers of compare.sh: those that it starts, and those of --also that run already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from client.addresses import other_target
from client.measure import Measurable, Target, warm_up
from client.progress import Progress
from client.results import Json
from client.wire import IN_WORDS, OpenAI, wire
from compare.deployments import Deployed, names_of
from compare.measuring import CostsChanged, GivenTraces
from compare.options import Options
from compare.servers import ALONE, server


class Started:
    """Servers that are started one after another, each for the time of its measurement."""

    program = "./compare.sh"
    has_texts = True
    alike = 1  # two replicas share this machine, and may complete less than twice what one does

    def __init__(self, options: Options, progress: Progress):
        self._options, self._progress = options, progress
        self.traces = GivenTraces(options)
        self._asked_as: dict[str, Json] = {}

    @property
    def replicas(self) -> int:
        return self._options.deployment.replicas if self._options.deployment else 1

    def prepare(self, progress: Progress) -> None:
        """Nothing: all facts are known."""

    @contextlib.contextmanager
    def target(self, name: str, seed: int = 0) -> Iterator[Measurable]:
        with contextlib.ExitStack() as stack:
            with self._progress.step(f"starting {name}"):
                processes = self._options.client_processes
                target = replace(self._started(name, stack), processes=processes)
                warm_up(target, self.traces.by_ids)
                if isinstance(by := target.wire, OpenAI):
                    self._asked_as[name] = by.about
                    if by.in_words:
                        self._progress.say(f"{name}: {IN_WORDS}")
            try:
                yield target
            finally:
                with self._progress.step(f"stopping {name}"):
                    stack.close()

    alone = target

    def _started(self, name: str, stack: contextlib.ExitStack) -> Target:
        options = self._options
        if url := options.also.get(name):
            return other_target(url, options.asked, name)
        mode, settings = options.variants[name].mode, options.settings(name)
        by, key = wire("inference", stream=options.stream), options.key
        start = options.deployment.start if options.deployment else ALONE
        url = stack.enter_context(server(mode, settings, key, name, start))
        if not options.deployment:
            return Target(name, url, by, key=key)
        return Deployed(name, url, by, key=key, replicas=names_of(url, key))

    def facts(self) -> Json:
        return {"asked_as": self._asked_as}

    def costs_changed(self, name: str, seed: int) -> CostsChanged:
        return {}
