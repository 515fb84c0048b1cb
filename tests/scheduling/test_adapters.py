"""Many adapters on few slots: which request waits, which adapter leaves, and what is loaded."""

from __future__ import annotations

import pytest

from generate.auto import build
from generate.fake import FakeGenerator
from scheduling.adapters import Adapters, Rule
from scheduling.errors import GenerationFailed
from scheduling.inference import Inference
from scheduling.policies import Dynamic, Plan, Srpt, Static, View
from scheduling.prefix_cache import block_keys
from server.request import Request
from server.serving import Server
from tests.virtual import Ask, begun, make_scheduler, run

# The worked example of docs/policies.md: two slots, three rows, an iteration per second
EXAMPLE = [
    Ask(0.0, tokens=3, adapter="a"), Ask(0.0, tokens=8, adapter="b"),
    Ask(0.5, tokens=2, adapter="c"), Ask(0.6, tokens=3, adapter="a"),
    Ask(0.7, tokens=3, adapter="a"), Ask(0.8, tokens=2, adapter="b"),
]  # fmt: skip


@pytest.mark.parametrize(("adapters", "batches", "loads"), [
    (Adapters(2), "AB AB AB CB CB DEB DEB DEB F F", "0a0 0b1 3c0 5a0"),
    (Adapters(2, "grouped"), "A A A B B B B B B B B C C DE DE DE F F", "0a0 3b1 11c0 13a1 16b0"),
    (Adapters(2, "skip"), "AB ADB ADB DEB EBF EBF CB CB", "0a0 0b1 6c0"),
    (Adapters(2, "skip", 2.0), "AB ADB ADB DB CB CB EBF EBF E", "0a0 0b1 4c0 6a0"),
    (Adapters(2, "drain"), "AB ABF ABF CB CB DEB DEB DEB", "0a0 0b1 3c0 5a0"),
], ids=["mixed", "grouped", "skip", "skip for 2 s", "drain"])  # fmt: skip
def test_each_rule_serves_the_worked_example(adapters: Adapters, batches: str, loads: str) -> None:
    """loads: time, adapter and slot of each."""
    served = run(Dynamic(), EXAMPLE, adapters=adapters, max_batch_size=3)
    assert " ".join(served.batches) == batches
    loaded = [(now, *load) for now, iteration in served.iterations for load in iteration.loads]
    assert " ".join(f"{now:g}{name}{slot}" for now, slot, name in loaded) == loads


@pytest.mark.parametrize(("rule", "batches"), [("mixed", ["AB", "DC"]), ("skip", ["ADB", "C"])])
def test_a_batch_of_static_has_no_more_adapters_than_slots(rule: Rule, batches: list[str]) -> None:
    asks = [Ask(0.0, adapter=name) for name in "abca"]
    assert run(Static(), asks, adapters=Adapters(2, rule), max_batch_size=4).batches == batches


@pytest.mark.parametrize(("rule", "batches"), [("mixed", "AAAAABC"), ("skip", "AACAAAB")])
def test_a_paused_row_keeps_the_slot_of_its_adapter(rule: Rule, batches: str) -> None:
    """B is shorter than A, which has the only slot; C has A's adapter."""
    asks = [Ask(0.0, tokens=5, adapter="a"), Ask(0.5, adapter="b"), Ask(1.5, adapter="a")]
    served = run(Dynamic(), asks, order=Srpt(), adapters=Adapters(1, rule), max_batch_size=1)
    assert "".join(served.batches) == batches


@pytest.mark.parametrize(("adapters", "names", "rule"), [
    (Adapters(1), ("a", "", "b"), "2 adapters are more than max_loras 1"),
    (Adapters(9, "grouped"), ("a", ""), "2 adapters are more than the one of .* grouped"),
])  # fmt: skip
def test_more_adapters_are_refused(adapters: Adapters, names: tuple[str, ...], rule: str) -> None:
    class Careless(Dynamic):
        def plan(self, view: View) -> Plan:
            return Plan(admit=[(inference, 2) for inference in view.queues[0].by_key.values()])

    asked = [Inference([0], 1, adapter=name) for name in names]
    scheduler = begun(Careless(), *asked, steps=0, adapters=adapters, max_batch_size=3)
    with pytest.raises(ValueError, match=f"plan of .*Careless.* is impossible: {rule}"):
        scheduler.schedule(0.0)


def test_an_adapter_stays_in_its_slot_until_another_needs_it_and_is_loaded_for_sure() -> None:
    scheduler = make_scheduler(Dynamic(), adapters=Adapters(2))

    def loads(name: str, fails: bool = False) -> list[tuple[int, str]]:
        scheduler.enqueue([inference := Inference([0], 1, adapter=name)], 0.0)
        iteration, _ = scheduler.schedule(0.0)
        if fails:
            scheduler.fail([inference], GenerationFailed("broken"), 1.0)
        else:
            scheduler.apply(iteration, [7], 1.0)
        return list(iteration.loads)

    assert loads("a", fails=True) == [(0, "a")] == loads("a"), "it may never have been loaded"
    assert loads("b") == [(1, "b")]
    assert loads("a") == loads("") == []
    assert loads("c") == [(1, "c")], "b was used before a"
    scheduler.forget_adapter("a")
    assert loads("a") == [(0, "a")], "another one may have its name"


def test_prompts_of_different_adapters_share_nothing() -> None:
    asks = [Ask(2.0 * i, prompt=9, content=1, adapter=name) for i, name in enumerate("aba")]
    served = run(Dynamic(), asks, adapters=Adapters(1))
    assert [inference.cached_tokens for inference in served.inferences] == [0, 0, 8]
    settings = {"model": "fake", "prefix_caching": True, "lora_random": "1:1"}
    server = Server(build("dynamic", settings, {}), lambda *_: FakeGenerator())
    requests = [Request([[1] * 16], 1, adapter=name) for name in ("", "lora-0")]
    base, adapted = (server.group(request)[0].prefix for request in requests)
    server.close()
    assert base and adapted and not {*base.keys} & {*adapted.keys}
    salted = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("b", "a")]  # salt, adapter
    assert len({block_keys([1] * 4, 4, *each)[-1] for each in salted}) == len(salted)
