"""Every query of Grafana's board is PromQL, and finds a sample in the /metrics of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from tests.servers import ROOT

DEPLOY = ROOT / "deploy"
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
def labels_of(client_of: Callable[..., FlaskClient]) -> dict[str, list[dict[str, str]]]:
    """Of each name in /metrics the labels of each sample, after a server's first answer."""
    client = client_of()
    client.post("/inference", json={"prompt": "hi", "num_tokens": 3})
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").get_data(as_text=True)):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels | ADDED)
    return found


@pytest.mark.parametrize("title", PANELS)
def test_each_query_is_promql_and_finds_a_sample(
    title: str, labels_of: dict[str, list[dict[str, str]]]
) -> None:
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
