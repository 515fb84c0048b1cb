"""Every setting that is refused, and its sentence."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from config import checks
from config.checks import EXCLUDED, FEATURES, Feature
from config.config import Config
from config.shapes import Shape
from generate import auto
from tests.config import parsed, refused


def rows(text: str) -> dict[str, str]:
    """Return what stands before and after => in each line."""
    pairs = [line.partition("=>") for line in text.splitlines() if "=>" in line]
    return {line.strip(): part.strip() for line, _, part in pairs}


# command lines, and a part of the sentence with which each is refused
SENTENCES = """
    contnuous => unknown mode 'contnuous'; valid modes are nobatch, static, windowed, dynamic
    dynmic => unknown mode 'dynmic' (did you mean dynamic?)
    => no mode given; valid modes are nobatch, static
    sjf => sjf is an order, not a mode; write dynamic --order sjf
    dynamic --order static => static is a mode, not an order; write it without --order
    dynamic --replica 2 => unknown flag --replica (did you mean --replicas?)
    dynamic --prot 1 => unknown flag --prot (did you mean --port?); --help all shows all flags
    dynamic --port => --port: expected one argument

    dynamic --max-batch-size 0 => --max-batch-size '0': input should be greater than or equal to 1
    dynamic --max-batch-size 100001 => input should be less than or equal to 100000
    dynamic --lora-random 2:4 --max-loras 10001 => input should be less than or equal to 10000
    dynamic --threads 1025 => input should be less than or equal to 1024
    dynamic --max-batch-size many => --max-batch-size 'many': input should be a valid integer
    dynamic --request-timeout-s nan => --request-timeout-s 'nan': input should be a finite number
    dynamic --dtype int8 => --dtype 'int8': input should be 'float32' or 'bfloat16'

    static --batch-size-target 4 => --batch-size-target has no meaning in mode static; it belongs to
    dynamic --compact-batches => no meaning in mode dynamic; it belongs to static and windowed
    static --prefill first => --prefill has no meaning in mode static; it belongs to dynamic
    dynamic --victim newest => no meaning without --kv-reservation demand; add that, or leave it out
    dynamic --padded-prefill apart => without --generator padded; add that, or leave it out
    dynamic --fake-slowdown 4 => --fake-slowdown has no meaning without --model fake; add that
    dynamic --max-wait-s 5 => no meaning without --order priority or sjf or hrrn or mlfq; add that
    dynamic --queue-policy 1:max_size=1 => --queue-policy has no meaning without --order priority
    dynamic --max-loras 4 => --max-loras has no meaning without --lora or --lora-random; add one of
    dynamic --lora-policy skip => --lora-policy has no meaning without --lora or --lora-random;
    dynamic --kernels plain --generator naive => no meaning with --generator naive; leave one of
    dynamic --attention plain --generator padded => --attention has no meaning with --generator pad
    dynamic --linear plain --model fake => --linear has no meaning with --model fake; leave one of

    dynamic --device cuda => no GPU is usable here; use --device cpu
    dynamic --model gpt5 => 'gpt5' is neither a folder nor one of demo, demo-draft,
    dynamic --max-model-len 2048 => max_model_len 2048 is beyond the 1024 positions of demo; lower
    dynamic --tokenizer r50k_base => tokenizer r50k_base has 50257 ids and demo only 257; choose
    dynamic --attention triton => attention triton runs on a GPU alone; leave --attention out
    dynamic --decoder-batch-sizes 64,8 => 64 is beyond max_batch_size 32; leave it out, or raise
    dynamic --decoder-batch-sizes 8,0 => --decoder-batch-sizes '8,0': 0 is no batch size; every one
    dynamic --decoder-batch-sizes 8;4 => must be numbers separated by commas, such as 32,8,4,1, or
    dynamic --record x --request-log x => record and request_log are both
    dynamic --slo-classes a=1 => --slo-classes 'a=1': 'a=1' is no class; write NAME=ttft:MS

    dynamic --kv-cache 4 => '4': must be a size with its unit: 4GB, 2048blocks, or 90% (of a GPU's
    dynamic --kv-cache nanGB => --kv-cache 'nanGB': must be a size with its unit
    dynamic --kv-cache 1e400GB => --kv-cache '1e400GB': is too large; give 1000000GB or less
    dynamic --kv-cache 10000000000000000000000000000blocks => large; give 1000000000blocks or
    dynamic --kv-cache 0GB => --kv-cache '0GB': must be above 0
    dynamic --kv-cache 70.5blocks => --kv-cache '70.5blocks': must be above 0, in whole blocks
    dynamic --kv-cache 50% => --kv-cache 50% is a share of a GPU's memory; on a CPU give a size such
    dynamic --model fake --kv-cache 4GB => 4GB: the model fake does not say how large keys and
    dynamic --model fake --kv-cache 63blocks => 63blocks of 16 tokens hold 1008 tokens, and one requ
    dynamic --model fake --kv-cache 1000000000blocks => 1,000,000,000 KV blocks are more than a sch
    dynamic --model fake --max-model-len 9999 --block-size 1 --max-batch-size 99999 => 999,890,001
    dynamic --model gpt2-xl --kv-cache 1000000GB --max-batch-size 99999 => GB of weights +
    dynamic --model gpt2-medium --dtype float32 --kv-cache 0.1GB => 16 tokens × 196,608 bytes, and
    dynamic --model gpt2 --dtype float32 --kv-cache 0.01GB => 1024 tokens needs 64 (0.075 GB); raise

    static --speculate auto => --speculate 'auto': must be a number of draft tokens, such as 4, or 0
    static --speculate 4:8,2:16 => auto and numbers by rows have left, so compare --speculate 2 and
    dynamic --draft acceptance:1.1 --speculate 1 => --draft 'acceptance:1.1': must be ngram, model:F
    dynamic --draft acceptance:0.5 => for --speculate; state --speculate 4, or leave it out
    dynamic --speculate 1024 => token_budget 256, which counts them; lower --speculate
    dynamic --speculate 4 --draft gpt2 => --draft 'gpt2': must be ngram, model:FOLDER, or
    dynamic --speculate 4 --draft model: => --draft 'model:': must be ngram, model:FOLDER, or
    dynamic --speculate 4 --draft model:gpt5 => 'gpt5' is neither a folder nor one of demo,
    dynamic --speculate 4 --draft model:gpt2 => 50,257 ids and demo one of 257; choose a --draft mod
    dynamic --model fake --speculate 4 --draft model:demo => and fake is none; use --draft ngram

    dynamic --lora a => --lora 'a': a must have one folder; write NAME=FOLDER,NAME=FOLDER
    dynamic --lora =/x => --lora '=/x': '' is no name; use 1 … 128 letters, digits and ._-/
    dynamic --lora é=/x => 'é' is no name; use 1 … 128 letters, digits and ._-/
    dynamic --lora a=/x,a=/y => a must have one folder
    dynamic --lora demo=/x => --lora names an adapter demo, which is another model's name; choose
    dynamic --lora lora-1=/x --lora-random 2:8 => --lora names an adapter lora-1, which is another
    dynamic --lora a=/x --model fake => hold weights, and the model fake has none; use --lora-random
    dynamic --lora-random 8 => --lora-random '8': must be N:RANK, such as 8:16
    dynamic --lora-random 0:8 => must be N:RANK
    dynamic --lora-random 8:65 => --lora-random 8:65: a rank is 1 … 64; lower it

    static --order srpt => --order srpt pauses rows, and in mode static a batch runs to its end; use
    windowed --order mlfq => mode dynamic, or one of the orders fcfs, priority, sjf, hrrn, prefix, f
    dynamic --order prefix => holds; add --prefix-caching
    static --shed => only in mode dynamic with --order fcfs, priority, edf; use one of these, or
    dynamic --shed --order sjf => with --order fcfs, priority, edf; use one of these
    dynamic --length-predictor exact => without --order sjf or srpt, mode multibin, --shed or
    static --order fair --length-predictor exact => which go by lengths; add one of them, or leave
    dynamic --lora-random 2:8 --length-predictor exact => or --lora-policy drain, which go by
    dynamic --order sjf --length-predictor constant => --order sjf tells requests apart by predicted
    multibin --length-predictor constant => constant gives all the same; use exact, noisy:SIGMA or
    dynamic --order sjf --length-predictor noisy => 'noisy': must be exact, noisy:SIGMA (0 … 10,
    dynamic --order sjf --length-predictor noisy:11 => constant or prompt
    dynamic --order sjf --length-predictor noisy:nan => constant or prompt
    dynamic --preserve-ordering --order srpt => --order srpt lets later requests be answered first,
    dynamic --preserve-ordering --order priority => --order priority with several levels lets later
    dynamic --order fair --user-weights ann => 'ann' is no weight; write NAME=WEIGHT with a weight
    dynamic --order fair --user-weights ann=0 => from 0.000001 to 1000000, such as alice=2,bob=1
    dynamic --order fair --user-weights ann=nan => 'ann=nan' is no weight
    dynamic --order fair --user-weights =2 => '=2' is no weight
    dynamic --order fair --user-weights a=1,a=2 => a has two weights; give it one
    windowed --preferred-batch-sizes 8,64 => 64 is no batch size: a batch has 1 … 32 rows; leave it
    windowed --preferred-batch-sizes 0 => --preferred-batch-sizes 0 is no batch size
    windowed --preferred-batch-sizes 4 --batch-size-target 4 => both say when a batch is large enou
    dynamic --budget-counts all --token-budget 8 --max-batch-size 9 => may have 9 of them; raise --t
"""
PRIORITY = """
    --priority-levels 2 --default-priority-level 3 => 3 is beyond the 2 levels; lower it, or raise
    --queue-policy 4:max_size=1 => names level 4, and there are levels 1 … 3; name one of them, or
    --queue-policy x => 'x' names no level; write it as '1:timeout_ms=500,action=delay,max_size=100
    --queue-policy max_size=3 => 'max_size=3' names no level
    --queue-policy ²:max_size=3 => '²:max_size=3' names no level
    --queue-policy :max_size=3 => ':max_size=3' names no level
    --queue-policy 1 => '1' names no level
    --queue-policy 1:max_size=1;01:max_size=2 => level 1 has two policies; give it one
    --queue-policy default:max_size=1;default:max_size=2 => level default has two policies; give it
    --queue-policy 1:max_size=1,max_size=2 => gives max_size twice; give it once
    --queue-policy 1:timeout_ms=nan => timeout_ms=nan is not understood: timeout_ms and max_size are
    --queue-policy 1:timeout_ms=inf => numbers from 0 on, action is reject or delay, override yes or
    --queue-policy 1:timeout_ms=-1 => timeout_ms=-1 is not understood
    --queue-policy 1:timeout_ms=soon => timeout_ms=soon is not understood
    --queue-policy 1:max_size=-1 => max_size=-1 is not understood
    --queue-policy 1:max_size=1.5 => max_size=1.5 is not understood
    --queue-policy 1:action=drop => action=drop is not understood
    --queue-policy 1:override=true => override=true is not understood
    --queue-policy 1:timeout=3 => timeout=3 is not understood
    --preserve-ordering --priority-levels 1 --queue-policy 1:timeout_ms=5,action=delay => with act
"""
BAD_PREFILL = "every:0 every every:-1 first:2 frist last: last:0 last:1.5 adaptive:0 adaptive:x"
TABLE = {
    **rows(SENTENCES),
    **{f"dynamic --order priority {line}": part for line, part in rows(PRIORITY).items()},
    **{
        f"dynamic --prefill {text}": f"--prefill '{text}': '{text}' is none of mixed, first, last:K"
        for text in (*BAD_PREFILL.split(), "adaptive:nan", "adaptive:1e10")
    },
}


@pytest.mark.parametrize("line", TABLE)
def test_a_bad_line_is_answered_in_one_sentence(line: str) -> None:
    assert TABLE[line] in refused(line)


ON_GPU = rows("""
    dynamic --linear int8 => linear int8 runs on a CPU alone; leave --linear out, or use --device
    dynamic --attention kernel => attention kernel runs on a CPU alone; leave --attention out
    dynamic --kv-dtype int8 => kv_dtype int8 runs on a CPU alone; leave --kv-dtype out
    dynamic --kv-cache 101% => --kv-cache '101%': is too large; give 100% or less
""")


@pytest.mark.parametrize("line", ON_GPU)
def test_on_a_gpu_other_parts_are_refused(line: str, gpu: None) -> None:
    assert ON_GPU[line] in refused(line)


def test_heads_too_large_for_a_kernel_make_auto_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(n_layer=1, n_head=1, n_embd=512)
    monkeypatch.setattr(Config, "shape", shape)
    monkeypatch.setattr(auto, "shape_of", lambda model: shape)
    assert parsed("dynamic --device cpu --tokenizer bytes").attention == "plain"
    message = "attention kernel takes heads of at most 256; use --attention plain"
    assert message in refused("dynamic --attention kernel")


# ---- the table of features that go together is what settings do

# of features whose flag needs a value, or others
FLAGS = {
    checks.DRAFTS: "--speculate 4",
    checks.ADAPTERS: "--lora-random 2:8",
    checks.INT8_KV: "--kv-dtype int8",
    checks.SIZES: "--decoder-batch-sizes 8",
}
PAIRS = [pair for pair in combinations(FEATURES, 2) if pair != checks.ENGINES]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " + ".join(f.name for f in pair))
def test_two_features_are_refused_where_the_table_says_so(pair: tuple[Feature, Feature]) -> None:
    line = " ".join(["dynamic", *(FLAGS.get(each, each.flag) for each in pair)])
    if pair in EXCLUDED:
        assert re.search("leave .* out", refused(line))
    else:
        assert all(each.chosen(parsed(line)) for each in pair)
