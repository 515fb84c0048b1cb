"""The options of simulate.sh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client.results import Json
from compare.options import Options
from config.config import Config
from config.flags import build, from_environment, refuse_unknown_settings
from config.settings import NOT_SIMULATED, ConfigError, flag
from generate.auto import resolve
from simulate.costs import FAKE, Costs
from simulate.fleet import Layout
from simulate.served_model import UTILIZATION, ServedModel
from simulate.trial import Question

if TYPE_CHECKING:
    from simulate.vllm.foreseen import OwnServer

# settings of an engine, which belong to its costs
MODEL = ("model", "weights", "tokenizer", "dtype", "kv_dtype")
PARTS = ("generator", "attention", "linear", "kernels", "padded_prefill")
MACHINE = ("device", "threads", "fake_slowdown")
ENGINE = (*MODEL, *PARTS, *MACHINE)
FAKE_ENGINE = {"model": FAKE.name, "device": "cpu"}  # on every machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Options):
    """Options of simulate.sh."""

    costs: Costs
    layout: Layout
    jobs: int  # processes
    question: Question | None = None  # asked by --find
    find: Sequence[str] = ()  # its words
    verify: int | None = None  # real runs
    own: OwnServer | None = None  # given by --vllm
    replays: bool = False  # the requests that it served
    costs_file: Path | None = None  # given by --save-costs
    recording: str | None = None  # given by --replay
    memory_utilization: float = UTILIZATION  # share of a GPU's memory

    @property
    def served(self) -> ServedModel | None:
        """The model on GPUs that costs of kernels are of."""
        served = self.costs.source.get("served")
        return ServedModel(**served) if served else None

    @property
    def model(self) -> str:
        """The model that the costs are of."""
        return str(self.costs.source.get("model") or super(Simulation, self).model)

    def config(self, name: str) -> Config:
        """Return a variant's settings; the engine's are those of its costs. Raises ConfigError."""
        flags, costs = self.settings(name), self.costs
        measured: Json = costs.source.get("config", FAKE_ENGINE)
        # stated costs follow the slowdown
        engine = [setting for setting in ENGINE if costs.source or setting != "fake_slowdown"]
        for setting in flags:
            if setting in NOT_SIMULATED:
                raise ConfigError(f"{flag(setting)} has no effect in virtual time; leave it out")
            if setting in engine and str(flags[setting]) != str(measured.get(setting)):
                known = (
                    f"are of {self.model}"
                    if self.served and setting == "model"
                    else f"hold for {flag(setting)} {measured[setting]}"
                    if setting in measured
                    else f"do not depend on {flag(setting)}"
                )
                raise ConfigError(
                    f"{flag(setting)} {flags[setting]}: the costs {costs.name} {known}; leave it "
                    f"out, or name other --costs"
                )

        refuse_unknown_settings(f"the file of costs {costs.name}", measured)

        def fill_in(given: Mapping[str, Any]) -> dict[str, Any]:
            own = {name: value for name, value in given.items() if name not in engine}
            whole = {k: v for k, v in measured.items() if k != "mode"}
            if self.own:
                whole |= {k: v for k, v in self.own.settings.items() if k not in engine}
            if self.served:
                whole |= self.served.fill_in(whole | own, self.memory_utilization)
            return whole | own if costs.source else resolve(whole | own)

        mode = self.variants[name].mode
        config = build(mode, flags, from_environment(os.environ), fill_in)
        if "kv_cache" in flags and not config.pool_is_known:
            raise ConfigError(
                f"--kv-cache {config.kv_cache} is a share of a GPU's memory, and none is here; "
                "give a size such as 40GB or 2048blocks"
            )
        if config.speculate and not config.forced_rates:
            raise ConfigError(
                f"--draft {config.draft} looks at texts, and virtual time has none; say how many "
                "draft tokens are accepted, as --draft acceptance:0.7 does"
            )
        apart = self.layout.prefill_replicas  # these plan in turn
        if self.served and "ahead" not in flags and not apart:
            # in virtual time any policy can be planned ahead, so that variants differ in it alone
            config = config.model_copy(update={"ahead": True})
        return config
