"""The table of features that go together is what settings do."""

from __future__ import annotations

from itertools import combinations

import pytest

from config import ConfigError, features, parse
from config.features import APART, FEATURES, Feature

# of features whose flag needs a value, or others
FLAGS = {
    features.DRAFTS: "--speculate 4",
    features.ADAPTERS: "--lora-random 2:8",
    features.SWAP: "--kv-reservation demand --preemption swap",
    features.INT8_KV: "--kv-dtype int8",
    features.SIZES: "--decoder-batch-sizes 8",
    features.SEPARATE: "--prefill-only",
}


PAIRS = [pair for pair in combinations(FEATURES, 2) if pair != features.ENGINES]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " + ".join(f.name for f in pair))
def test_two_features_are_refused_if_and_only_if_the_table_says_so(
    pair: tuple[Feature, Feature],
) -> None:
    line = ["dynamic", *" ".join(FLAGS.get(each, each.flag) for each in pair).split()]
    if pair not in APART:
        config = parse(line, {}, dotenv=None)
        assert all(each.chosen(config) for each in pair)
        return
    with pytest.raises(ConfigError, match=r"leave .* out"):
        parse(line, {}, dotenv=None)
