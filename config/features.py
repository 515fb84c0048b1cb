"""Which features go together: settings are refused by this table, and docs/settings.md shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from config.tables import flag

if TYPE_CHECKING:
    from config.config import Config


class Feature(NamedTuple):
    """A feature, its flag, and whether settings choose it."""

    name: str
    flag: str
    chosen: Callable[[Config], bool]


NAIVE = Feature("no KV cache", "--generator naive", lambda c: c.generator == "naive")
PADDED = Feature("padded engine", "--generator padded", lambda c: c.generator == "padded")
PREFIXES = Feature("prefix caching", "--prefix-caching", lambda c: c.prefix_caching)
DRAFTS = Feature("speculative decoding", "--speculate", lambda c: c.speculate > 0)
ADAPTERS = Feature("LoRA adapters", "--lora…", lambda c: c.lora_slots > 0)
INT8_KV = Feature("int8 keys and values", "--kv-dtype", lambda c: c.kv_dtype == "int8")
INT8 = Feature("int8 weights", "--linear int8", lambda c: c.linear == "int8")
SIZES = Feature(
    "decoder batch sizes", "--decoder-batch-sizes", lambda c: bool(c.decoder_batch_sizes)
)
AHEAD = Feature("planned ahead", "--ahead", lambda c: c.ahead)
# settings that iterations planned ahead exclude, and their values without effect: a recording has
# none, and shedding and `prefill` go by the time from an iteration's plan to its end, which another
# one shares
AHEAD_WITHOUT = {"record": None, "shed": False, "prefill": "mixed"}
ENGINES = (NAIVE, PADDED)  # of which a server has one
FEATURES = (*ENGINES, PREFIXES, DRAFTS, ADAPTERS, INT8_KV, INT8, SIZES, AHEAD)
_BY_CACHED_ENGINE = {
    PREFIXES: "KV blocks are shared", DRAFTS: "draft tokens are verified",
    ADAPTERS: "adapters are added", INT8_KV: "keys and values are rounded to 8 bits",
    SIZES: "iterations are filled up to fixed sizes", AHEAD: "iterations are planned ahead",
}  # fmt: skip
# of each pair that does not go together, why
APART = {
    **{
        (engine, feature): f"{what} by the cached engine alone"
        for engine in ENGINES
        for feature, what in _BY_CACHED_ENGINE.items()
    },
    (NAIVE, INT8): "without a KV cache the linear layers are PyTorch's",
    (DRAFTS, AHEAD): "draft tokens follow from the ids of the iteration before",
}


def contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence for each pair of chosen features, or settings, that do not go together."""
    for (one, other), why in APART.items():
        if one.chosen(config) and other.chosen(config):
            yield f"{why}; leave {other.flag} or {one.flag} out"
    for name, value in AHEAD_WITHOUT.items() if config.ahead else ():
        if getattr(config, name) != value:
            yield f"iterations planned ahead exclude {flag(name)}; leave it or --ahead out"


def table() -> str:
    """Return in Markdown which features go together."""
    n = len(FEATURES) - 1
    lines = [f"| | {' | '.join(each.name for each in FEATURES[:-1])} |", "|---|" + "---|" * n]
    for i, row in enumerate(FEATURES[1:], 1):
        apart = [(column, row) in APART or (column, row) == ENGINES for column in FEATURES[:i]]
        cells = ["no" if no else "yes" for no in apart] + [""] * (n - i)
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)
