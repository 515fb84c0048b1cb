"""Every query of Grafana's board is PromQL, and finds a sample in the /metrics of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
Served = dict[str, list[dict[str, str]]]  # of each name: the labels of each sample


def queries(panel: dict[str, Any]) -> list[tuple[str, str]]:
    """A panel's, each with its legend: as Grafana would ask, at every limit that may be chosen."""
    result = []
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", "20s").replace("$replica", ".*")
        (limits,) = [LIMITS[name] for name in LIMITS if name in expression] or [["no limit"]]
        for limit in limits:
            query = re.sub(r"\$\w+_limit", limit, expression)
            assert "$" not in query, "a variable that the board does not have"
            result.append((query, target["legendFormat"]))
    return result


def parts(query: str) -> tuple[list[promql.VectorSelector], set[str]]:
    """Return a query's selectors, and the labels that it sums by. Raises ValueError."""
    selectors: list[promql.VectorSelector] = []
    labels: set[str] = set()

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            selectors.append(node)
        elif isinstance(node, promql.MatrixSelector):
            selectors.append(node.vector_selector)
        elif isinstance(node, promql.AggregateExpr) and node.modifier:
            labels.update(node.modifier.labels)

    promql.walk(promql.parse(query), visit)
    return selectors, labels


def selected(selector: promql.VectorSelector, served: Served) -> list[dict[str, str]]:
    """The samples that it finds, by their labels."""

    def fits(sample: dict[str, str], matcher: promql.Matcher) -> bool:
        value = sample.get(matcher.name, "")
        if matcher.op == promql.MatchOp.Re:
            return bool(re.fullmatch(matcher.value, value))
        assert matcher.op == promql.MatchOp.Equal
        return value == matcher.value

    matchers = selector.matchers.matchers
    samples = served.get(selector.name or "", [])
    return [sample for sample in samples if all(fits(sample, each) for each in matchers)]


@pytest.fixture
def served(client_of: Callable[..., FlaskClient]) -> Served:
    """The samples of a server after its first answer."""
    client = client_of()
    client.post("/inference", json={"prompt": "hi", "num_tokens": 3})
    text = client.get("/metrics").get_data(as_text=True)
    samples: Served = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append({**sample.labels, **ADDED})
    return samples


@pytest.mark.parametrize("title", PANELS)
def test_each_query_finds_a_sample(title: str, served: Served) -> None:
    for query, legend in queries(PANELS[title]):
        selectors, labels = parts(query)
        assert selectors
        for selector in selectors:
            samples = selected(selector, served)
            assert samples, f"no sample is a {selector.prettify()}"
            assert labels <= {*samples[0]}, f"{query}: {selector.name} has not all of {labels}"
            shown = {*re.findall(r"{{(\w+)}}", legend)}
            assert shown <= (labels or {*samples[0]}), f"{legend}: the result has {labels} alone"


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
