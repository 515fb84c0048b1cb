"""Workloads: what is drawn follows its distribution, apart from what else is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
import pytest
from scipy import stats

from client.draws import WorkloadError, arrivals, at_rate, count
from client.trace_file import Context
from client.traces import Request, Trace, load_trace, save_trace
from client.workloads import Workload
from compare.measuring import GivenTraces
from compare.options import parse

GREEDY, MODEST = "greedy,20,uniform:50:200", "modest,2,choice:1,25,100,10-40"


def tokens(lengths: str, n: int = 4000) -> np.ndarray:
    return np.array([request.num_tokens for request in Workload(lengths, seed=2).requests(n)])


def but(requests: Sequence[Request], *fields: str) -> list[Request]:
    """Return the requests without these fields."""
    return [r.model_copy(update=dict.fromkeys(fields)) for r in requests]


# ---- lengths, arrivals and prompts


@pytest.mark.parametrize(("flags", "prompt"), [
    ({"prompts": "ids"}, 64), ({"prompt_lengths": "uniform:1:900"}, 99), ({}, 64),
    ({"prompt_lengths": "uniform:1:900", "prefixes": "2:40:0"}, 99),
])  # fmt: skip
def test_lengths_beyond_the_context_are_cut_and_counted(flags: dict[str, Any], prompt: int) -> None:
    """One such request refused the whole run in virtual time."""
    drawn = [
        Workload("uniform:1:200", **flags, context=context).requests(300, "poisson:2")
        for context in (None, Context(100, lambda text: len(text.split())))
    ]
    lengths = [
        [(len(each.prompt_ids or (each.prompt or "").split()), each.num_tokens) for each in trace]
        for trace in drawn
    ]
    assert [request.at for request in drawn[0]] == [request.at for request in drawn[1]]
    for (words, tokens), (cut_words, cut_tokens) in zip(*lengths):
        assert cut_words == min(words, prompt)
        assert cut_tokens == min(tokens, 100 - cut_words)
    workload = Workload("fixed:99", prompt_lengths="fixed:2", context=Context(100))
    workload.requests(30)
    assert workload.words["cut"] == "30 of 30 completions at the context of 100"


def test_lengths_follow_their_distributions() -> None:
    normal = tokens("normal")
    # clip(|⌈N(100, 100)⌉|, 1, 200): mean 106.9 by quadrature; one in six is at the cap
    assert (normal.min(), normal.max()) == (1, 200) and normal.mean() == pytest.approx(107, abs=4)
    assert (normal == 200).mean() == pytest.approx(0.16, abs=0.02)
    assert set(tokens("choice")) == {1, 25, 100} and set(tokens("choice:7,9")) == {7, 9}
    uniform = tokens("uniform:10:20")
    assert (uniform.min(), uniform.max()) == (10, 20)
    assert uniform.mean() == pytest.approx(15, abs=0.3) and set(tokens("fixed:64")) == {64}
    for spec, distribution, cap in (
        ("exponential:50:100", stats.expon(scale=50), 100),
        ("lognormal:50:1.2:900", stats.lognorm(1.2, scale=50), 900),
    ):
        drawn = tokens(spec)  # rounded up: P(⌈x⌉ <= k) = P(x <= k), until the cap takes the rest
        assert drawn.min() == 1 and drawn.max() == cap
        for k in (1, 20, 50, 99):
            assert (drawn <= k).mean() == pytest.approx(distribution.cdf(k), abs=0.03)


def gaps(arrival: str, n: int = 5001) -> np.ndarray:
    return np.diff(arrivals(arrival, n, seed=1).at)


def follows(gaps: np.ndarray, distribution: Any) -> bool:
    """Kolmogorov and Smirnov's test, which 1 in 1,000 samples of the distribution fail."""
    return bool(stats.kstest(gaps, distribution.cdf).pvalue > 1e-3)


def test_arrivals_follow_their_distributions_and_begin_at_0() -> None:
    poisson = stats.expon(scale=1 / 50)
    assert follows(gaps("poisson:50"), poisson)
    assert follows(gaps("wait:2"), stats.uniform(0, 2))
    for cv in (0.5, 1.0, 2.0):  # a gamma of this coefficient of variation: shape 1 / CV²
        # slow, so that a trace's microseconds are fine enough for the shortest gaps
        assert follows(gaps(f"gamma:0.01:{cv}"), stats.gamma(cv**-2, scale=cv**2 / 0.01))
    assert not follows(gaps("gamma:50:1.2"), poisson), "the test tells them apart"
    assert gaps("constant:50") == pytest.approx(1 / 50, abs=2e-6)
    for spec, users in (("burst", None), ("closed:5", 5)):
        instants, n = arrivals(spec, 3, seed=1)
        assert (instants.tolist(), n) == ([0, 0, 0], users)
    assert arrivals("poisson:5", 2, seed=1).at[0] == 0


def test_the_same_pattern_arrives_at_another_rate() -> None:
    pairs = ("poisson:5", "poisson:10"), ("gamma:5:2", "gamma:10:2"), ("constant:5", "constant:10")
    for slow, fast in pairs:
        assert gaps(slow, 50) == pytest.approx(2 * gaps(fast, 50), abs=4e-6)
        assert at_rate(slow, 10) == fast
    assert at_rate("burst", 3) == at_rate("auto", 3) == "poisson:3"


UNKNOWN_LENGTHS = (
    "normal:1 choice: choice:0 uniform:5 uniform:9:1 fixed:-1 fixed:x zipf exponential:0:9 "
    "exponential:5 exponential:5:1.5 lognormal:50:1 lognormal:50:-1:9 lognormal:nan:1:9 "
    "fixed:9999999999"
)
UNKNOWN_ARRIVALS = (
    "auto poisson poisson:0 poisson:-1 poisson:nan poisson:inf wait:x wait:-1 wait:inf burst:3 "
    "gamma:5 gamma:5:0 gamma:5:1e-200 gamma:5:1e200 constant:0 closed:0 closed:1.5 closed "
    "closed:9999999999"
)


def test_unknown_lengths_and_arrivals_are_refused_with_the_valid_ones() -> None:
    for spec in ("", *split(UNKNOWN_LENGTHS)):
        with pytest.raises(WorkloadError, match=r"are normal, choice.*lognormal:MEDIAN:SIGMA:CAP"):
            Workload(spec)
    for spec in split(UNKNOWN_ARRIVALS):
        with pytest.raises(WorkloadError, match=r"are wait:SECONDS, poisson:RATE.*closed:USERS"):
            arrivals(spec, 3, seed=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_request_is_sent_after_the_end_of_time() -> None:
    """A simulation of such a trace never ended."""
    for arrival in ("wait:1e15", "poisson:1e-12", "constant:1e-320", "gamma:1e-300:1"):
        with pytest.raises(WorkloadError, match=r"would be sent after 1e.09 s; give a higher rate"):
            Workload().requests(30, arrival)
    for options in ({"sessions": "2:1e12"}, {"users": ["a,1e-12,normal", "b,1e-12,normal"]}):
        with pytest.raises(WorkloadError, match="a shorter time of thinking or fewer requests"):
            Workload(**options).requests(30)


def test_prompts_are_counting_words_or_as_many_random_ids() -> None:
    assert count(3) == "one two three" and count(21).endswith("nineteen twenty twenty-one")
    text = Workload(seed=3).requests(2000, "poisson:5")
    words = [len((request.prompt or "").split()) for request in text]
    assert min(words) >= 1 and max(words) <= 64 and np.mean(words) == pytest.approx(11.6, abs=0.6)
    requests = Workload(seed=3, prompts="ids").requests(2000, "poisson:5")
    assert but(requests, "prompt_ids") == but(text, "prompt"), "all else is as with text"
    ids = ids_of(requests)
    assert list(map(len, ids)) == words
    assert set(np.concatenate(ids)) == set(range(256)), "every id that any tokenizer has"
    again, other = (ids_of(Workload(seed=seed, prompts="ids").requests(2000)) for seed in (3, 4))
    assert ids == again != other


def test_a_workload_is_the_same_for_the_same_seed() -> None:
    one, same, other = (Workload(seed=seed).requests(50, "poisson:3") for seed in (1, 1, 2))
    assert one == same != other


def test_prompts_of_stated_lengths_change_nothing_else() -> None:
    given: dict[str, Any] = {"lengths": "uniform:5:90", "seed": 1}
    plain = Workload(**given).requests(200, "poisson:3")
    stated = Workload(**given, prompt_lengths="uniform:300:2000").requests(200, "poisson:3")
    lengths = [len(ids) for ids in ids_of(stated)]
    assert min(lengths) >= 300 and max(lengths) <= 2000 and len({*lengths}) > 100
    assert [(r.at, r.num_tokens) for r in stated] == [(r.at, r.num_tokens) for r in plain]
    longest = Workload(prompt_lengths="fixed:131072").requests(1)
    assert len(ids_of(longest)[0]) == 131_072
    shared = Workload(prompt_lengths="fixed:50", prefixes="1:30:0").requests(2)
    assert [len(ids) for ids in ids_of(shared)] == [80, 80]
    users = ["a,5,fixed:3", "b,5,fixed:4"]
    assert {
        len(ids) for ids in ids_of(Workload(users=users, prompt_lengths="fixed:7").requests(9))
    } == {7}
    wrongs: list[dict[str, Any]] = [{"prompts": "text"}, {"sessions": "2:1"}]
    for wrong in wrongs:
        with pytest.raises(WorkloadError, match="leave out --prompts"):
            Workload(prompt_lengths="fixed:9", **wrong)


# ---- prefixes, conversations, users, and what requests are given


def ids_of(requests: Sequence[Request]) -> list[list[int]]:
    assert all(request.prompt is None and request.prompt_ids for request in requests)
    return [request.prompt_ids or [] for request in requests]


@pytest.mark.parametrize(("zipf", "shares"), [(0, [1 / 3] * 3), (1, [6 / 11, 3 / 11, 2 / 11])])
def test_prompts_share_prefixes_as_often_as_zipfs_law_says(zipf: int, shares: list[float]) -> None:
    alone = Workload(seed=3, prompts="ids").requests(3000, "poisson:5")
    requests = Workload(seed=3, prefixes=f"3:40:{zipf}").requests(3000, "poisson:5")
    assert but(requests, "prompt_ids") == but(alone, "prompt_ids")
    assert [ids[40:] for ids in ids_of(requests)] == ids_of(alone), "only what comes first is new"
    times = Counter(tuple(ids[:40]) for ids in ids_of(requests))
    drawn = [n / 3000 for _, n in times.most_common()]
    assert drawn == pytest.approx(shares, abs=0.03)
    other = Workload(seed=4, prefixes=f"3:40:{zipf}").requests(3000)
    assert times.keys().isdisjoint(tuple(ids[:40]) for ids in ids_of(other)), "of each seed its own"


def test_the_rates_of_a_sweep_share_prefixes_and_nothing_else_of_their_prompts() -> None:
    """They meet one server: with one draw for all rates, a prefix cache had every prompt whole."""
    data = Workload(seed=3, prefixes="2:40:1")
    drawn = (data.requests(200, f"poisson:{rate}", scaled=True) for rate in (5, 6, 5))
    slow, fast, again = map(ids_of, drawn)
    assert slow == again, "every mode at the same rate gets the same prompts"
    assert {tuple(ids[:40]) for ids in slow} == {tuple(ids[:40]) for ids in fast}
    long = {tuple(ids) for ids in slow if len(ids) > 45}
    assert len(long) > 100 and long.isdisjoint(tuple(ids) for ids in fast)


CHAT, BATCH = ("chat", 200.0, 50.0), ("batch", 9000.0, None)


@pytest.mark.parametrize(("options", "fields", "shares"), [
    ({"priorities": ["0.1:1", "0.9:2"]}, ["priority"], {(1,): 0.1, (2,): 0.9}),
    # the default needs no saying
    ({"priorities": ["0.5:1", "0.5:0"]}, ["priority"], {(1,): 0.5, (None,): 0.5}),
    ({"slo_mix": ["0.3:chat=ttft:200,tpot:50", "0.7:batch=ttft:9000"]},
     ["slo_class", "slo_ttft_ms", "slo_tpot_ms"], {CHAT: 0.3, BATCH: 0.7}),
    *(({"adapters": f"3:{name}"}, ["model"], {(f"lora-{i}",): s for i, s in enumerate(shares)})
      for name, shares in (
          ("distinct", [1 / 3] * 3), ("uniform", [1 / 3] * 3), ("identical", [1]),
          ("skewed", [9 / 19, 6 / 19, 4 / 19]))),  # each 1.5 times as often as the next
])  # fmt: skip
def test_what_requests_are_given_is_drawn_in_its_shares_and_changes_nothing_else(
    options: dict[str, Any], fields: list[str], shares: dict[tuple[Any, ...], float]
) -> None:
    requests = Workload(seed=3, **options).requests(3000, "poisson:5")
    times = Counter(tuple(getattr(r, name) for name in fields) for r in requests)
    assert {key: n / 3000 for key, n in times.items()} == pytest.approx(shares, abs=0.03)
    assert but(requests, *fields) == list(Workload(seed=3).requests(3000, "poisson:5"))
    if "distinct" in str(options):
        assert len({request.model for request in requests[:3]}) == 3, "one after the other"
    talks = Workload(sessions="4:1", **options).requests(80, "poisson:5")
    of_talk = [{getattr(r, fields[0]) for r in talks[i : i + 4]} for i in range(0, 80, 4)]
    assert set(map(len, of_talk)) == {1}, "a conversation keeps its own"


def test_conversations_begin_as_the_arrival_says_and_go_on_after_answers() -> None:
    alone = Workload(seed=3).requests(3000)
    requests = Workload(seed=3, sessions="4:0.5").requests(3000, "poisson:5")
    firsts = [request for request in requests if request.after is None]
    opening = Workload(seed=3).requests(750, "poisson:5")
    assert [r.at for r in firsts] == [r.at for r in opening]
    by_id = {request.id: request for request in requests}
    for request in requests:
        if request.after is None:
            assert request.think_s is None and request.prompt == alone[request.id].prompt
        else:
            assert request.at == by_id[request.after].at
            assert request.prompt == f" {alone[request.id].prompt}", "its own words alone"
    assert len({r.after for r in requests}) == 2251, "three follow each first, one after the other"
    assert [r.num_tokens for r in requests] == [r.num_tokens for r in alone]
    think_s = [request.think_s for request in requests if request.think_s is not None]
    assert np.mean(think_s) == pytest.approx(0.5, abs=0.05) == np.std(think_s), "exponential"
    few = Workload(seed=3, sessions="4:0").requests(6, "constant:2")
    assert [r.after for r in few] == [None, 0, 1, 2, None, 4], "the last is cut short"


def test_requests_can_be_sent_at_other_times(tmp_path: Path) -> None:
    """Of a closed loop, and of conversations, but those in no closed loop."""
    closed = Workload(seed=1).requests(20, "closed:3")
    opened = Trace.of(closed).sent_as("poisson:3", seed=1)
    assert opened == Workload(seed=1).requests(20, "poisson:3"), "only the instants are others"
    assert closed[0].users == 3 and "users" not in opened[0].body()
    data = Workload(seed=3, sessions="3:1")
    slow = data.requests(9, "poisson:5")
    assert Trace.of(slow).sent_as("burst", 3) == data.requests(9, "burst") != slow
    with pytest.raises(WorkloadError, match="closed:2 sends a request after every answer"):
        data.requests(9, "closed:2")
    with pytest.raises(WorkloadError, match="closed:2 sends a request after every answer"):
        Trace.of(slow).sent_as("closed:2", 3)


def of(requests: Sequence[Request], user: str) -> list[Request]:
    return [request for request in requests if request.user == user]


def test_each_user_sends_at_a_rate_with_lengths_and_in_seconds_of_its_own() -> None:
    requests = Workload(users=[GREEDY, MODEST], seed=3).requests(None)
    at = [request.at for request in requests]
    assert at == sorted(at) and max(at) < 40, "the trace ends with the last TO"
    assert [request.id for request in requests] == list(range(len(requests)))
    greedy, modest = of(requests, "greedy"), of(requests, "modest")
    assert len(greedy) + len(modest) == len(requests)
    assert len(greedy) == pytest.approx(800, abs=3 * 800**0.5) and greedy[0].at < 1
    assert len(modest) == pytest.approx(60, abs=3 * 60**0.5)
    assert 10 <= modest[0].at < modest[-1].at < 40
    assert {r.num_tokens for r in modest} == {1, 25, 100}, "lengths with commas"
    assert min(r.num_tokens for r in greedy) >= 50 and max(r.num_tokens for r in greedy) <= 200
    gaps = np.diff([request.at for request in greedy])
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.15), "exponential, as Poisson's are"
    same, other = (Workload(users=[GREEDY, MODEST], seed=s).requests(None) for s in (3, 4))
    assert requests == same != other
    # a user's requests do not depend on what others ask
    alone = Workload(users=[GREEDY, "modest,9,normal,10-40"], seed=3).requests(None)
    found, expected = ([(r.at, r.num_tokens) for r in rs] for rs in (of(alone, "greedy"), greedy))
    assert found == expected


def test_users_send_a_number_of_requests_or_come_back() -> None:
    requests = Workload(users=["a,30,fixed:5", "b,10,fixed:7"]).requests(2000)
    assert len(requests) == 2000 and len(of(requests, "a")) == pytest.approx(1500, abs=80)
    assert requests[-1].at == pytest.approx(50, abs=5)
    users = ["greedy,5,fixed:9", "modest,5,fixed:9,0-10", "modest,5,fixed:9,20-30"]
    at = np.array([r.at for r in of(Workload(users=users).requests(None), "modest")])
    assert np.any(at < 10) and not np.any((at > 10) & (at < 20)) and np.any(at > 20)


def test_users_of_a_comparison_send_for_their_seconds_or_300_requests() -> None:
    assert parse(["--users", GREEDY, MODEST]).numsamples is None
    assert parse(["--users", GREEDY, "b,2,normal"]).numsamples == 300
    assert parse(["--users", GREEDY, "b,2,normal", "--numsamples", "7"]).numsamples == 7
    # one who would send nothing is found before any server starts
    options = parse(["--users", GREEDY, "b,0.01,normal", "--numsamples", "20", "--repeats", "2"])
    with pytest.raises(WorkloadError, match=r"user b sends none of the 20 requests of seed \d; "):
        GivenTraces(options)


@pytest.mark.parametrize(("options", "sentence"), [
    ({"prefixes": "4:64"}, "give K:TOKENS:ZIPF"),
    ({"prefixes": "4:64:1", "prompts": "text"}, "leave out --prompts text"),
    ({"sessions": "3"}, "give TURNS:THINK_S"),
    ({"sessions": "3:1", "prompts": "ids"}, "leave out --prompts ids, --prompt-lengths and"),
    ({"users": [GREEDY, GREEDY]}, "--users needs two users or more"),
    ({"users": [GREEDY, "b,2"]}, "unknown user 'b,2'; give NAME,RATE,LENGTHS"),
    ({"users": [GREEDY, "b,2,normal,9-3"]}, "unknown user 'b,2,normal,9-3'"),
    ({"users": [GREEDY, "b|c,2,normal"]}, "unknown user"),
    ({"users": [GREEDY, "b,2,zipf:3"]}, "--users 'b,2,zipf:3': unknown lengths 'zipf:3'"),
    ({"priorities": ["0.1:1", "0.8:2"]}, r"sum to 0.9; make it 1"),
    ({"priorities": ["1"]}, "give SHARE:LEVEL"),
    ({"priorities": ["1:-1"]}, "give SHARE:LEVEL"),
    ({"priorities": ["0.5:1", "0.5:1"]}, "give SHARE:LEVEL"),
    ({"slo_mix": ["0.5:a=ttft:1", "0.4:b=tpot:1"]}, "sum to 0.9; make it 1"),
    ({"slo_mix": ["a=ttft:1"]}, "give SHARE:NAME=ttft:MS,tpot:MS"),
    ({"users": ["NA,2,fixed:4", "b,2,fixed:4"]}, "--users 'NA,2,fixed:4': NA is a missing value"),
    ({"slo_mix": ["1:None=ttft:1"]}, "--slo-mix: None is a missing value to pandas.read_csv; ch"),
    ({"slo_mix": ["1:a=e2el:1"]}, "--slo-mix: 'a=e2el:1' is no class; write NAME=ttft:MS"),
    ({"adapters": "4"}, "unknown adapters '4'; give N:DISTRIBUTION of distinct, uniform"),
])  # fmt: skip
def test_options_that_contradict_others_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        Workload(**options)


@pytest.mark.parametrize("options", [
    {},
    {"prefixes": "2:5:1"},
    {"sessions": "3:0.5"},
    {"priorities": ["0.5:1", "0.5:0"]},
    {"slo_mix": ["0.5:a=ttft:9,tpot:3.5", "0.5:b=tpot:2"]},
    {"adapters": "3:distinct"},
    {"users": ["a,9,fixed:2", "b,9,fixed:3"]},
    {"arrival": "closed:3"},
])  # fmt: skip
def test_every_workload_is_the_same_from_a_file(options: dict[str, Any], tmp_path: Path) -> None:
    arrival = options.pop("arrival", "poisson:3")
    requests = Workload(seed=1, **options).requests(20, arrival)
    save_trace(path := tmp_path / "trace.jsonl", requests)
    assert load_trace(path) == requests
    assert ('"user"' in path.read_text()) == ("users" in options), "some servers refuse the field"
