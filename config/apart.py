"""Prefill and decode apart: what it does not go together with, on servers and in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from config.settings import Settings
from config.tables import flag

# settings that do not go together with it, and their value without effect
WITHOUT = {
    "prefix_caching": False, "speculate": "0", "prefill": "mixed", "shed": False,
    "preserve_ordering": False,
}  # fmt: skip


def unfit_apart(config: Settings) -> Iterator[str]:
    """Yield a sentence for each setting of a prefill or decode server that contradicts it."""
    if not (config.prefill_only or config.prefill_url):
        return
    role = "--prefill-only" if config.prefill_only else "--prefill-url"
    if config.prefill_only and config.prefill_url:
        yield (
            "--prefill-only computes prompts for others, and --prefill-url has others compute "
            "them; leave one of them out"
        )
    for name, value in (WITHOUT | {"record": None}).items():
        if getattr(config, name) != value:
            yield (
                f"{flag(name)} is not offered where prefill and decode are apart; leave it or "
                f"{role} out"
            )
    if config.model == "fake":
        yield f"the model fake has no keys and values to hand over; leave {role} out"
    if config.prefill_url and (
        (url := urlsplit(config.prefill_url)).scheme != "http" or not url.hostname or url.path
    ):
        yield "--prefill-url must be the address of a server, such as http://127.0.0.1:8501"
