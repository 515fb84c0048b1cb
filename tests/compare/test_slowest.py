"""./compare.sh --slowest N RUN: bars of the slowest requests, whose parts sum to their latency."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from client.runs import load
from compare.slowest import slowest
from tests.programs import output, ran
from tests.servers import ROOT

FEW = "--kv-reservation demand --kv-cache 80blocks"
pytestmark = pytest.mark.usefixtures("undrawn")


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    page = (ROOT / "docs/measuring.md").read_text()
    found = re.search(
        r"```bash\n\./simulate\.sh (.*)\n\./compare\.sh (.*)\n```\n\n```text\n(.*?)```", page, re.S
    )
    assert found
    run = str(tmp_path)
    output("simulate", found[1].replace("runs/few", run))
    shown = output("compare", found[2].replace("runs/few", run))
    assert shown.split("\n\n", 1)[1] == found[3]


def test_parts_sum_to_the_latency_at_the_client_in_every_mode(tmp_path: Path) -> None:
    variants = {
        "nobatch": "nobatch", "static": "static", "windowed": "windowed", "multibin": "multibin",
        "few": f"dynamic {FEW}", "srpt": f"dynamic {FEW} --order srpt", "ahead": "dynamic --ahead",
        "whole": "dynamic --kv-cache 80blocks",
    }  # fmt: skip
    named = " ".join(f"--variant {name}='{words}'" for name, words in variants.items())
    output("simulate", f"{named} --numsamples 60 --arrival poisson:60 --out {tmp_path}")
    run, seen = load(tmp_path), set[str]()
    for name in variants:
        every = [*slowest(run, name, 60)]
        assert len(every) == 60
        for each in every:
            assert sum(each.parts.values()) == pytest.approx(each.latency_s, abs=1e-5)
            seen |= each.parts.keys()
    assert seen >= {"batch", "blocks", "prefill", "decode", "preempted", "recompute", "held"}
    shown = output("compare", f"--slowest 2 {tmp_path}")
    assert max(map(len, shown.splitlines())) <= 80 and shown.count("2 slowest of 60 requests") == 8


def test_requests_of_another_server_have_what_the_client_saw(tmp_path: Path) -> None:
    output("simulate", f"--modes dynamic --numsamples 20 --out {tmp_path}")
    path = tmp_path / "dynamic.json"
    result = json.loads(path.read_text())
    for request in result["requests"]:
        request["timings"] = None
    del result["requests"][0]["text"]
    path.write_text(json.dumps(result))
    shown = output("compare", f"--slowest 1 {tmp_path}")
    assert "1 failed" in shown and "first token" in shown and "beside" not in shown


def test_a_warm_up_is_not_among_them(tmp_path: Path) -> None:
    words = "--modes dynamic --numsamples 40 --arrival poisson:20 --warm-up 20"
    output("simulate", f"{words} --out {tmp_path}")
    shown = output("compare", f"--slowest 2 {tmp_path}")
    assert "2 slowest of 20 requests\n" in shown
    warm = {r["id"] for r in load(tmp_path).results[0]["dynamic"].requests if r.get("warm_up")}
    assert len(warm) == 20
    assert not warm & {each.record["id"] for each in slowest(load(tmp_path), "dynamic", 99)}


def test_a_server_that_ended_before_it_was_asked_has_what_the_client_saw(tmp_path: Path) -> None:
    output("simulate", f"--modes dynamic --numsamples 20 --out {tmp_path}")
    path = tmp_path / "dynamic.json"
    result = json.loads(path.read_text())
    del result["server"], result["config"]
    path.write_text(json.dumps(result))
    assert "1 slowest of 20" in output("compare", f"--slowest 1 {tmp_path}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--slowest 0 {run}", "--slowest needs a number of requests and a folder, and not 0 first"),
        ("--slowest 3 {run} --seed 1", "--slowest starts nothing; leave out --seed"),
        ("--slowest 3 {run}", "was measured before answers had `parts`; measure it again"),
        ("--slowest 3 {run}/none", "holds no run"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: str, sentence: str) -> None:
    done: Any = ran("compare", *words.format(run="results/demo").split())
    assert done.returncode == 2 and sentence in done.stderr
