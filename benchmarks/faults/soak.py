"""Load for half an hour, with cancellations and bad input mixed in, and the server's growth."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import aiohttp
import numpy as np
import psutil

from benchmarks.faults.tools import Fault, Finding, Served, until
from client.calls import get, post
from client.load import Watch, replay
from client.traces import Request
from client.wire import wire
from client.workloads import Workload
from compare.measure import Target, burst_size, measure_capacity
from config import build

LOAD = 0.8  # of the capacity
WARM = 0.2  # of the time, in which everything may grow
MOST_MB = 5.0  # that memory may grow after that
MOST_DESCRIPTORS = 16  # that are no connections
MOST_ROWS = 32  # of its server
OPEN = 288  # requests at once before: a slow minute of the machine should not have more
KINDS = ("plain", "stream", "openai", "group", "cut", "invalid")  # in turn


def fault(minutes: float, result: dict[str, Any]) -> Fault:
    """The soak as a fault; its measurements go to `result`."""
    return Fault(
        f"{minutes:g} minutes at {LOAD:g} of the capacity, "
        f"a sixth each {', '.join(KINDS[:-1])} and {KINDS[-1]}",
        "every row has been at its whole context before; "
        f"after the first {100 * WARM:.0f}% of the time memory grows by {MOST_MB:g} MB at most, "
        "threads not at all; "
        "at the end no row and no block is taken, and /stats has counted what the client has",
        partial(soak, minutes, result),
        {"model": "demo", "request_timeout_s": 120},
    )


def soak(minutes: float, result: dict[str, Any], served: Served, short: bool) -> Iterator[Finding]:
    rate = _rate(served.url)
    # every row at its whole context, since the KV cache takes a page when it is first written; and
    # OPEN requests at once, since the server keeps a thread for each
    lengths = [1000] * MOST_ROWS + [1] * (OPEN - MOST_ROWS)
    filling = [Request(id=i, at=0, prompt="x", num_tokens=n) for i, n in enumerate(lengths)]
    replay(served.url, filling)
    post(f"{served.url}/stats/reset")
    samples, counts = asyncio.run(_load(served, rate, 60 * minutes))
    is_free = until(served.is_free) is not None
    yield f"{'nothing' if is_free else 'something'} is left in rows or blocks", is_free
    stats = get(f"{served.url}/stats")
    result |= {"minutes": minutes, "rate": rate, "samples": samples, "counts": counts}
    result["stats"] = stats
    yield from findings(samples, counts, stats)


def _rate(url: str) -> float:
    """Requests a second at LOAD of the capacity that a burst shows.

    Cut and invalid requests compute next to nothing.
    """
    burst = Workload().requests(burst_size(build("dynamic", {"model": "demo"}, {})), "burst")
    target = Target("dynamic", url, wire("inference"))
    capacity = measure_capacity(target, burst, 600, Watch())["output_throughput"]
    tokens = sum(request.num_tokens for request in burst) / len(burst)
    return LOAD * float(capacity) / (tokens * (len(KINDS) - 2) / len(KINDS))


async def _send(session: aiohttp.ClientSession, kind: str, request: Request) -> str:
    """Send one request of a kind; return its status, or the name of the error."""
    prompt, tokens = request.prompt, request.num_tokens
    route = "/inference"
    body: dict[str, Any] = {"prompt": prompt, "num_tokens": tokens, "temperature": 1.0}
    if kind == "openai":
        route, stop = "/v1/completions", ["\n\n\n"]
        body = {"prompt": prompt, "max_tokens": tokens, "stop": stop, "timeout_s": 60}
    elif kind == "group":
        body |= {"prompt": [prompt] * 2, "num_tokens": max(1, tokens // 2)}
    elif kind == "invalid":
        body["num_tokens"] = -1
    elif kind in ("stream", "cut"):
        body["stream"] = True
    try:
        async with session.post(route, json=body) as response:
            if kind == "cut":
                await response.content.readany()
                response.close()
            else:
                await response.read()
            return str(response.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


async def _load(
    served: Served, rate: float, seconds: float
) -> tuple[list[dict[str, float]], Counter[str]]:
    """Poisson arrivals; samples of the server's process, and {"kind outcome": n}."""
    worker = served.worker
    requests = Workload(seed=1).requests(int(rate * seconds), f"poisson:{rate}")
    counts: Counter[str] = Counter()
    samples: list[dict[str, float]] = []
    start = time.perf_counter()

    def sample() -> None:
        connections = worker.net_connections("tcp")
        samples.append(
            {
                "seconds": time.perf_counter() - start,
                "connections": sum(c.status == psutil.CONN_ESTABLISHED for c in connections),
                "rss_mb": worker.memory_info().rss / 1e6,
                "threads": worker.num_threads(),
                "descriptors": worker.num_fds(),
                "ended": counts.total(),
            }
        )

    async def watch() -> None:
        while True:
            sample()
            await asyncio.sleep(min(10.0, seconds / 10))

    async def send(kind: str, request: Request) -> None:
        counts[f"{kind} {await _send(session, kind, request)}"] += 1

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(served.url, connector=connector, timeout=timeout) as session:
        watching = asyncio.create_task(watch())
        async with asyncio.TaskGroup() as tasks:
            for kind, request in zip(cycle(KINDS), requests):
                await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
                tasks.create_task(send(kind, request))
        watching.cancel()
    sample()
    return samples, counts


def findings(
    samples: Sequence[Mapping[str, float]], counts: Mapping[str, int], stats: Mapping[str, Any]
) -> Iterator[Finding]:
    """Growth of the server, and how its counts agree with its client's."""
    end = samples[-1]["seconds"]
    late = [sample for sample in samples if sample["seconds"] >= WARM * end]
    at, memory = (np.array([sample[name] for sample in late]) for name in ("seconds", "rss_mb"))
    grown = float(np.polyfit(at, memory, 1)[0] * (at[-1] - at[0])) if len(late) > 2 else 0.0

    def more(values: Sequence[float]) -> float:
        """The most in the second half less the most in the first."""
        half = len(values) // 2
        return max(values[half:]) - max(values[: half + 1])

    yield f"{sum(counts.values()):,} requests in {end / 60:.0f} minutes", True
    text = f"from minute {WARM * end / 60:.0f} on memory {grown:+.1f} MB (then {memory[-1]:.0f} MB)"
    yield text, grown <= MOST_MB
    threads = more([sample["threads"] for sample in late])
    yield f"threads {threads:+.0f}", threads <= 0
    # connections, which a client keeps, apart
    descriptors = more([sample["descriptors"] - sample["connections"] for sample in late])
    text = f"descriptors beside connections {descriptors:+.0f}"
    yield text, descriptors <= MOST_DESCRIPTORS
    invalid = counts.get("invalid 400", 0)
    valid = {kind: n for kind, n in counts.items() if not kind.startswith("invalid")}
    # a group is two inferences; a cut one may have had its last token before its client had left
    inferences = sum(n * (1 + kind.startswith("group")) for kind, n in valid.items())
    served = stats["completed"] + stats["cancelled"]
    counted = (served, stats["invalid"]) == (inferences, invalid)
    yield f"/stats and this client {'agree' if counted else 'differ'}", counted
    right = {"invalid 400", *(f"{kind} 200" for kind in KINDS if kind != "invalid")}
    if wrong := {kind: n for kind, n in counts.items() if kind not in right}:
        yield f"unexpected: {wrong}", False
