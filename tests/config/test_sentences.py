"""Every setting that is refused, and its sentence."""

from __future__ import annotations

from itertools import combinations

import pytest

from config import Config, ConfigError, features, parse, resolve
from config.features import APART, FEATURES, Feature
from config.shapes import Shape
from generate import kernels


def refused(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(line.split(), {}, dotenv=None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SENTENCES = {
    "contnuous": "unknown mode 'contnuous'; valid modes are nobatch, static, windowed, dynamic",
    "dynmic": "unknown mode 'dynmic' (did you mean dynamic?)",
    "": "no mode given; valid modes are nobatch, static",
    "sjf": "sjf is an order, not a mode; write dynamic --order sjf",
    "dynamic --order static": "static is a mode, not an order; write it without --order",
    "dynamic --prot 1": "unknown flag --prot (did you mean --port?); --help all shows all flags",
    "static --batch-size-target 4": "--batch-size-target has no meaning in mode static; it belongs "
    "to windowed",
    "dynamic --compact-batches": "no meaning in mode dynamic; it belongs to static and windowed",
    "dynamic --max-batch-size 0": "--max-batch-size '0': input should be greater than or equal to",
    "dynamic --max-batch-size many": "--max-batch-size 'many': input should be a valid integer",
    "windowed --max-batch-delay-ms 0": "--max-batch-delay-ms '0': input should be greater than 0",
    "dynamic --request-timeout-s nan": "--request-timeout-s 'nan': input should be a finite number",
    "static --shed": "--shed can estimate a request's first token only in mode dynamic with "
    "--order fcfs, priority, edf; use one of these, or leave it out",
    "dynamic --shed --order sjf": "with --order fcfs, priority, edf; use one of these",
    "dynamic --slo-classes a=1": "--slo-classes 'a=1': 'a=1' is no class; write NAME=ttft:MS",
    "dynamic --dtype int8": "--dtype 'int8': input should be 'float32' or 'bfloat16'",
    "dynamic --device cuda": "no GPU is usable here; use --device cpu",
    "dynamic --model gpt5": "'gpt5' is neither a folder nor one of demo, demo-draft,",
    "dynamic --max-model-len 2048": "max_model_len 2048 is beyond the 1024 positions of demo",
    "dynamic --tokenizer r50k_base": "tokenizer r50k_base has 50257 ids and demo only 257",
    "dynamic --decoder-batch-sizes 64,8": "'64,8': 64 is beyond max_batch_size 32; leave it out, "
    "or raise --max-",
    "dynamic --decoder-batch-sizes 8,0": "--decoder-batch-sizes '8,0': 0 is no batch size",
    "dynamic --decoder-batch-sizes 8;4": "must be numbers separated by commas, such as 32,8,4,1, "
    "or none",
    **{
        f"static --speculate {text}": f"--speculate '{text}': must be a number of draft tokens, "
        "such as 4, or 0 for none; auto and numbers by rows have left"
        for text in ("auto", "-1", "4:8,2:16")
    },
    "dynamic --draft acceptance:1.1 --speculate 1": "--draft 'acceptance:1.1': must be ngram, mod",
    "dynamic --draft acceptance:0.5": "state --speculate 4, or leave it out",
    "dynamic --speculate 1024": "1024 draft tokens do not fit into max_model_len 1024 and "
    "token_budget 256, which counts them; lower --speculate",
    "dynamic --enforce-eager": "--enforce-eager has no meaning on a CPU; leave it out",
    "dynamic --batch-invariant": "a CPU, where our kernels add in one order already; leave it",
    "dynamic --kv-cache 4": "--kv-cache '4': must be a size with its unit: 4GB, 2048blocks, or 90%",
    "dynamic --kv-cache nanGB": "--kv-cache 'nanGB': must be a size with its unit",
    "dynamic --kv-cache 0GB": "--kv-cache '0GB': must be above 0",
    "dynamic --kv-cache 70.5blocks": "--kv-cache '70.5blocks': must be above 0, in whole blocks",
    "dynamic --kv-cache 50%": "--kv-cache 50% is a share of a GPU's memory; on a CPU give a size",
    "dynamic --kv-blocks many": "--kv-cache 'manyblocks': must be a size with its unit",
    # 2 (keys, values) × 24 layers × 1024 × 4 bytes = 196,608 bytes a token
    "dynamic --model gpt2-medium --dtype float32 --kv-cache 0.1GB": "kv_cache 0.1GB holds 31 "
    "blocks of 16 tokens × 196,608 bytes, and one request of 1024 tokens needs 64 (0.201 GB); "
    "raise --kv-cache or lower --max-model-len",
    "dynamic --model fake --kv-cache 63blocks": "kv_cache 63blocks of 16 tokens hold 1008 tokens, "
    "and one request of 1024 needs 64; raise --kv-cache or lower --max-model-len",
    "dynamic --model gpt2-xl --kv-cache 1000000GB --max-batch-size 9999999": "GB of weights + ",
    "dynamic --attention triton": "attention triton runs on a GPU alone; leave --attention out",
    "dynamic --kernels plain --generator naive": "--kernels has no meaning with --generator naive",
    "dynamic --attention plain --generator padded": "--attention has no meaning with --gener",
    "dynamic --padded-prefill apart": "without --generator padded; add that, or leave it out",
    "dynamic --generator padded --padded-compact 2": "--padded-compact '2': input should be l",
    "dynamic --linear int8 --generator naive": "--linear has no meaning with --generator naive; "
    "leave one of them out",
    "dynamic --sampler plain --model fake": "--sampler has no meaning with --model fake; leave one",
    "dynamic --fake-slowdown 4": "--fake-slowdown has no meaning without --model fake; add that",
    "dynamic --model fake --fake-slowdown 0": "--fake-slowdown '0': input should be greater than 0",
    "dynamic --record x --request-log x": "choose another --record",
    "dynamic --live off --live-prompts": "and --live off has none; leave one out",
    "dynamic --speculate 4 --draft gpt2": "--draft 'gpt2': must be ngram, model:FOLDER, or",
    "dynamic --speculate 4 --draft model:": "--draft 'model:': must be ngram, model:FOLDER, or",
    "dynamic --speculate 4 --draft model:gpt5": "'gpt5' is neither a folder nor one of demo, ",
    "dynamic --speculate 4 --draft model:gpt2": "gpt2 has a vocabulary of 50,257 ids and demo one "
    "of 257; choose a --draft model with the same",
    "dynamic --model fake --speculate 4 --draft model:demo": "--draft model:demo guesses for a "
    "model, and fake is none; use --draft ngram",
    "dynamic --lora a": "--lora 'a': a must have one folder; write NAME=FOLDER,NAME=FOLDER",
    "dynamic --lora =/x": "--lora '=/x': '' is no name; use 1 … 128 letters, digits and ._-/",
    "dynamic --lora é=/x": "'é' is no name; use 1 … 128 letters, digits and ._-/",
    "dynamic --lora a=/x,a=/y": "a must have one folder",
    "dynamic --lora demo=/x": "--lora names an adapter demo, which is another model's",
    "dynamic --lora lora-1=/x --lora-random 2:8": "--lora names an adapter lora-1, which is anoth",
    "dynamic --lora a=/x --model fake": "hold weights, and the model fake has none; use --lora-ran",
    **{
        f"dynamic --lora-random {text}": f"--lora-random '{text}': must be N:RANK, such as 8:16"
        for text in ("8", "0:8", "8:0", "8:65")
    },
    "dynamic --max-loras 4": "--max-loras has no meaning without --lora or --lora-random; add one",
    "dynamic --lora-policy skip": "--lora-policy has no meaning without --lora or --lora-random;",
    "dynamic --port": "--port: expected one argument",
}
EXAMPLE = "1:timeout_ms=500,action=delay,max_size=100,override=yes"
BY_LENGTH = (
    "--length-predictor has no meaning without --order sjf or srpt or mode multibin, which go by "
    "lengths; add one of them, or leave it out"
)
MAX_WAIT = (
    "--max-wait-s has no meaning without --order priority or sjf or hrrn or mlfq; add that, or "
    "leave it out"
)
PREDICTOR = "must be exact, noisy:SIGMA (0 … 10, such as noisy:0.7), constant or prompt"
NOT_UNDERSTOOD = (
    "is not understood: timeout_ms and max_size are numbers from 0 on, action is reject or delay, "
    f"override yes or no, as in {EXAMPLE!r}"
)
WEIGHT = (
    "is no weight; write NAME=WEIGHT with a weight from 0.000001 to 1000000, such as alice=2,bob=1"
)
ANNULLED = (
    "lets later requests be answered first, and --preserve-ordering holds their answers until "
    "those before them are done; leave one of them out"
)
# of orders
ORDERS = {
    **{
        f"{mode} --order {order}": f"--order {order} pauses rows, and in mode {mode} a batch runs "
        "to its end; use mode dynamic, or one of the orders fcfs, priority, sjf, hrrn, prefix, fair"
        for mode, order in (("static", "srpt"), ("windowed", "mlfq"))
    },
    "dynamic --order prefix": "holds; add --prefix-caching",
    **{f"dynamic{order} --max-wait-s 5": MAX_WAIT for order in ("", " --order fair")},
    "dynamic --order sjf --max-wait-s 0": "--max-wait-s '0': input should be greater than 0",
    "dynamic --aging 2": "--aging has no meaning without --order sjf; add that, or leave it out",
    "dynamic --prefill-weight 1": "--prefill-weight has no meaning without --order sjf or srpt",
    "dynamic --user-weights a=1": "--user-weights has no meaning without --order fair",
    # predicted lengths
    **{
        f"{line} --length-predictor constant": f"{named} tells requests apart by predicted lengths,"
        " and --length-predictor constant gives all the same; use exact, noisy:SIGMA or prompt"
        for line, named in (("dynamic --order sjf", "--order sjf"), ("multibin", "mode multibin"))
    },
    "dynamic --length-predictor exact": BY_LENGTH,
    "static --order fair --length-predictor exact": BY_LENGTH,
    **{
        f"dynamic --order sjf --length-predictor {text}": f"'{text}': {PREDICTOR}"
        for text in ("noisy", "noisy:11", "noisy:nan", "exact:1")
    },
    # levels and their queues
    "dynamic --order priority --queue-policy 4:max_size=1": "--queue-policy names level 4, and "
    "there are levels 1 … 3; name one of them, or raise --priority-levels",
    "dynamic --order priority --priority-levels 2 --default-priority-level 3": "is beyond the 2 "
    "levels; lower it, or raise --priority-levels",
    "dynamic --order priority --default-priority-level 0": "should be greater than or equal to 1",
    **{
        f"dynamic --{name} {value}": f"--{name} has no meaning without --order priority; add that"
        for name, value in (
            ("priority-levels", 3), ("default-priority-level", 1), ("queue-policy", EXAMPLE)
        )
    },
    **{
        f"dynamic --order priority --queue-policy {text}": f"'{text}' names no level; write it as "
        f"'{EXAMPLE}'"
        for text in ("x", "max_size=3", "²:max_size=3", ":max_size=3", "1")
    },
    **{
        f"dynamic --order priority --queue-policy {level}:max_size=1;{again}:max_size=2": f"level "
        f"{level} has two policies; give it one"
        for level, again in (("1", "01"), ("default", "default"))
    },
    **{
        f"dynamic --order priority --queue-policy {level}:max_size=1,max_size=2": "gives max_size "
        "twice; give it once"
        for level in ("1", "default")
    },
    **{
        f"dynamic --order priority --queue-policy 1:{text}": f"{text} {NOT_UNDERSTOOD}"
        for text in (
            "timeout_ms=nan", "timeout_ms=inf", "timeout_ms=-1", "timeout_ms=soon", "max_size=-1",
            "max_size=1.5", "action=drop", "override=true", "timeout=3",
        )
    },
    # answers in order, and orders that they would annul
    **{
        f"dynamic --preserve-ordering {line}": f"{named} {ANNULLED}"
        for line, named in (
            ("--order srpt", "--order srpt"),
            ("--order priority", "--order priority with several levels"),
            (
                "--order priority --priority-levels 1 "
                "--queue-policy default:timeout_ms=5,action=delay",
                "--queue-policy with action=delay",
            ),
        )
    },
    # weights and limits of users
    **{
        f"dynamic --order fair --user-weights {text}": f"'{text}' {WEIGHT}"
        for text in ("ann", "ann=0", "ann=nan", "ann=inf", "=2")
    },
    "dynamic --order fair --user-weights a=1,a=2": "a has two weights; give it one",
    "dynamic --user-requests-per-minute 0": "should be greater than or equal to 1",
}  # fmt: skip
# of batches and their blocks
BATCHES = {
    "windowed --preferred-batch-sizes 8,64": "--preferred-batch-sizes 64 is no batch size: a batch "
    "has 1 … 32 rows; leave it out, or raise --max-batch-size and --batch-size-limit",
    "windowed --preferred-batch-sizes 0": "--preferred-batch-sizes 0 is no batch size",
    "windowed --preferred-batch-sizes 5 --batch-size-limit 4": "a batch has 1 … 4 rows",
    "windowed --preferred-batch-sizes 4 --batch-size-target 4": "both say when a batch is large "
    "enough; leave one of them out",
    "multibin --bins 0": "--bins '0': input should be greater than or equal to 1",
    "static --prefill first": "--prefill has no meaning in mode static; it belongs to dynamic",
    **{
        f"dynamic --prefill {text}": f"--prefill '{text}': '{text}' is none of mixed, first, last, "
        "every:K (K from 1 on, such as every:4) and adaptive"
        for text in ("every:0", "every", "every:-1", "first:2", "frist")
    },
    "dynamic --tbt-ms 20": "--tbt-ms has no meaning without --prefill adaptive; add that, or leave",
    "dynamic --prefill first --decode-floor 2": "--decode-floor has no meaning without --prefill "
    "last; add that",
    "dynamic --prefill adaptive --tbt-ms 0": "--tbt-ms '0': input should be greater than 0",
    "static --kv-reservation demand": "--kv-reservation has no meaning in mode static",
    "dynamic --victim newest": "--victim has no meaning without --kv-reservation demand; add that",
    "dynamic --budget-counts all --token-budget 8 --max-batch-size 9": "token_budget 8 counts "
    "decoded tokens too, and a batch may have 9 of them; raise --token-budget, lower "
    "--max-batch-size, or leave --budget-counts out",
}
TABLE = SENTENCES | ORDERS | BATCHES


@pytest.mark.parametrize("line", TABLE)
def test_a_bad_line_is_answered_in_one_sentence(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: False)
    assert TABLE[line] in refused(line)


ON_GPU = {
    **{
        f"dynamic --{name} kernel": f"{name} kernel runs on a CPU alone; leave --{name} out, or "
        "use --device cpu"
        for name in resolve.OPERATIONS
    },
    "dynamic --linear int8": "linear int8 runs on a CPU alone; leave --linear out",
    "dynamic --kv-dtype int8": "kv_dtype int8 runs on a CPU alone; leave --kv-dtype out",
    "dynamic --kv-cache 101%": "--kv-cache '101%': is more than all of a GPU's memory",
    "dynamic --enforce-eager --kernels plain": "no meaning without attention triton",
    "dynamic --linear triton --lora-random 2:8": "linear triton cannot add adapters; leave",
    **{
        f"dynamic --batch-invariant {line}": "--batch-invariant needs attention and linear triton, "
        "which add in one order: leave --attention, --linear, --kernels, --gen"
        for line in ("--linear plain", "--lora-random 2:8", "--generator padded")
    },
}


@pytest.mark.parametrize("line", ON_GPU)
def test_on_a_gpu_other_parts_are_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: True)
    monkeypatch.setattr(kernels, "why_no_triton", lambda head_size: None)
    assert ON_GPU[line] in refused(line)


def test_heads_too_large_for_a_kernel_make_auto_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(n_layer=1, n_head=1, n_embd=512)
    monkeypatch.setattr(Config, "shape", shape)
    monkeypatch.setattr(resolve, "shape_of", lambda model: shape)
    config = parse(["dynamic", "--device", "cpu", "--tokenizer", "bytes"], {}, dotenv=None)
    assert config.attention == "plain"
    message = "attention kernel takes heads of at most 256; use --attention plain"
    assert message in refused("dynamic --attention kernel")


# ---- the table of features that go together is what settings do

# of features whose flag needs a value, or others
FLAGS = {
    features.DRAFTS: "--speculate 4", features.ADAPTERS: "--lora-random 2:8",
    features.INT8_KV: "--kv-dtype int8",
    features.SIZES: "--decoder-batch-sizes 8",
}  # fmt: skip
PAIRS = [pair for pair in combinations(FEATURES, 2) if pair != features.ENGINES]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " + ".join(f.name for f in pair))
def test_two_features_are_refused_where_the_table_says_so(pair: tuple[Feature, Feature]) -> None:
    line = ["dynamic", *" ".join(FLAGS.get(each, each.flag) for each in pair).split()]
    if pair not in APART:
        config = parse(line, {}, dotenv=None)
        assert all(each.chosen(config) for each in pair)
        return
    with pytest.raises(ConfigError, match=r"leave .* out"):
        parse(line, {}, dotenv=None)
