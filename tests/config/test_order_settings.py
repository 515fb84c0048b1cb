"""Settings of who goes first: what has no meaning together is refused in one sentence that names
the fix.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from config import Config, ConfigError, build, parse, resolve
from scheduling.policies import MODES, Mlfq, Priority, chosen
from scheduling.policies.windowed import Windowed
from scheduling.scheduler import build as scheduler_of


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: False)


def refused(line: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(line.split(), environ or {}, dotenv=None)
    return str(caught.value)


EXAMPLE = "1:timeout_ms=500,action=delay,max_size=100,override=yes"
# a command line, and the beginning of what it is answered
REFUSED = """
dynamic --order lifo
    --order 'lifo': input should be 'fcfs', 'priority', 'sjf', 'hrrn'
static --order srpt
    --order srpt pauses rows, and in mode static a batch runs to its end; use mode dynamic, or
static --order mlfq
    --order mlfq pauses rows, and in mode static a batch runs to its end; use mode dynamic, or
dynamic --order prefix
    --order prefix goes by what the prefix cache holds; add --prefix-caching
dynamic --max-wait-s 5
    --max-wait-s has no meaning without --order priority or sjf or hrrn or mlfq; add that, or
dynamic --order fcfs --max-wait-s 5
    --max-wait-s has no meaning without --order priority or sjf or hrrn or mlfq; add that, or
dynamic --order sjf --max-wait-s 0
    --max-wait-s '0': input should be greater than 0
dynamic --aging 2
    --aging has no meaning without --order sjf; add that, or leave
dynamic --prefill-weight 1
    --prefill-weight has no meaning without --order sjf or srpt; add that, or leave it
dynamic --order srpt --prefill-weight -1
    input should be greater than or equal to 0
dynamic --order sjf --aging -1
    --aging '-1': input should be greater than or equal
dynamic --mlfq-levels 3
    --mlfq-levels has no meaning without --order mlfq
dynamic --order sjf --length-predictor constant
    --order sjf tells requests apart by predicted lengths, and --length-predictor constant
multibin --length-predictor constant
    mode multibin tells requests apart by predicted lengths, and --length-predictor
dynamic --length-predictor exact
    --length-predictor has no meaning without --order sjf or srpt or mode multibin, which go by
static --order fair --length-predictor exact
    --length-predictor has no meaning without --order sjf or srpt or mode multibin, which go by
dynamic --order sjf --length-predictor noisy
    --length-predictor 'noisy': must be exact, noisy:SIGMA (0 … 10, such as noisy:0.7),
dynamic --order sjf --length-predictor noisy:-1
    --length-predictor 'noisy:-1': must be exact, noisy:SIGMA (0 … 10, such as noisy:0.7),
dynamic --order sjf --length-predictor noisy:11
    --length-predictor 'noisy:11': must be exact, noisy:SIGMA (0 … 10, such as noisy:0.7),
dynamic --order sjf --length-predictor noisy:nan
    --length-predictor 'noisy:nan': must be exact, noisy:SIGMA (0 … 10, such as noisy:0.7),
dynamic --order priority --queue-policy 4:max_size=1
    --queue-policy names level 4, and there are levels 1 … 3; name one of them, or raise
static --order priority --queue-policy 0:max_size=1
    names level 0, and there are
dynamic --order priority --priority-levels 2 --default-priority-level 3
    --default-priority-level 3 is beyond the 2 levels; lower it, or raise --priority-levels
dynamic --order priority --default-priority-level 0
    should be greater than or equal
dynamic --order priority --priority-levels 65
    should be less than or equal to 64
dynamic --order priority --priority-levels 0
    should be greater than or equal to 1
dynamic --priority-levels 3
    --priority-levels has no meaning without --order priority; add that, or leave
dynamic --default-priority-level 1
    --default-priority-level has no meaning without --order priority; add that, or leave
dynamic --queue-policy 1:timeout_ms=500,action=delay,max_size=100,override=yes
    --queue-policy has no meaning without --order priority; add that, or leave
dynamic --order priority --queue-policy x
    'x' names no level; write it as '1:timeout_ms=500,action=delay,max_size=100,override=yes'
dynamic --order priority --queue-policy max_size=3
    'max_size=3' names no level; write it as
dynamic --order priority --queue-policy 1.5:max_size=3
    '1.5:max_size=3' names no level; write it as
dynamic --order priority --queue-policy ²:max_size=3
    '²:max_size=3' names no level; write it as
dynamic --order priority --queue-policy 1:max_size=1;01:max_size=2
    level 1 has two policies; give it one
dynamic --order priority --queue-policy default:max_size=1;default:max_size=2
    level default has two policies; give it one
dynamic --order priority --queue-policy 1:max_size=1,max_size=1
    '1:max_size=1,max_size=1' gives max_size twice; give it once
dynamic --order priority --queue-policy default:max_size=1,max_size=2
    'default:max_size=1,max_size=2' gives max_size twice; give it once
dynamic --preserve-ordering --order srpt
    --order srpt lets later requests be answered first, and --preserve-ordering holds their
dynamic --preserve-ordering --order mlfq
    --order mlfq lets later requests be answered first, and --preserve-ordering holds their
dynamic --preserve-ordering --order priority
    --order priority with several levels lets later requests be answered first, and
dynamic --order priority --queue-policy 1:timeout_ms=nan
    timeout_ms=nan is not understood: timeout_ms and max_size are numbers
dynamic --order priority --queue-policy 1:timeout_ms=inf
    timeout_ms=inf is not understood: timeout_ms and max_size are numbers
dynamic --order priority --queue-policy 1:timeout_ms=-1
    timeout_ms=-1 is not understood: timeout_ms and max_size are numbers
dynamic --order priority --queue-policy 1:timeout_ms=soon
    timeout_ms=soon is not understood: timeout_ms and max_size are numbers
dynamic --order fair --user-weights ann
    'ann' is no weight; write NAME=WEIGHT with a weight from 0.000001 to 1000000, such as
dynamic --order fair --user-weights ann=0
    'ann=0' is no weight; write NAME=WEIGHT with a weight from 0.000001 to 1000000, such as
dynamic --order fair --user-weights ann=-1
    'ann=-1' is no weight; write NAME=WEIGHT with a weight from 0.000001 to 1000000, such as
dynamic --order fair --user-weights ann=nan
    'ann=nan' is no weight; write NAME=WEIGHT with a weight from 0.000001 to 1000000, such as
dynamic --order fair --user-weights a=1,a=2
    a has two weights; give it one
dynamic --user-weights a=1
    --user-weights has no meaning without --order fair
dynamic --user-requests-per-minute 0
    should be greater than or equal to 1
dynamic --user-tokens-per-minute 1.5
    input should be a valid integer
windowed --preferred-batch-sizes 8,64
    --preferred-batch-sizes 64 is no batch size: a batch has 1 … 32 rows; leave it out, or
windowed --preferred-batch-sizes 0
    --preferred-batch-sizes 0 is no batch size
windowed --preferred-batch-sizes 5 --batch-size-limit 4
    --preferred-batch-sizes 5 is no batch size: a batch has 1 … 4 rows
windowed --preferred-batch-sizes 4 --batch-size-target 4
    --preferred-batch-sizes and --batch-size-target both say when a batch is large enough;
windowed --preferred-batch-sizes 4;8
    must be numbers separated by commas
dynamic --preferred-batch-sizes 4
    --preferred-batch-sizes has no meaning in mode dynamic; it belongs to windowed
multibin --preferred-batch-sizes 4
    --preferred-batch-sizes has no meaning in mode multibin; it belongs to windowed
dynamic --bins 2
    --bins has no meaning in mode dynamic; it belongs to multibin
windowed --bins 2
    --bins has no meaning in mode windowed; it belongs to multibin
multibin --bins 0
    --bins '0': input should be greater than or equal to 1
multibin --bins 65
    --bins '65': input should be less than or equal to 64
dynamic --victim newest
    --victim has no meaning without --kv-reservation demand; add that, or leave it out
dynamic --budget-counts all --token-budget 8 --max-batch-size 9
    token_budget 8 counts decoded tokens too, and a batch may have 9 of them; raise
static --kv-reservation demand
    --kv-reservation has no meaning in mode static
dynamic --kv-reservation demand --victim oldest
    --victim 'oldest': input should be 'newest', 'least_computed' or 'most_computed'
dynamic --kv-cache 63blocks --model fake
    kv_cache 63blocks of 16 tokens hold 1008 tokens, and one request of 1024 needs 64; raise
dynamic --prefix-window 9
    --prefix-window has no meaning without --order prefix
dynamic --prefix-caching --generator naive
    --prefix-caching has no meaning with --generator naive
""".strip().split("\n")


@pytest.mark.parametrize(("line", "sentence"), list(zip(REFUSED[::2], REFUSED[1::2])))
def test_what_has_no_meaning_together_is_answered_in_one_sentence(line: str, sentence: str) -> None:
    message = refused(line)
    assert sentence.strip() in message and "\n" not in message


def test_what_has_a_meaning_is_taken() -> None:
    def config(line: str) -> Config:
        return parse([*line.split(), "--model", "fake"], {}, dotenv=None)

    for line in (
        f"static --order priority --queue-policy {EXAMPLE};3:timeout_ms=0 --max-wait-s 5",
        "dynamic --order priority --priority-levels 2 --default-priority-level 2",
        "dynamic --order srpt --length-predictor constant",
        "dynamic --order sjf --preserve-ordering",
        "dynamic --order priority --priority-levels 1 --queue-policy 1:timeout_ms=5,max_size=9 "
        "--preserve-ordering",
        "multibin --bins 2 --length-predictor noisy:0.5 --order fcfs",
        "windowed --preferred-batch-sizes 32,1",
        "windowed --preferred-batch-sizes 4,2 --batch-size-limit 4",
        "nobatch --user-requests-per-minute 1 --user-tokens-per-minute 9 --preserve-ordering",
        "dynamic --order fair --user-weights a=1e-3,b=2,c=d=1",
    ):
        assert config(line).warnings() == []
    assert config("windowed --preferred-batch-sizes 2 --batch-size-limit 3").warnings() == [], (
        "there the target of 4, which 3 rows never reach, has no meaning"
    )


def test_a_queue_policy_says_what_it_states_and_leaves_the_rest_as_it_is() -> None:
    text = " 1 : timeout_ms=2.5 , override=yes ;;2:max_size=7,;3:"
    order = Priority(queue_policy=text)
    one, two, three = (order.queue_policies[level] for level in (1, 2, 3))
    assert (one.timeout_ms, one.action, one.max_size, one.override) == (2.5, "reject", 0, True)
    assert (two.timeout_ms, two.action, two.max_size, two.override) == (0, "reject", 7, False)
    assert (three.timeout_ms, three.max_size) == (0, 0)
    order = Priority(queue_policy="2:max_size=7; default :timeout_ms=5")
    said = {n: (own.timeout_ms, own.max_size) for n, own in order.queue_policies.items()}
    assert said == {1: (5, 0), 2: (0, 7), 3: (5, 0)}, "the default's is of those without their own"


def test_settings_come_from_the_environment_too_and_reach_the_scheduler(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text(
        "EB_ORDER=priority\nEB_PRIORITY_LEVELS=2\nEB_DEFAULT_PRIORITY_LEVEL=2\n"
        f"EB_QUEUE_POLICY={EXAMPLE}\nEB_MAX_WAIT_S=5\n"
    )
    environ = {
        "EB_USER_REQUESTS_PER_MINUTE": "3",
        "EB_USER_TOKENS_PER_MINUTE": "300",
        "EB_PREFERRED_BATCH_SIZES": "2,4",
        "EB_MODEL": "fake",
    }
    config = parse(["windowed"], environ, dotenv)
    assert config.user_requests_per_minute == 3
    scheduler = scheduler_of(config)
    assert scheduler.order == Priority(5.0, 2, 2, EXAMPLE)
    assert isinstance(scheduler.policy, Windowed)
    assert scheduler.policy.preferred_batch_sizes == (2, 4)
    assert scheduler._ordering is None
    in_order = {"EB_PRESERVE_ORDERING": "true", "EB_MODEL": "fake"}
    assert scheduler_of(parse(["static"], in_order, dotenv=None))._ordering is not None
    flags = parse(["windowed", "--priority-levels", "5"], environ, dotenv)
    assert (flags.priority_levels, flags.default_priority_level) == (5, 2)
    again = Config.model_validate_json(config.model_dump_json())
    assert again == config and chosen(MODES, again.mode, again) == scheduler.policy


def test_what_the_environment_says_for_other_modes_and_orders_is_no_error() -> None:
    """A .env may be shared between modes: sizes beyond a smaller server's rows, and levels that
    another order has, were once refused where they have no meaning.
    """
    environ = {
        "EB_PREFERRED_BATCH_SIZES": "64",
        "EB_QUEUE_POLICY": "5:max_size=1",
        "EB_DEFAULT_PRIORITY_LEVEL": "5",
        "EB_BINS": "8",
        "EB_AGING": "1",
        "EB_PREFILL_WEIGHT": "1",
        "EB_LENGTH_PREDICTOR": "constant",
        "EB_MAX_WAIT_S": "5",
        "EB_USER_WEIGHTS": "a=2",
    }
    for line in ("dynamic", "static", "nobatch", "dynamic --order fair", "dynamic --order mlfq"):
        config = parse([*line.split(), "--model", "fake"], environ, dotenv=None)
        assert config.bins == 8
    assert build("dynamic", {"order": "mlfq"}, environ_values(environ)).max_wait_s == 5
    assert Mlfq(max_wait_s=5.0).promote_after_s == 5
    assert "64 is no batch size" in refused("windowed", environ)
    assert "level 3" in refused(
        "dynamic --order priority --priority-levels 2", {"EB_QUEUE_POLICY": "3:max_size=1"}
    )
    assert "default-priority-level 5 is beyond the 3" in refused(
        "dynamic --order priority", environ
    )
    assert "gives all the same" in refused("multibin", environ)
    assert "no weight" in refused("dynamic", {"EB_USER_WEIGHTS": "a"}), "what cannot be read is"


def environ_values(environ: dict[str, str]) -> dict[str, str]:
    return {name[3:].lower(): value for name, value in environ.items()}
