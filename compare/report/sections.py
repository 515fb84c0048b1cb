"""Sections of a report: latency by group, rates and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from client.analysis import GROWTH
from client.quoting import escape, unescape
from client.results import Json, Result, keys
from client.runs import SavedRun
from compare import sweep
from compare.analysis import ATTAINMENT
from compare.deployments import OF_EACH
from compare.report import tables
from compare.report.tables import Case, Results, markdown

# ---- latency by group; the groups are those of client.groups

LATENCIES = keys("mean_e2el_ms p50_e2el_ms p99_e2el_ms")
IN_TERMINAL = keys("output_throughput attainment mean_e2el_ms p99_e2el_ms")
SET_ASIDE = keys("mean_preempted_ms mean_paused_ms")
RATES = keys("output_throughput goodput attainment")
COLUMNS = [*RATES, *LATENCIES, *keys("mean_ttft_ms p50_ttft_ms p99_ttft_ms"), *SET_ASIDE]
KINDS = {"by_length": "length", "by_user": "user", "by_priority": "priority", "by_class": "class"}
QUARTERS = ("shortest quarter", "second quarter", "third quarter", "longest quarter")
LEVELS = {"0": "default level", "1": "level 1 (highest)"}
FEW = 100  # answers, of fewer than which p99 lies between the two slowest
MOST = 8  # users, or levels, which are shown
BY_LENGTH = (
    "The same requests in every variant, grouped by their number of completion tokens: quarters of "
    "the trace, or one group for each length if there are at most four."
)
BY_SEED = " Each seed has quarters of its own; the borders shown are means over seeds."


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one kind. size: tokens, or requests. numbers: measures by variant and seed."""

    name: str
    size: str
    requests: int
    numbers: Results


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a kind that are shown: all, or those with most requests."""

    kind: str
    title: str
    shown: Sequence[RequestGroup]

    def cases(self, results: Results, plain: bool = False) -> list[Case]:
        """A case for each variant and group. plain: for the terminal, without refusals."""
        cases: list[Case] = []
        for variant, seeds in results.items():
            for group in self.shown:
                numbers, sized = group.numbers[variant], self.kind == "by_length"
                name = ": ".join(filter(None, (group.name, group.size if sized else "")))
                text, refused = tables.answered(numbers), sum(each.refused for each in numbers)
                if refused and not plain:
                    text += f" ({refused:,} refused)"
                names = [tables.label(variant, seeds), name if plain else escape(name), text]
                cases.append((names, numbers))
        return cases

    @property
    def columns(self) -> Sequence[str]:
        """Headings of the names of `cases`."""
        return ("variant", self.title, "answered")


def groups_of(results: Results) -> dict[str, Groups]:
    """Return the groups of each kind that the trace has."""
    return {kind: groups for kind in KINDS if (groups := _groups(results, kind)).shown}


def _groups(results: Results, kind: str) -> Groups:
    by_seed = [result.number(kind) for seeds in results.values() for result in seeds]
    every = []
    for name in dict.fromkeys(name for seed in by_seed for name in seed):
        numbers = {
            v: [r.number(kind).get(name, Result()) for r in seeds] for v, seeds in results.items()
        }
        # an interrupted variant has fewer than others
        requests = max(sum(each.ended for each in seeds) for seeds in numbers.values())
        # without control characters, which a terminal would obey
        shown = unescape(escape(name or "no user"))
        size = f"{requests:,} request{'s' * (requests != 1)}"
        if kind == "by_priority":
            shown = LEVELS.get(name, f"level {name}")
        if kind == "by_length":  # where lengths are few, each is a group
            of_few = all(n.least_tokens == n.most_tokens for s in by_seed for n in s.values())
            shown = "" if of_few else QUARTERS[int(name) - 1]
            size = _tokens([seed[name] for seed in by_seed if name in seed])
        every.append(RequestGroup(shown, size, requests, numbers))
    if len(every) <= MOST:
        return Groups(kind, KINDS[kind], every)
    most = sorted(every, key=lambda group: -group.requests)[:MOST]
    return Groups(kind, f"{KINDS[kind]}: the {MOST} of {len(every)} with most requests", most)


def _tokens(numbers: Sequence[Result]) -> str:
    """Return the lengths of a quarter, averaged over seeds, whose traces differ a little."""
    least, most = (round(mean(n.number(f"{k}_tokens") for n in numbers)) for k in ("least", "most"))
    return f"{least}–{most} tokens" if least < most else f"{least} token{'s' * (least > 1)}"


def group_table(groups: Groups, results: Results) -> str:
    """A row for each variant and group; columns without a number are left out."""
    columns = [*LATENCIES, *SET_ASIDE] if groups.kind == "by_length" else COLUMNS
    return markdown(tables.rows_of(groups.columns, columns, groups.cases(results)), left=2)


def terminal_groups(results: Results) -> list[tables.Terminal]:
    """Users, levels and classes, for the terminal, without refusals; none without any."""
    shown = []
    for groups in groups_of(results).values():
        if groups.kind != "by_length":
            cases = groups.cases(results, plain=True)
            rows = tables.rows_of(groups.columns, IN_TERMINAL, cases, short=True)
            shown.append(tables.Terminal(rows, left=2, caption=few(groups) or None))
    return shown


def few(*kinds: Groups) -> str:
    """Return a remark on p99 where a group of these kinds has few answers, else nothing."""
    groups = [group for kind in kinds for group in kind.shown]
    numbers = [seeds for group in groups for seeds in group.numbers.values()]
    if not any(0 < seed.completed < FEW for seeds in numbers for seed in seeds):
        return ""
    each = " a seed" if len(numbers[0]) > 1 else ""
    return f"In a group of fewer than {FEW} requests{each}, p99 lies between the two slowest."


def estimates_by_group(results: Sequence[Result]) -> Json:
    """Return estimates of each group of one variant, by kind and name. results: one a seed."""
    return {
        kind: {
            name: tables.estimates(
                COLUMNS, [each.number(kind).get(name, Result()) for each in results]
            )
            for name in dict.fromkeys(name for each in results for name in each.number(kind))
        }
        for kind in KINDS
    }


def by_group(results: Results, figure: Sequence[str]) -> list[str]:
    """Return the section on short and long requests, users, priorities and classes."""
    groups = groups_of(results).values()
    text = BY_LENGTH + BY_SEED * (len(next(iter(results.values()))) > 1)
    shown = [group_table(each, results) for each in groups]
    return ["## Latency by group", text, *figure, *shown, few(*groups)]


# ---- rates

RATES_TEXT = (
    "A variant's capacity is what it completed while requests were always waiting, at all rates "
    "beyond it: tokens per second over the mean tokens of a request. Its queue begins to grow "
    "between two rates 9% apart: at the second, each second of sending adds over "
    f"{GROWTH:g} s to the wait for the first token, over {100 * GROWTH:g}% of what is sent stays "
    f"in flight, or over {100 * sweep.LOST:g}% of requests fail. Near the capacity "
    "chance decides whether the queue grows, so the capacity need not lie between these rates."
)


def rates(run: SavedRun, figure: Sequence[str]) -> list[str]:
    """Return the section on rates: capacities, and how they are determined; empty without one."""
    outcomes = {}
    for name, seeds in run.points.items():
        finished = all(name in summary["swept"] for summary in run.summaries)
        outcomes[name if finished else f"{name} (partial)"] = [sweep.outcome(s) for s in seeds]
    text = RATES_TEXT
    if limits := limits_of(run):
        text += f" A rate is within the limits when {ATTAINMENT:.0%} of its requests have {limits}."
    table = tables.capacity_table(outcomes, bool(limits))
    return ["## From light load to beyond capacity", text, table, *figure] if outcomes else []


def limits_of(run: SavedRun) -> str:
    limits = [f"{name} ≤ {limit:g} ms" for name, limit in run.first["goodput"].items()]
    limits += ["their own limits"] * bool(run.first["workload"].get("slo_mix"))
    return ", ".join(limits)


# ---- replicas: number and requests of simulated ones over time; measures of real ones

SUMS = (
    "Rows, tokens and KV blocks of a variant are sums over its replicas, and its largest batch is "
    "the largest of any. Its occupancy counts a replica only while it computes. The useful rows "
    "that theory expects are left out, and so is the throughput while requests always wait."
)


Changes = list[tuple[float, int, int]]  # seconds, replicas that take requests, other replicas


def replicas_of(run: SavedRun) -> dict[str, Json]:
    """Return the first seed's simulated replicas, of variants with more than one steady one."""
    return {
        name: replicas
        for name, result in run.results[0].items()
        if (replicas := result.server.get("replicas"))
        and (len(replicas["requests"]) > 1 or len(_changes(replicas)) > 1 or replicas["missed"])
    }


def _changes(replicas: Json) -> Changes:
    """Return the changes of a variant, of several at one instant the last."""
    return list({change[0]: tuple(change) for change in replicas["changes"]}.values())


def changes(run: SavedRun) -> dict[str, Changes]:
    """Return replicas of each variant over time; empty if no number ever changed."""
    by_variant = {name: _changes(each) for name, each in replicas_of(run).items()}
    return by_variant if any(len(replicas) > 1 for replicas in by_variant.values()) else {}


def number_of_replicas(result: Result) -> int:
    """Return the number of replicas: of simulated ones the most at once, of real ones all."""
    server = result.server  # none of one that ended before it was asked
    at_once = [up + others for _, up, others in server.get("replicas", {}).get("changes", ())]
    return len(server.get("by_replica", {})) or max(at_once, default=1)


def simulated_replicas(run: SavedRun, figure: Sequence[str]) -> list[str]:
    """Return the section on simulated replicas; empty for a run with one all the time."""
    rows = [["variant", "replicas", "paid for, replica-seconds", "requests each, least to most"]]
    sentences, labels = [], tables.labels(run)
    for name, replicas in replicas_of(run).items():
        up = [up for _, up, _ in _changes(replicas)]
        requests = replicas["requests"].values()
        served = f"{min(requests, default=0):,} to {max(requests, default=0):,}"
        counts = f"{min(up)} to {max(up)}" if len(up) > 1 else f"{up[0]}"
        rows.append([labels[name], counts, f"{replicas['replica_s']:,.0f}", served])
        sentences += [
            f"In {escape(name)} the failure of replica {number} at {at_s:g} s ended no request: it "
            f"was not up, or nothing was left to do."
            for number, at_s in replicas["missed"]
        ]
    return ["## Replicas", markdown(rows), *sentences, *figure] if rows[1:] else []


def measured_replicas(run: SavedRun) -> list[str]:
    """Return the section on real replicas; empty where servers were alone."""
    labels = tables.labels(run)
    rows = [["variant", "replica", *(key.heading for key in OF_EACH)]]
    for name, result in run.results[0].items():
        for replica, numbers in result.server.get("by_replica", {}).items():
            cells = [tables.cell(key, [numbers[key.name]]) for key in OF_EACH]
            rows.append([labels[name], escape(replica), *cells])
    seed = [] if len(run.results) == 1 else [f"By replica, seed {run.first['seed']}:"]
    return ["## Replicas", SUMS, *seed, markdown(rows)] if rows[1:] else []
