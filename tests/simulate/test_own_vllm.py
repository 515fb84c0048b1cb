"""./simulate.sh --vllm FILE: a recording's costs, traffic and schedule; and measured, foreseen."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.load import Watch
from client.measure import measure
from client.results import Result
from client.runs import RunError
from client.traces import Request
from generate.auto import build
from scheduling.inference import Inference
from scheduling.records import IterationRecord
from scheduling.scheduler import Scheduler
from simulate.costs import Costs, Line, Work, load
from simulate.loop import PS
from simulate.program import parse
from simulate.server import SimulatedServer
from simulate.vllm.foreseen import OwnServer
from simulate.vllm.pace import PacedServer
from simulate.vllm.recording import opened
from tests.programs import output, ran
from tests.servers import ROOT

RECORDED = "tests/simulate/own_vllm.jsonl.gz"  # a minute of vLLM 0.32 on a CPU
RECORDING = ROOT / RECORDED
MS = PS // 1000
COSTS = Costs(
    "stated",
    {n: Line((8 + 2 * n) * MS, context=MS // 1000) for n in (1, 2, 4, 8)},
    prompts=Line(MS, 0, MS // 10, MS // 10000),
    gap=MS // 2,
)
LIMITS = {
    "model": "fake", "max_batch_size": 8, "token_budget": 64, "max_model_len": 4096,
    "kv_cache": "400blocks", "block_size": 16, "kv_reservation": "demand", "budget_counts": "all",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("undrawn")


class Recorder:
    """Writes the lines of docs/your_vllm.md for a scheduler of ours, as any engine can."""

    def __init__(self, scheduler: Scheduler, lines: list[dict[str, Any]]):
        self._scheduler, self._lines = scheduler, lines
        self._known: set[int] = set()

    def iteration(self, record: IterationRecord) -> None:
        rows = record.iteration.rows
        new = [row.inference for row in rows if row.inference.id not in self._known]
        self._known |= {inference.id for inference in new}
        until = record.started_at + record.seconds
        self._lines.append({
            "at": record.started_at,
            "until": until,
            "new": [self._described(inference) for inference in new],
            "rows": [[r.inference.id, r.start, r.n_tokens, int(r.samples)] for r in rows],
            "finished": {r.inference.id: "length" for r in rows if r.inference.is_over},
        })  # fmt: skip

    def _described(self, i: Inference) -> list[Any]:
        return [i.id, i.arrived_at, len(i.prompt_ids), i.num_tokens, i.priority, ""]

    def answered(self, inference: Inference) -> None: ...


def drawn(n: int, seed: int = 0, rate: float = 3.0) -> list[Request]:
    chance, at, requests = random.Random(seed), 0.0, []
    for i in range(n):
        at += chance.expovariate(rate)
        prompt, tokens = [1] * chance.randint(5, 150), chance.randint(2, 60)
        requests.append(Request(id=i, at=at, prompt_ids=prompt, num_tokens=tokens))
    return requests


def recorded(
    path: Path, requests: Sequence[Request], costs: Costs = COSTS, **changed: Any
) -> tuple[Path, Result]:
    """Serve requests in virtual time; return a recording of it, and what was measured."""
    settings = LIMITS | changed
    lines: list[dict[str, Any]] = []
    server = SimulatedServer(
        "it", build("dynamic", settings, {}), costs, stream=True, jump=False,
        observe=lambda scheduler: Recorder(scheduler, lines),
    )  # fmt: skip
    result, _ = measure(server, requests, {}, math.inf, Watch())
    head = {
        "format": 2, "engine": "Ours 1.0", "model": "any", "hardware": "an abacus",
        "max_num_seqs": settings["max_batch_size"],
        "max_num_batched_tokens": settings["token_budget"], "num_blocks": 400, "block_size": 16,
        "max_model_len": settings["max_model_len"],
    }  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    return path, result


def test_a_recorded_vllm_is_foreseen() -> None:
    """Its schedule exactly; its times within what a noisy machine allows."""
    own = OwnServer.of(RECORDING, None)
    server = SimulatedServer("recorded", own.config, own.costs, stream=True)
    result, _ = measure(server, own.traffic.trace(0), {}, math.inf, Watch())
    facts = own.facts(result)
    assert "plans all 1,882 recorded iterations as vLLM did" in facts["remarks"][1]
    for words, was, now in facts["table"]:
        if words.startswith(("throughput", "latency", "ITL mean", "rows")):
            assert now == pytest.approx(was, rel=0.12), words
    assert own.costs.source["residuals"]["held_out"]["whole_percent"] == pytest.approx(0, abs=8)


def test_costs_and_measures_of_any_engine_that_writes_the_lines(tmp_path: Path) -> None:
    """What was served by known costs has these costs, and is foreseen to the millisecond."""
    path, measured = recorded(tmp_path / "it.jsonl", drawn(300))
    own = OwnServer.of(path, None)
    assert {1, 2, 4} <= own.costs.decode.keys()
    for n in (1, 2, 4):
        assert own.costs.decode[n].iteration == pytest.approx(COSTS.decode[n].iteration, rel=0.01)
    assert own.costs.prompts and COSTS.prompts
    assert own.costs.prompts.prefill == pytest.approx(COSTS.prompts.prefill, rel=0.02)
    assert own.costs.gap == pytest.approx(COSTS.gap, rel=0.02)
    again = own.measured
    server = SimulatedServer("it", own.config, own.costs, stream=True)
    simulated, _ = measure(server, own.traffic.trace(0), {}, math.inf, Watch())
    for key in ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "p99_e2el_ms", "mean_itl_ms"):
        seen = measured.number(key)
        assert again.number(key) == pytest.approx(seen, rel=1e-3), key
        assert simulated.number(key) == pytest.approx(seen, rel=0.05), key
    assert again.occupancy == pytest.approx(measured.occupancy, rel=1e-6)
    assert again.preemptions is None, "the lines do not say; 0 stood there"


def test_a_recording_of_an_overload_is_named_as_that(tmp_path: Path) -> None:
    path, measured = recorded(tmp_path / "it.jsonl", drawn(200, rate=90.0))
    said = OwnServer.of(path, None).facts(measured)["remarks"]
    assert any(each.startswith("While it was recorded, vLLM was overloaded: its ") for each in said)


def test_vllm_may_go_on_recording(tmp_path: Path) -> None:
    """The file was read a second time, with lines of which the first had known nothing."""
    path, measured = recorded(tmp_path / "it.jsonl", drawn(150))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1000]))
    own = OwnServer.of(path, None)
    path.write_text("".join(lines))
    assert "plans all 999 recorded iterations" in own.facts(measured)["remarks"][1]


def test_settings_of_vllm_that_are_not_simulated_are_named(tmp_path: Path) -> None:
    path, measured = recorded(tmp_path / "it.jsonl", drawn(60))
    names = ("enable_chunked_prefill", "scheduler_reserve_full_isl")
    head, *lines = path.read_text().splitlines()
    changed = json.dumps(json.loads(head) | dict.fromkeys(names, False))
    path.write_text("\n".join([changed, *lines]) + "\n")
    said = OwnServer.of(path, None).facts(measured)["remarks"]
    for name in names:
        assert f"vLLM ran with {name} False, which is not simulated." in said


def test_costs_are_of_the_load_also_where_most_of_a_recording_is_quiet(tmp_path: Path) -> None:
    """One request to try vLLM, and a load minutes later, all in the part that was held out."""
    first, *load = drawn(200, rate=7.0)
    later = [each.model_copy(update={"at": 275 + each.at}) for each in load]
    costs = OwnServer.of(recorded(tmp_path / "it.jsonl", [first, *later])[0], None).costs
    for n in (1, 2, 4, 8):
        assert costs.decode[n].iteration == pytest.approx(COSTS.decode[n].iteration, rel=0.03)


def test_stalls_of_the_machine_do_not_move_the_costs(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "it.jsonl", drawn(300))
    head, *steps = path.read_text().splitlines()
    late, chance, lines = 0.0, random.Random(1), [head]
    for step in map(json.loads, steps):
        step["at"] += late
        late += 0.3 * (chance.random() < 0.03)
        step["until"] += late
        lines.append(json.dumps(step))
    path.write_text("\n".join(lines) + "\n")
    costs = OwnServer.of(path, None).costs
    for n in (1, 2, 4):
        assert costs.decode[n].iteration == pytest.approx(COSTS.decode[n].iteration, rel=0.03)


def test_a_replay_has_the_speed_that_the_machine_had(tmp_path: Path) -> None:
    """In the middle of the recording all took half as long again: near saturation a single speed
    was off by far more, and one number was given where a range is known.
    """
    path, _ = recorded(tmp_path / "it.jsonl", drawn(400, rate=11.0))
    head, *steps = path.read_text().splitlines()
    lines = list(map(json.loads, steps))
    first, whole, real, at = lines[0]["at"], lines[-1]["until"], [0.0], [lines[0]["at"]]
    for line in lines:  # the slower machine's clock, at the instants of the other's
        for instant in (line["at"], line["until"]):
            slow = 1.5 if 0.3 < (instant - first) / (whole - first) < 0.6 else 1.0
            real.append(real[-1] + slow * (instant - at[-1]))
            at.append(instant)

    def later(instant: float) -> float:
        return first + float(np.interp(instant, at, real))

    for line in lines:
        line |= {name: later(line[name]) for name in ("at", "until")}
        line["new"] = [[new[0], later(new[1]), *new[2:]] for new in line["new"]]
    path.write_text("\n".join([head, *map(json.dumps, lines)]) + "\n")
    own = OwnServer.of(path, None)
    measured, trace = own.measured, own.traffic.trace(0)
    errors = []
    for server in (
        PacedServer("it", own.config, own.costs, own.pace),
        SimulatedServer("it", own.config, own.costs, stream=True),
    ):
        result, _ = measure(server, trace, {}, math.inf, Watch())
        errors.append([
            abs(result.number(key) / measured.number(key) - 1)
            for key in ("mean_ttft_ms", "mean_e2el_ms", "p99_e2el_ms", "mean_itl_ms")
        ])  # fmt: skip
    assert max(errors[0]) < 0.1 < max(errors[1]), errors
    said = own.facts(measured, [measured, result])["remarks"][0]
    assert said.startswith("The machine's speed moved: parts took ") and "TTFT mean " in said


def test_contexts_of_any_length(tmp_path: Path) -> None:
    requests = [
        each.model_copy(update={"prompt_ids": [1] * 100_000 if i == 40 else each.prompt_ids})
        for i, each in enumerate(drawn(120))
    ]
    path, measured = recorded(
        tmp_path / "it.jsonl", requests, max_model_len=131_072, token_budget=2048,
        kv_cache="9000blocks",
    )  # fmt: skip
    text = path.read_text().replace('"num_blocks": 400', '"num_blocks": 9000')
    path.write_text(text)
    own = OwnServer.of(path, None)
    assert own.config.max_model_len == 131_072
    server = SimulatedServer("it", own.config, own.costs, stream=True)
    simulated, _ = measure(server, own.traffic.trace(0), {}, math.inf, Watch())
    assert simulated.output_throughput == pytest.approx(measured.output_throughput, rel=0.05)


def test_other_seeds_draw_the_recorded_minutes(tmp_path: Path) -> None:
    own = OwnServer.of(recorded(tmp_path / "it.jsonl", drawn(200))[0], None)
    as_recorded, other = own.traffic.trace(0), own.traffic.trace(1)
    lengths = {(len(r.prompt_ids or ()), r.num_tokens) for r in as_recorded}
    assert {(len(r.prompt_ids or ()), r.num_tokens) for r in other} <= lengths
    assert list(other.at) != list(as_recorded.at) and other.at.max() < as_recorded.at.max() * 1.2
    assert np.array_equal(own.traffic.trace(1).at, other.at), "the same for a seed"
    assert own.factor(0) == 1


def test_a_draw_of_minutes_has_a_request_also_where_most_minutes_are_quiet(tmp_path: Path) -> None:
    """vLLM served, had nothing to do for half an hour, and served again: some draws were empty."""
    early = drawn(60)
    late = [each.model_copy(update={"id": 60 + each.id, "at": 2000 + each.at}) for each in early]
    traffic = OwnServer.of(recorded(tmp_path / "it.jsonl", [*early, *late])[0], None).traffic
    assert all(len(traffic.trace(seed)) >= 60 for seed in range(8))


def cached(tmp_path: Path, turns: int = 3) -> Path:
    """A recording with prefix caching: conversations whose later turns repeat the answers too."""
    path, _ = recorded(tmp_path / "it.jsonl", drawn(60))
    head, *lines = path.read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    for step in steps:
        step["hashes"] = {}
        for new in step["new"]:
            number, _, prompt, most, *_ = new
            conversation, turn = divmod(number, turns)
            # blocks of a conversation are numbered; its turns share the first 4 of them
            names = [f"{conversation:04}{k:04}" for k in range((prompt + most) // 16)]
            names = [f"{n}" if k < 4 else f"{turn}{n[1:]}" for k, n in enumerate(names)]
            new[5] = "".join(names[: prompt // 16])
            if more := "".join(names[prompt // 16 :]):
                last = next(s for s in steps if str(number) in s["finished"])
                last.setdefault("hashes", {})[str(number)] = more
    text = json.dumps(json.loads(head) | {"prefix_caching": True})
    path.write_text("\n".join([text, *map(json.dumps, steps)]) + "\n")
    return path


def test_prefixes_are_found_by_recorded_hashes_with_and_without_jumps(tmp_path: Path) -> None:
    """Later turns find what earlier ones computed, prompts and answers, but nothing by chance."""
    own = OwnServer.of(cached(tmp_path), None)
    found = []
    for jump in (True, False):
        server = SimulatedServer("it", own.config, own.costs, stream=True, jump=jump)
        result, _ = measure(server, own.traffic.trace(0), {}, math.inf, Watch())
        found.append(result.server["cached_tokens"])
    assert found[0] == found[1] > 0
    most = sum(min(64, len(i.prompt_ids) - 1) // 16 * 16 for i in own.traffic.served if i.id % 3)
    assert 0.5 * most <= found[0] <= most
    smaller = own.config.model_copy(update={"block_size": 8})
    larger = own.config.model_copy(update={"block_size": 32})
    assert own.can_jump(smaller) and not own.can_jump(larger)


def test_the_command_answers_and_compares(tmp_path: Path) -> None:
    path, costs = recorded(tmp_path / "it.jsonl", drawn(150))[0], tmp_path / "mine.json"
    words = f"--vllm {path} --jobs 1 --repeats 2 --out {tmp_path / 'out'}"
    said = output(
        "simulate",
        f"{words} --save-costs {costs} --variant now= --variant two='--max-batch-size 2'",
    )
    assert "Your server is foreseen within" in said
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## How well your server is foreseen" in report and "| two | × 1.05 |" in report
    assert "two − now" in report and "a recording of Ours 1.0 (any, an abacus" in report
    assert load(costs).decode == OwnServer.of(path, None).costs.decode
    again = output("simulate", f"--costs {costs} --numsamples 40 --out {tmp_path / 'again'}")
    assert "simulated" in again
    alone = output("simulate", f"--vllm {path} --arrival burst --out {tmp_path / 'alone'}")
    assert "recorded: 150 answered" in alone


def bench(path: Path, recording: Path, late_s: float) -> Path:
    """What `vllm bench serve --save-detailed` saves of a recording's requests."""
    served = OwnServer.of(recording, None).traffic.served
    first = [i.token_times[0] - i.arrived_at + late_s for i in served]
    whole = [i.token_times[-1] - i.arrived_at + late_s for i in served]
    columns = {
        "start_times": [i.arrived_at for i in served], "ttfts": first, "latencies": whole,
        "input_lens": [len(i.prompt_ids) for i in served],
        "output_lens": [len(i.tokens) for i in served], "errors": [""] * len(served),
    }  # fmt: skip
    numbers = {
        "endpoint_type": "openai", "request_rate": "inf", "burstiness": 1.0, "model_id": "any",
        "date": "20261127", "completed": len(served), "failed": 0, "duration": 1.0,
        "total_input_tokens": 1, "total_output_tokens": 1, "request_throughput": 1.0,
        "output_throughput": 1.0, "total_token_throughput": 1.0,
    }  # fmt: skip
    path.write_text(json.dumps(columns | numbers))
    return path


def test_a_clients_run_adds_https_share(tmp_path: Path) -> None:
    recording, _ = recorded(tmp_path / "it.jsonl", drawn(100))
    own = OwnServer.of(recording, bench(tmp_path / "bench.json", recording, 0.25))
    assert own.costs.answer == pytest.approx(0.25 * PS, rel=1e-6)
    alone = OwnServer.of(recording, None)
    late = own.measured.number("mean_ttft_ms") - alone.measured.number("mean_ttft_ms")
    assert late == pytest.approx(250, abs=1)
    other, _ = recorded(tmp_path / "other.jsonl", drawn(100, seed=7))
    with pytest.raises(RunError, match=r"100 requests with times .* not those in a row of"):
        OwnServer.of(recording, bench(tmp_path / "bench.json", other, 0.25))


@pytest.mark.parametrize("more", ["before", "after", "both"])
def test_of_equal_requests_their_times_say_which_are_the_clients(more: str, tmp_path: Path) -> None:
    """They were paired with the last ones, and so shifted where another one followed."""
    alike = {"prompt_ids": [1] * 40, "num_tokens": 20}
    equal = [each.model_copy(update=alike) for each in drawn(150, rate=9.0)]
    recording, _ = recorded(tmp_path / "it.jsonl", equal)
    bench(tmp_path / "bench.json", recording, 0.25)
    file = json.loads((tmp_path / "bench.json").read_text())
    of_client = slice(int(more != "after"), -1 if more != "before" else None)
    for name in ("start_times", "ttfts", "latencies", "input_lens", "output_lens", "errors"):
        file[name] = file[name][of_client]
    if more == "both":
        file["ttfts"][7] = None  # one record without it loses no other
    (tmp_path / "bench.json").write_text(json.dumps(file))
    own = OwnServer.of(recording, tmp_path / "bench.json")
    assert own.costs.answer == pytest.approx(0.25 * PS, rel=1e-6)
    assert own.at_client and own.at_client.ttft.mean


def moved(line: str, by: float) -> str:
    step = json.loads(line)
    return json.dumps(step | {name: step[name] + by for name in ("at", "until")})


def urgent(line: str) -> str:
    """Give each request of a line another priority."""
    step = json.loads(line)
    step["new"] = [[*each[:4], each[0], each[5]] for each in step["new"]]
    return json.dumps(step)


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda lines: ["INFO vLLM engine"], "is no recording of vLLM, whose log in text is none"),
    (lambda lines: [lines[0].replace('"format": 2', '"format": 3'), *lines[1:]], "formats 1 and 2"),
    (lambda lines: ['{"format":2,"unknown":["LoRA adapters"],' + lines[0][1:], *lines[1:]],
     "was recorded with LoRA adapters, which is not simulated; record vLLM without"),
    (lambda lines: lines[:1], "has no iterations yet; send vLLM some requests first"),
    (lambda lines: lines[:40], "costs need 300; record vLLM under load for some minutes"),
    (lambda lines: [lines[0], lines[1][:30], *lines[2:]], "line 2 is no iteration ("),
    (lambda lines: [lines[0], *lines[50:]], "is in no earlier line; a recording must have all"),
    (lambda lines: [*lines[:90], lines[80], *lines[90:]], "or the last one: the clock was set"),
    (lambda lines: [*lines, *(moved(line, 1e6) for line in lines[1:])],
     "as in recordings of two processes; give each recording a file of its own"),
    (lambda lines: ['{"policy":"priority",' + lines[0][1:], *map(urgent, lines[1:])],
     "its requests have 66 different priorities, of which 64 can be simulated; record"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_in_a_sentence(
    change: Any, sentence: str, tmp_path: Path
) -> None:
    path, _ = recorded(tmp_path / "it.jsonl", drawn(66))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(change(lines)) + "\n")
    done = ran("simulate", "--vllm", str(path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
    assert sentence in done.stderr and not (tmp_path / "out").exists()


def test_the_order_of_keys_in_the_first_line_is_free(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "it.jsonl", drawn(60))
    head, *lines = path.read_text().splitlines()
    turned = dict(reversed(json.loads(head).items()))
    path.write_text("\n".join([json.dumps(turned), *lines]) + "\n")
    assert len(OwnServer.of(path, None).traffic.served) == 60


def test_a_damaged_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (path := tmp_path / "it.jsonl.gz").write_bytes(RECORDING.read_bytes()[:5000])
    done = ran("simulate", "--vllm", str(path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "cannot be read to its end" in done.stderr


def test_more_rows_than_were_recorded_take_longer_and_the_report_says_so(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "it.jsonl", drawn(150, rate=9.0))
    costs = OwnServer.of(path, None).costs
    times = [costs.of_work(Work(rows, rows, 0, 0, 0)) for rows in (1, 8, 16, 64)]
    assert times == sorted(times) and times[3] > 2 * times[1]
    words = f"--vllm {path} --jobs 1 --repeats 1 --arrival burst --out {tmp_path / 'out'}"
    output("simulate", f"{words} --variant many='--max-batch-size 32'")
    report = (tmp_path / "out" / "report.md").read_text()
    assert "many: more rows than the 8 that were recorded" in report


def test_a_variant_with_other_blocks_keeps_the_memory_and_is_judged_by_recorded_settings() -> None:
    variants = ["--variant", "a=--block-size 64", "--variant", "b=--kv-cache 9blocks"]
    options = parse(["--vllm", str(RECORDING), *variants])
    assert options.config("a").kv_cache == "2046blocks" and options.config("b").block_size == 128
    assert list(options.variants) == ["recorded", "a", "b"] and options.repeats == 8


def test_rows_are_computed_as_vllm_does_unless_an_order_only_pauses_them() -> None:
    variants = [f"--variant={order}=--order {order}" for order in ("sjf", "edf", "srpt")]
    options = parse(["--vllm", str(RECORDING), *variants])
    orders = [options.config(name).row_order for name in ("recorded", "sjf", "edf", "srpt")]
    assert orders == ["joined", "joined", "joined", "turn"]


def test_an_order_is_given_the_lengths_that_it_would_have_there(tmp_path: Path) -> None:
    """The answers ended before max_tokens; with true lengths sjf was foreseen too well."""
    path, _ = recorded(tmp_path / "it.jsonl", drawn(60))
    head, *steps = path.read_text().splitlines()
    lines = list(map(json.loads, steps))
    for line in lines:
        for new in line["new"]:
            new[3] = 500
    path.write_text("\n".join([head, *map(json.dumps, lines)]) + "\n")
    traffic = OwnServer.of(path, None).traffic
    assert {request.prompt_ids.expected_tokens for request in traffic.trace(0)} == {500}  # type: ignore[union-attr]


def test_the_costs_of_seeds_lie_on_both_sides_of_the_fit() -> None:
    own = OwnServer.of(RECORDING, None)
    factors = [own.factor(seed) for seed in range(1, 9)]
    assert math.prod(factors) == pytest.approx(1) and 1.001 < max(factors) < 1.3


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "it.jsonl", drawn(60))
    whole = OwnServer.of(path, None)
    path.write_text(path.read_text()[:-20])
    cut = OwnServer.of(path, None)
    assert cut.recording.is_cut and not whole.recording.is_cut
    assert len(cut.traffic.served) == len(whole.traffic.served)


@pytest.mark.parametrize(("words", "sentence"), [
    ("--with runs/x", "--with and --save-costs belong to --vllm; add it"),
    (f"--vllm {RECORDED} --find --slo ttft:9 --verify 1", "--vllm is of yours; start it as the"),
    (f"--vllm {RECORDED} --save-costs x.txt", "give a name that ends in .json"),
    (f"--vllm {RECORDED} --save-costs /nowhere/x.json", "must be a file in a folder with write"),
    (f"--vllm {RECORDED} --block-size many", "--block-size 'many': input should be a valid int"),
    (f"--vllm {RECORDED} --block-size 0", "--block-size"),
    (f"--vllm {RECORDED} --variant recorded=static", "recorded is the name of the server as it"),
    (f"--vllm {RECORDED} --variant a=--prefix-caching", "nothing is known of what its prompts"),
])  # fmt: skip
def test_flags_that_do_not_go_with_a_recording(words: str, sentence: str, tmp_path: Path) -> None:
    done = ran("simulate", *words.split(), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and sentence in done.stderr, done.stderr


def test_the_first_line_names_what_was_served() -> None:
    with opened(RECORDING) as file:
        assert json.loads(file.readline())["vllm"] == "0.32.0"
