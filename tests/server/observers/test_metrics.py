"""/metrics is what Prometheus can read, and tells the same as /stats and the client."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from flask.testing import FlaskClient
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from client.calls import get, post
from client.load import replay
from client.workloads import Workload
from scheduling.inference import Inference
from scheduling.policies import MODES
from stats import IN_RESULTS
from tests.counts import SOME_MODES, nightly_but
from tests.servers import ROOT, ClientOf, scrape, server, wait_until

KINDS = {
    "counter": "vllm:prompt_tokens_total vllm:generation_tokens_total vllm:request_success_total "
    "batching_flush_total",
    "gauge": "vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc "
    "batching_rows batching_occupancy",
    "histogram": "vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds "
    "vllm:request_time_per_output_token_seconds vllm:e2e_request_latency_seconds "
    "vllm:request_queue_time_seconds vllm:request_prefill_time_seconds "
    "vllm:request_decode_time_seconds vllm:iteration_tokens_total vllm:request_prompt_tokens "
    "vllm:request_generation_tokens batching_request_held_time_seconds",
}


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(text: str) -> dict[str, float]:
    """Every sample by its name, with the labels that make a difference."""
    found = {}
    for family in families(text).values():
        for sample in family.samples:
            labels = map(sample.labels.get, ("finished_reason", "reason", "kind", "le", "position"))
            found["/".join([sample.name, *filter(None, labels)])] = sample.value
    return found


def metrics(client: FlaskClient) -> dict[str, float]:
    return values(client.get("/metrics").get_data(as_text=True))


@pytest.mark.parametrize("mode", SOME_MODES)
def test_every_name_is_there_with_its_kind_labels_and_unit(mode: str, client_of: ClientOf) -> None:
    client = client_of(mode)
    client.post("/inference", json={"prompt": "hi", "num_tokens": 3})
    # as Prometheus 2 asks; the library's answer to it would turn the colons of vLLM's names into
    # underscores
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    response = client.get("/metrics", headers={"Accept": accept})
    assert response.content_type == "text/plain; version=0.0.4; charset=utf-8"
    found = families(response.get_data(as_text=True))
    types = {sample.name: family.type for family in found.values() for sample in family.samples}
    for kind, names in KINDS.items():
        samples = [name + "_bucket" * (kind == "histogram") for name in names.split()]
        assert [types.get(name) for name in samples] == [kind] * len(samples)
    for family in found.values():
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake" and sample.labels["mode"] == mode
    itl = found["vllm:inter_token_latency_seconds"].samples
    buckets = [sample.labels["le"] for sample in itl if sample.name.endswith("_bucket")]
    assert sum(float(le) < 0.01 for le in buckets) >= 8 and buckets[-1] == "+Inf"
    of_prompts = [sample.labels.get("le") for sample in found["vllm:request_prompt_tokens"].samples]
    assert of_prompts[:4] == ["1.0", "2.0", "5.0", "10.0"] and of_prompts[9] == "1000.0"


@pytest.mark.parametrize("mode", nightly_but(["dynamic"], MODES))
def test_over_a_run_metrics_stats_log_and_client_agree(mode: str, tmp_path: Path) -> None:
    requests, log = Workload("uniform:1:40", seed=2).requests(60, "burst"), tmp_path / "log"
    flags = {"model": "fake", "decoder_batch_sizes": "32,20,3", "request_log": str(log)}
    with server(mode, flags) as url:
        replay(url, requests[:5])  # not of the run
        before = values(scrape(url))
        assert get(f"{url}/stats")["completed"] == 5
        post(f"{url}/stats/reset")
        outcomes = replay(url, requests)
        after, stats = values(scrape(url)), get(f"{url}/stats")
    delta = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def mean_ms(name: str) -> float:
        return 1e3 * delta[f"{name}_sum"] / delta[f"{name}_count"]

    done = [outcome for outcome in outcomes if not outcome.error]
    assert len(done) == 60
    completion, prompt = sum(a.completion_tokens for a in done), sum(a.prompt_tokens for a in done)
    assert delta["vllm:generation_tokens_total"] == stats["total_output_tokens"] == completion
    assert delta["vllm:prompt_tokens_total"] == stats["total_input_tokens"] == prompt
    assert delta["vllm:request_success_total/length"] == stats["completed"] == 60
    for name, tokens in ("prompt", prompt), ("generation", completion):
        lengths = [delta[f"vllm:request_{name}_tokens_{part}"] for part in ("sum", "count")]
        assert lengths == [tokens, 60]
    assert delta["vllm:inter_token_latency_seconds_count"] == completion - 60
    assert delta["vllm:inter_token_latency_seconds_bucket/+Inf"] == completion - 60
    # a first token needs no iteration of its own
    assert delta["vllm:iteration_tokens_total_sum"] == completion + prompt - 60
    assert stats["padding_rows"] > 0 and stats["kv_blocks"] == 32 * 64
    for kind in ("live", "idle", "padding"):
        assert delta[f"batching_computed_rows_total/{kind}"] == stats[f"{kind}_rows"]
    for reason, n in stats["batches_formed"].items():
        assert delta[f"batching_flush_total/{reason}"] == n
    for measure in IN_RESULTS:
        if measure.metric:
            expected = stats[f"mean_{measure.name}_ms"]
            assert mean_ms(measure.metric) == pytest.approx(expected, abs=0.002)
    assert [after[name] for name in KINDS["gauge"].split()[:3]] == [0, 0, 0]
    lines = [json.loads(line) for line in log.read_text().splitlines()][5:]
    assert len(lines) == 60 and sum(line["completion_tokens"] for line in lines) == completion
    queue_ms = 1e3 * sum(line["admitted_at"] - line["arrived_at"] for line in lines) / 60
    assert queue_ms == pytest.approx(stats["mean_queue_time_ms"], abs=0.01)
    assert_in_order_of_ends(lines, mode)


FIELDS = (
    "id group leader request_id user adapter priority predicted_tokens mode state finish_reason "
    "error batch_id position prompt_tokens cached_tokens num_tokens completion_tokens preemptions "
    "preempted_s paused_s parts recomputed_tokens draft_tokens accepted_tokens arrived_at "
    "admitted_at token_times answered_at"
)


def assert_in_order_of_ends(lines: list[dict[str, Any]], mode: str) -> None:
    """Check a request log whose requests were all answered."""
    batches: dict[int, list[int]] = {}
    for line in lines:
        assert line.keys() == {*FIELDS.split()}
        ending = line["state"], line["finish_reason"], line["error"]
        assert ending == ("finished", "length", None)
        times = line["token_times"]
        assert line["arrived_at"] <= line["admitted_at"] <= times[0] <= line["answered_at"]
        assert times == sorted(times) and abs(line["arrived_at"] - time.time()) < 600
        assert len(times) == line["completion_tokens"] == line["num_tokens"]
        batches.setdefault(line["batch_id"], []).append(line["position"])
    answered = [line["answered_at"] for line in lines]
    assert answered == sorted(answered)
    if mode in ("static", "windowed"):
        assert list(batches) == sorted(batches), "whole batches, one after another"
        assert all(rows == sorted(rows) for rows in batches.values()), "in the order of their rows"
    last = max(map(max, batches.values()))
    assert last == 0 if mode == "nobatch" else 0 < last < 32


def test_gauges_are_of_this_moment_and_rows_of_the_latest_iteration(client_of: ClientOf) -> None:
    client = client_of("static", max_batch_size=2)
    ask = {"prompt": ["a", "b"], "max_tokens": 5, "seed": 0, "stop": "\n"}
    client.post("/v1/completions", json=ask | {"prompt": "a"})
    rows: Mapping[str, float] = metrics(client)
    assert [rows[f"batching_rows/{kind}"] for kind in ("live", "idle", "padding")] == [1, 0, 0]
    assert rows["batching_occupancy"] == 0.5
    manager = client.application.extensions["engine"].manager
    manager.enqueue(long := [Inference([0] * 16, 1000), Inference([0], 500)])
    waiting = [Inference([0], 5) for _ in range(3)]
    wait_until(lambda: manager.snapshot().running == 2)
    for inference in waiting:
        manager.enqueue([inference])
    now = metrics(client)
    assert now["vllm:num_requests_running"] == 2 and now["vllm:num_requests_waiting"] == 3
    assert now["vllm:kv_cache_usage_perc"] == pytest.approx((64 + 32) / 128)
    manager.cancel([*long, *waiting])
    assert metrics(client)["vllm:num_requests_running"] == 0


def test_draft_tokens_are_counted_alike_by_all_four(client_of: ClientOf, tmp_path: Path) -> None:
    client = client_of(speculate=3, request_log=str(tmp_path / "log"), max_batch_size=1)
    ask = {"prompt": "hi", "num_tokens": 400, "seed": 1}
    timings = client.post("/inference", json=ask).get_json()["timings"]
    stats, found = client.get("/stats").get_json(), metrics(client)
    drafted = timings["draft_tokens"], timings["accepted_tokens"]
    assert drafted[0] > drafted[1] > 0
    assert drafted == (stats["draft_tokens"], stats["accepted_tokens"])
    names = ("num_draft_tokens", "num_accepted_tokens")
    assert drafted == tuple(found[f"vllm:spec_decode_{name}_total"] for name in names)
    at = [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total/{i}"] for i in range(3)]
    assert sum(at) == drafted[1] and at == sorted(at, reverse=True)
    rows = found["vllm:spec_decode_num_drafts_total"]
    assert at[0] <= rows <= 400 - drafted[1] - 1 and drafted[0] <= 3 * rows
    assert stats["live_rows"] == 400 and stats["rejected_rows"] == drafted[0] - drafted[1]
    wait_until(lambda: (tmp_path / "log").read_text().endswith("\n"))
    line = json.loads((tmp_path / "log").read_text())
    assert (line["draft_tokens"], line["accepted_tokens"]) == drafted
    assert not any("spec_decode" in name for name in metrics(client_of()))


def test_all_four_count_preemptions_and_cached_tokens(client_of: ClientOf, tmp_path: Path) -> None:
    """On a pool of hardly more than one request."""
    client = client_of(
        max_batch_size=8, max_model_len=400, request_log=str(tmp_path / "log"), prefix_caching=True,
        kv_reservation="demand", kv_cache="25blocks", order="srpt",
    )  # fmt: skip
    prompts = [[*[97 + i % 3] * 48, *range(97 + i, 117 + i)] for i in range(24)]
    body = {"prompt_ids": prompts, "num_tokens": 100, "seed": 1}
    timings = client.post("/inference", json=body).get_json()["timings"]
    stats, found = client.get("/stats").get_json(), metrics(client)
    wait_until(lambda: (tmp_path / "log").read_text().count("\n") == 24)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    names = ("prompt_tokens", "cached_tokens", "preemptions", "recomputed_tokens")
    logged = [sum(line[name] for line in lines) for name in names]
    assert logged == [stats[name] for name in ("total_input_tokens", *names[1:])]
    of_metrics = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions",
                  "batching_recomputed_tokens")  # fmt: skip
    assert logged == [found[f"{name}_total"] for name in of_metrics]
    assert logged[0] == 24 * 68 and min(logged) > 3
    assert found["vllm:kv_cache_usage_perc"] == 0, "what is kept is free"
    for each, name in itertools.product((lines, timings), ("preempted_s", "paused_s")):
        total = sum(request[name] for request in each)
        assert 0 < stats[name] == pytest.approx(total, abs=1e-4)


# ---- Grafana's board: every query is PromQL, and finds a sample in the /metrics of a server

DEPLOY = ROOT / "docs" / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "batching.json").read_text())
LIMITS = {
    f"${variable['name']}": variable["query"].split(",")
    for variable in BOARD["templating"]["list"]
    if variable["type"] == "custom"
}
ADDED = {"instance": "replica-1:8500", "job": "effective-batching"}  # by Prometheus
PANELS = {panel["title"]: panel for panel in BOARD["panels"] if panel["type"] != "row"}


def queries(expression: str) -> list[str]:
    """A target's, as Grafana would ask: at every limit that may be chosen."""
    query = expression.replace("$__rate_interval", "20s").replace("$replica", ".*")
    (limits,) = [LIMITS[name] for name in LIMITS if name in query] or [["no limit"]]
    return [re.sub(r"\$\w+_limit", limit, query) for limit in limits]


@pytest.fixture
def labels_of(client_of: ClientOf) -> dict[str, list[dict[str, str]]]:
    """Of each name in /metrics the labels of each sample, after a server's first answer."""
    client = client_of()
    client.post("/inference", json={"prompt": "hi", "num_tokens": 3})
    found: dict[str, list[dict[str, str]]] = {}
    for family in families(client.get("/metrics").get_data(as_text=True)).values():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels | ADDED)
    return found


@pytest.mark.parametrize("title", PANELS)
def test_each_query_finds_a_sample(title: str, labels_of: dict[str, list[dict[str, str]]]) -> None:
    for target in PANELS[title]["targets"]:
        for query in queries(target["expr"]):
            assert "$" not in query, "a variable that the board does not have"
            promql.parse(query)
            summed_by = {*re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", query)))}
            selectors = re.findall(r"([\w:]+){(.*?)}", query)
            assert selectors
            for name, matchers in selectors:
                wanted = dict(re.findall(r'(\w+)="(.*?)"', matchers)).items()
                samples = [labels for labels in labels_of[name] if wanted <= labels.items()]
                assert samples, f"no sample is a {name}{{{matchers}}}"
                assert summed_by <= samples[0].keys(), query
                shown = {*re.findall(r"{{(\w+)}}", target["legendFormat"])}
                assert shown <= (summed_by or samples[0].keys()), target["legendFormat"]


def test_grafana_finds_the_board_and_its_source() -> None:
    services = yaml.safe_load((DEPLOY / "monitoring.yaml").read_text())["services"]
    grafana = services["grafana"]
    mounted = {target: DEPLOY / source for source, target, _ in split(grafana["volumes"])}
    provisioned = "/etc/grafana/provisioning"
    boards = yaml.safe_load(mounted[f"{provisioned}/dashboards/boards.yml"].read_text())
    sources = yaml.safe_load(mounted[f"{provisioned}/datasources/prometheus.yml"].read_text())
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads(mounted[home].read_text()) == BOARD
    assert [each["options"]["path"] for each in boards["providers"]] == [str(Path(home).parent)]
    ((uid, url),) = [(each["uid"], each["url"]) for each in sources["datasources"]]
    users = [*BOARD["panels"], *BOARD["templating"]["list"]]
    assert {each["datasource"]["uid"] for each in users if "datasource" in each} == {uid}
    ((_, _, port),) = split(services["prometheus"]["ports"])
    assert url == f"http://prometheus:{port}"


def split(lines: list[str]) -> list[list[str]]:
    return [line.split(":") for line in lines]
