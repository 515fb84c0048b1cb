"""Our orders on vLLM's own scheduler, without a model (lab/benchmarks/requirements-vllm.txt).

In an environment that has vLLM:  python -m pytest -p no:cacheprovider --noconftest -o addopts= \
    lab/tests/studies/test_vllm_order.py
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.studies.vllm_schedule import BLOCK, Limits, vllm_scheduler

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.extra
REQUESTS = 20_000


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("order", ["sjf --aging 5", "hrrn", "fair"])
def test_nothing_grows(
    order: str, caching: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Random requests of which some give up, are preempted, or wait for an adapter's slot."""
    pytest.importorskip("vllm")
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched import scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    monkeypatch.setenv("ORDER", order)
    monkeypatch.setenv("RECORD_MB", "5")
    monkeypatch.setenv("RECORD_ITERATIONS", str(tmp_path / "vllm.jsonl"))
    monkeypatch.syspath_prepend(str(ROOT / "simulate" / "vllm"))
    vllm_order = importlib.import_module("vllm_order")

    monkeypatch.setattr(scheduler, "Scheduler", vllm_order.SyncOrderedScheduler)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256) if caching else None
    built: Any = vllm_scheduler(Limits("few blocks", 8, 64, 40, caching=caching))
    built.lora_config = SimpleNamespace(max_loras=1)
    chance, flying, most = random.Random(1), dict[str, None](), 0
    beginnings = [chance.choices(range(50_000), k=k) for k in (0, 24, 48, 96)]
    for number in range(REQUESTS):
        ids = chance.choice(beginnings) + chance.choices(range(50_000), k=chance.randint(1, 60))
        said = {"user": f"{chance.randrange(REQUESTS)}"}
        params = SamplingParams(max_tokens=chance.randint(1, 40), ignore_eos=True, extra_args=said)
        request = Request(f"{number}", ids, params, None, block_hasher=hasher)
        if kind := number % 3:
            request.lora_request = SimpleNamespace(
                lora_int_id=kind, lora_name=f"{kind}", lora_path="", adapter_id=kind
            )
        built.add_request(request)
        flying[request.request_id] = None
        while len(flying) > 40 or (number == REQUESTS - 1 and flying):
            if chance.random() < 0.1:
                built.finish_requests(chance.choice([*flying]), RequestStatus.FINISHED_ABORTED)
            output = built.schedule()
            tokens = output.num_scheduled_tokens
            sampled = [
                [7] if each.num_computed_tokens >= each.num_tokens else []
                for each in (built.requests[id_] for id_ in tokens)
            ]
            places = {id_: place for place, id_ in enumerate(tokens)}
            built.update_from_output(output, ModelRunnerOutput(list(tokens), places, sampled))
            flying = dict.fromkeys(built.requests)
        most = max(most, len(built.waiting.mirrors))
    built.schedule()
    queue = built.waiting
    assert most < 60 and not queue._failed
    assert not (queue.mirrors or queue.requests or queue.running or len(queue) or built._known)
    assert not queue.ledger or len(queue.ledger._counters) < 10_000
    sys.modules.pop("vllm_order")
