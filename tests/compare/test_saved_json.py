"""The keys of saved JSON stay: other programs read them, and a sweep repeats them at every rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.results import Distribution
from client.runs import read_json
from tests.programs import output

OF_RATE = """
acceptance accepted_tokens achieved_rate adapter_loads attainment busy_s busy_throughput
cached_fraction cached_tokens client_limited completed draft_tokens errors failed goodput growth
growth_in_flight mean_e2el_ms mean_in_flight mean_normalized_latency_ms mean_num_tokens
mean_queue_time_ms mean_tpot_ms occupancy offered_throughput output_throughput p50_e2el_ms
p50_itl_ms p50_normalized_latency_ms p50_schedule_lag_ms p50_ttft_ms p95_e2el_ms p95_itl_ms
p95_ttft_ms p99_e2el_ms p99_itl_ms p99_schedule_lag_ms p99_ttft_ms preemptions recomputed_tokens
request_throughput requested_rate useful_fraction wall_clock_s
"""
OF_POINT = "arrival client_behind nominal_num_tokens rate saturated"
OF_SUMMARY = """
by_class by_length by_priority by_user cut expected_useful_fraction idle_rows largest_batch
latency_line littles_law live_rows mean_held_time_ms mean_ttft_ms other_length
p50_ttft_from_schedule_ms p99_e2el_from_schedule_ms padding_rows partial recomputed_rows
rejected_rows resent sample total_token_throughput
"""
OF_FILE = """
config definitions occupancy_over_time requests server slowest_row_s total_input_tokens
total_output_tokens variant warm_up
"""
LATENCIES = """
e2el e2el_from_schedule held_time itl normalized_latency queue_time schedule_lag tpot ttft
ttft_from_schedule
"""
OF_GROUP = """
attainment completed failed goodput mean_e2el_ms mean_paused_ms mean_preempted_ms mean_ttft_ms
output_throughput p50_e2el_ms p50_ttft_ms p99_e2el_ms p99_ttft_ms refused
"""
COSTS = "cost_per_million_tokens cost_per_thousand_within"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("more", ["", "--sweep --seconds 0.2 --price 2 --slo-mix 1:a=ttft:99"])
def test_saved_json_has_no_key_without_a_value(more: str, tmp_path: Path) -> None:
    words = f"--modes dynamic --arrival poisson:20 --numsamples 40 --jobs 1 {more}"
    output("simulate", f"{words} --out {tmp_path}")
    summary, file = (read_json(tmp_path / f"{name}.json") for name in ("summary", "dynamic"))
    [headlines] = summary["variants"].values()
    of_rate = {*OF_RATE.split(), *COSTS.split() * bool(more)}
    of_summary = of_rate | {*OF_SUMMARY.split()}
    assert {*headlines} == of_summary | {*("capacity", "goodput_rate") * bool(more)}
    for point in (summary["sweep"] or {"dynamic": []})["dynamic"]:
        assert {*point} == of_rate | {*OF_POINT.split()}
    of_file = {f"{each}_{name}_ms" for name in LATENCIES.split() for each in Distribution._fields}
    assert {*file} == of_summary | of_file | {*OF_FILE.split()}
    [*_, longest] = file["by_length"].values()
    assert {*longest} == {*OF_GROUP.split(), "least_tokens", "most_tokens"}
    for group in file["by_class"].values():
        assert {*group} == {*OF_GROUP.split()}
