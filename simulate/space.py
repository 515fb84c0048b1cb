"""What --find tries: combinations of settings, each a server; and the command that serves one."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from client.results import Json
from compare.servers import as_flag
from compare.variants import Variant
from config.config import Config
from config.settings import ConfigError, has_effect, meaningful
from scheduling.policies import MODES, ORDERS
from scheduling.routers import ON_RAY
from simulate.simulation import Simulation
from simulate.trial import Traffic, Trial
from simulate.vllm.given import complete

REPLICAS = "replicas"  # a name in --find beside those of settings
MOST = 1024  # replicas that are tried, where none are named
LADDER = (0.25, 0.5, 1, 2, 4)  # times the value without --find, where no values are named
USUAL = ("max_batch_size", "token_budget")  # what --find tries by itself
SWITCH = {"true": True, "on": True, "false": False, "off": False}
OF_VLLM = {  # settings of vLLM's scheduler, and ours
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "token_budget",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "enable_prefix_caching": "prefix_caching",
    "num_gpu_blocks_override": "kv_cache",
    "scheduling_policy": "order",
}


class Candidate(NamedTuple):
    """A server that is tried. values: what --find changed. variant: its settings as given."""

    name: str
    values: Json
    base: str  # name of the variant that is changed
    variant: Variant
    config: Config
    replicas: int = 1

    def times(self, replicas: int) -> Candidate:
        """Return the same with so many replicas."""
        values = {REPLICAS: replicas, **self.values}
        return self._replace(name=_named(self.base, values), values=values, replicas=replicas)


class Space(NamedTuple):
    """All that --find tries. replicas: their numbers, rising; none: one alone, which is no part of
    the question. left_out: combinations that do not go together. why: the first one's sentence.
    """

    settings: list[Candidate]
    default: Candidate  # without --find
    replicas: list[int]
    left_out: int
    why: str


def trial_of(options: Simulation, config: Config) -> Trial:
    """Return the trial of settings with the question's first seed."""
    assert options.question
    arrival = "" if options.arrival == "auto" else options.arrival
    of_own = options.own, options.replays, options.seed
    traffic = Traffic(options.workload, arrival, options.trace, options.context, *of_own)
    of_trials = options.costs, options.layout, options.stream, traffic, options.question
    return Trial("", config, *of_trials, options.question.seeds[0])


def _named(base: str, values: Json) -> str:
    return " ".join(filter(None, (base, *(f"{name}={value}" for name, value in values.items()))))


def space_of(options: Simulation, words: Sequence[str]) -> Space:
    """Return what these words of --find say of each variant. Raises ConfigError."""
    bases = list(options.variants)
    shown = {base: base if len(bases) > 1 else "" for base in bases}
    config = options.config(first := options.baseline)
    axes = dict(_axis(word, config) for word in words)
    replicas = sorted({*axes.pop(REPLICAS, ())})
    found: dict[str, Candidate] = {}
    refused: list[str] = []
    why: dict[tuple[str, Any], str] = {}  # not
    for base, *values in itertools.product(bases, *axes.values()):
        asked = dict(zip(axes, values))
        try:
            made = _candidate(options, base, asked, shown[base])
        except ConfigError as error:
            refused.append(str(error))
            why |= dict.fromkeys(asked.items(), str(error))
        else:
            found.setdefault(made.config.model_dump_json(), made)
    for (name, value), sentence in why.items():
        if not found or not _is_value(name, value):
            raise ConfigError(f"--find: {sentence}")
    default = Candidate("default", {}, shown[first], options.variants[first], config)
    default = found.get(config.model_dump_json(), default)
    return Space([*found.values()], default, replicas, len(refused), (refused or [""])[0])


def _is_value(name: str, value: Any) -> bool:
    """Return whether a setting may have a value, whatever stands beside it."""
    try:
        return bool(Config(**{"mode": "dynamic", name: value}))
    except ValidationError:
        return False


def _name(word: str) -> str:
    """Return our name of a setting, which may be vLLM's, or a flag."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    return OF_VLLM.get(name, name)


def _axis(word: str, config: Config) -> tuple[str, list[Any]]:
    """Return a setting and its values. Raises ConfigError."""
    given, equals, text = word.partition("=")
    name = _name(word)
    values: list[Any] = list(dict.fromkeys(text.split(",")))
    if name == REPLICAS:
        if not all(value.isdecimal() and int(value) for value in values if equals):
            raise ConfigError(f"--find {word}: replicas are numbers from 1 on, as replicas=1,2,4")
        return name, [int(value) for value in values] if equals else [*range(1, MOST + 1)]
    if name not in Config.model_fields:
        raise ConfigError(
            f"--find {word}: there is no setting {given}; docs/settings.md has all, and replicas "
            "goes as well"
        )
    kind, now = Config.model_fields[name].annotation, getattr(config, name)
    if equals and kind is bool:
        values = [SWITCH.get(value, value) for value in values]
    elif not equals:
        values = [False, True] if kind is bool else list(get_args(kind))
        if name in ("mode", "order"):
            values = list(MODES if name == "mode" else ORDERS)
        elif type(now) is int:
            values = sorted({max(1, round(times * now)) for times in LADDER})
        elif not values or type(None) in values:
            raise ConfigError(f"--find {word}: say which values to try, as in --find {word}=A,B")
    return name, values


def _candidate(options: Simulation, base: str, asked: Json, shown: str) -> Candidate:
    """Return a variant with other settings. Raises ConfigError if they do not go together."""
    variant = options.variants[base]
    mode = asked.get("mode", variant.mode)
    settings = {"order": "fcfs", **options.settings(base), **asked, "mode": mode}
    values = {name: value for name, value in asked.items() if has_effect(name, settings)}
    changed = Variant(mode, {**variant.flags, **values})
    changed.flags.pop("mode", None)
    if options.own:
        head = options.own.recording.head
        complete(base, changed, options.flags, head, options.replays)
    config = replace(options, variants={base: changed}).config(base)
    values = {name: getattr(config, name) for name in values}
    return Candidate(_named(shown, values) or base, values, shown, changed, config)


def command(options: Simulation, candidate: Candidate) -> str:
    """Return the command that serves it: ours, or vLLM's with what it has no flag for."""
    settings, router = settings_of(options, candidate), options.layout.router
    if not (options.own or options.served):
        words = ["./server.sh", candidate.variant.mode]
        words += [word for name, value in settings.items() for word in as_flag(name, value)]
        if candidate.replicas > 1:
            words += ["--replicas", str(candidate.replicas)]
            words += ["--router", router] * (router in ON_RAY)
        return shlex.join(words)
    words, other = ["vllm", "serve", options.model], list[str]()
    if options.served:
        words += as_flag("tensor_parallel_size", options.served.gpus)
        words += as_flag("gpu_memory_utilization", options.memory_utilization)
    if candidate.variant.mode != "dynamic":
        other.append(candidate.variant.mode)
    names = {ours: vllm for vllm, ours in OF_VLLM.items()}
    for name, value in settings.items():
        if name in names and (name != "order" or value in ("fcfs", "priority")):
            value = str(value).removesuffix("blocks") if name == "kv_cache" else value
            words += as_flag(names[name], value)
        else:
            other += [shlex.join(as_flag(name, value))]
    other += [f"{candidate.replicas} of it"] * (candidate.replicas > 1)
    return shlex.join(words) + (f" # and, without a flag: {', '.join(other)}" if other else "")


def settings_of(options: Simulation, candidate: Candidate) -> dict[str, Any]:
    """Return the settings that its server is given, with the engine's of the costs."""
    variant, costs = candidate.variant, options.costs
    given = {k: v for k, v in options.flags.items() if meaningful(k, variant.mode)} | variant.flags
    if options.own or options.served:
        return given
    engine = costs.source.get("config", {"model": candidate.config.model})
    return {k: engine[k] for k in ("model", "weights", "dtype") if k in engine} | given
