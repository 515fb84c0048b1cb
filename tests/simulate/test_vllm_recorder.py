"""simulate/vllm/vllm_recorder.py, on a scheduler that has what vLLM's has of it."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simulate.vllm.recording import read

BLOCK = 4
pytestmark = [  # the file is open for as long as vLLM runs
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class FakeScheduler:
    """Computes each request whole, then a token each, as many as it wants."""

    def __init__(self, **changed: Any):
        parallel = SimpleNamespace(
            data_parallel_size=1, data_parallel_index=0, pipeline_parallel_size=1
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, compilation_config=SimpleNamespace(),
            model_config=SimpleNamespace(
                model="models/tiny/", dtype="torch.bfloat16", is_multimodal_model=False
            ),
            speculative_config=None, lora_config=None, kv_transfer_config=None,
        )  # fmt: skip
        vars(self.vllm_config).update(**changed)
        self.scheduler_config = SimpleNamespace(policy="fcfs", max_num_seqs=8, watermark=0.0)
        self.cache_config = SimpleNamespace(enable_prefix_caching=True)
        self.max_num_scheduled_tokens, self.max_model_len, self.block_size = 64, 128, BLOCK
        pool = SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 8)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.gave_up: list[str] = []

    def add_request(self, request: Any) -> None:
        self.waiting.append(request)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def schedule(self) -> Any:
        self.running += self.waiting
        self.waiting = []
        self.running = [each for each in self.running if each.request_id not in self.gave_up]
        tokens = {}
        for each in self.running:
            n = tokens[each.request_id] = max(1, each.num_prompt_tokens - each.num_computed_tokens)
            each.num_computed_tokens += n
        gave_up, self.gave_up = self.gave_up, []
        return SimpleNamespace(
            num_scheduled_tokens=tokens, preempted_req_ids=None, finished_req_ids=gave_up
        )

    def update_from_output(self, output: Any) -> Any:
        answers = []
        for each in [r for r in self.running if r.request_id in output.num_scheduled_tokens]:
            each.made += 1
            full = (each.num_prompt_tokens + each.made) // BLOCK
            each.block_hashes = [bytes([k]) * 32 for k in range(full)]
            if over := each.made == each.max_tokens:
                self.running.remove(each)
            answers.append(SimpleNamespace(
                request_id=each.request_id, new_token_ids=[7], finished=over, finish_reason="length"
            ))  # fmt: skip
        return {0: SimpleNamespace(outputs=answers)}


def request(name: str, prompt: int, tokens: int) -> Any:
    hashes = [bytes([k]) * 32 for k in range(prompt // BLOCK)]
    return SimpleNamespace(
        request_id=name, arrival_time=1000.0, num_prompt_tokens=prompt, max_tokens=tokens,
        priority=0, num_computed_tokens=0, made=0, block_hashes=hashes,
    )  # fmt: skip


def stand_in(monkeypatch: pytest.MonkeyPatch, scheduler: type, is_cpu: bool, **queues: Any) -> None:
    """Put a scheduler in the place of vLLM's, and these classes in the place of its queues."""
    platform = SimpleNamespace(get_device_name=lambda: "an abacus", is_cpu=lambda: is_cpu)
    of_schedulers = "vllm.v1.core.sched"
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"}, "vllm.platforms": {"current_platform": platform},
        "vllm.v1": {}, "vllm.v1.core": {}, of_schedulers: {},
        f"{of_schedulers}.async_scheduler": {"AsyncScheduler": scheduler},
        f"{of_schedulers}.scheduler": {"Scheduler": scheduler},
        f"{of_schedulers}.request_queue": queues,
    }  # fmt: skip
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    stand_in(monkeypatch, FakeScheduler, is_cpu=False)
    monkeypatch.setenv("RECORD_ITERATIONS", str(tmp_path / "vllm.jsonl"))
    monkeypatch.delitem(sys.modules, "simulate.vllm.vllm_recorder", raising=False)
    yield importlib.import_module("simulate.vllm.vllm_recorder")
    sys.modules.pop("simulate.vllm.vllm_recorder", None)


def served(scheduler: Any, *requests: Any) -> None:
    for each in requests:
        scheduler.add_request(each)
    while scheduler.waiting or scheduler.running:
        scheduler.update_from_output(scheduler.schedule())


def test_a_line_for_each_iteration_which_the_reader_reads(recorder: Any, tmp_path: Path) -> None:
    scheduler = recorder.RecordingScheduler()
    served(scheduler, request("a", 6, 4), request("b", 3, 2))
    head, *lines = map(json.loads, (tmp_path / "vllm.jsonl").read_text().splitlines())
    assert (head["engine"], head["model"], head["hardware"]) == ("vLLM 0.32.0", "tiny", "an abacus")
    assert head["num_blocks"] == 10 and head["unknown"] == [] and head["dtype"] == "bfloat16"
    assert [line["rows"] for line in lines[:2]] == [
        [[0, 0, 6, 1], [1, 0, 3, 1]],
        [[0, 6, 1, 1], [1, 3, 1, 1]],
    ]
    assert lines[0]["new"][0][:5] == [0, 1000.0, 6, 4, 0] and lines[0]["blocks_used"] == 2
    assert lines[1]["finished"] == {"1": "length"} and lines[3]["finished"] == {"0": "length"}
    text = (tmp_path / "vllm.jsonl").read_text()
    assert '"a"' not in text, "no names of requests"
    recording = read(tmp_path / "vllm.jsonl")
    assert len(list(recording.run())) == 4
    assert len(recording.requests[0].tokens) == 4
    assert recording.hashes[0] == "AAAAAAAA" + "AQEBAQEB", "of the prompt, then of the answer"


def test_a_client_that_gives_up(recorder: Any, tmp_path: Path) -> None:
    scheduler = recorder.AsyncRecordingScheduler()
    scheduler.add_request(request("a", 6, 9))
    scheduler.add_request(request("b", 6, 2))
    scheduler.update_from_output(scheduler.schedule())
    scheduler.gave_up = ["a"]
    served(scheduler)
    recording = read(tmp_path / "vllm.jsonl")
    assert [ran.step.aborted for ran in recording.run()] == [[], [0]]
    assert [i.state.value for i in recording.requests.values()] == ["cancelled", "finished"]


def test_a_client_that_gives_up_alone_is_named_with_the_next_iteration(
    recorder: Any, tmp_path: Path
) -> None:
    """vLLM names it once, to an iteration without rows."""
    scheduler = recorder.RecordingScheduler()
    scheduler.add_request(request("a", 6, 9))
    scheduler.update_from_output(scheduler.schedule())
    scheduler.gave_up = ["a"]
    scheduler.schedule()
    served(scheduler, request("b", 6, 2))
    recording = read(tmp_path / "vllm.jsonl")
    assert [ran.step.aborted for ran in recording.run()] == [[], [0], []]


def test_a_large_file_gives_way_and_the_next_one_names_what_is_in_flight(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RECORD_MB", "0.002")
    scheduler = recorder.RecordingScheduler()
    served(scheduler, request("a", 6, 40))
    first, second = (read(tmp_path / name) for name in ("vllm.jsonl.1", "vllm.jsonl"))
    assert first.path.stat().st_size < 4000 > second.path.stat().st_size
    assert [asked.number for asked in second.head.in_flight] == [0]
    assert len(list(second.run())) > 1


def test_a_large_file_gives_way_while_iterations_are_planned_ahead(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's default, in which one always is under load: the file grew without bound. What the next
    one says of requests that ended meanwhile, and that it does not name, could not be read.
    """
    monkeypatch.setenv("RECORD_MB", "0.002")
    scheduler = recorder.AsyncRecordingScheduler()
    requests = [request(f"{k}", 6, 1 + k % 7) for k in range(300)]
    ahead = None
    for k, each in enumerate(requests):
        scheduler.add_request(each)
        if k % 4 == 0:
            scheduler.gave_up = [i.request_id for i in scheduler.running[:1]]
        planned = scheduler.schedule()
        if ahead:
            scheduler.update_from_output(ahead)
        ahead = planned
        for path in (tmp_path / "vllm.jsonl", tmp_path / "vllm.jsonl.1"):
            assert not path.exists() or path.stat().st_size < 4000
            if path.exists() and path.read_text().count("\n") > 1:
                list(read(path).run())
    assert (tmp_path / "vllm.jsonl.1").exists()


def test_each_rank_of_a_dense_model_has_a_file(recorder: Any, tmp_path: Path) -> None:
    """vLLM tells each that it is alone: all wrote the same file, and one's traffic was lost."""
    for rank in range(2):
        parallel = SimpleNamespace(
            data_parallel_size=1, data_parallel_index=rank, pipeline_parallel_size=1
        )
        recorder.RecordingScheduler(parallel_config=parallel)
    assert {path.name for path in tmp_path.iterdir()} == {"vllm.jsonl", "vllm.jsonl.rank1"}


def test_another_version_is_refused_and_a_file_that_is_there_makes_way(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm.jsonl").write_text("earlier")
    recorder.RecordingScheduler()
    assert (tmp_path / "vllm.jsonl.1").read_text() == "earlier"
    monkeypatch.setattr(recorder, "__version__", "0.33.0")
    recorder.RecordingScheduler()
    for other in ("0.29.1", "0.34.0"):
        monkeypatch.setattr(recorder, "__version__", other)
        with pytest.raises(RuntimeError, match=f"for vLLM 0.30 to 0.33, and this is {other}"):
            recorder.RecordingScheduler()


def test_a_full_disk_ends_the_recording_and_not_the_server(
    recorder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = recorder.RecordingScheduler()
    scheduler._file.close()
    scheduler._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    served(scheduler, request("a", 6, 4))
    assert "recording stops" in capsys.readouterr().err


def test_features_that_lines_do_not_describe_are_named(recorder: Any, tmp_path: Path) -> None:
    recorder.RecordingScheduler(speculative_config=1, lora_config=1)
    head = json.loads((tmp_path / "vllm.jsonl").read_text())
    assert head["unknown"] == ["speculative decoding", "LoRA adapters"]
