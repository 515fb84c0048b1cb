from __future__ import annotations

from itertools import pairwise

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from generate.tokenizer import (
    LONGEST_TOKEN,
    UTF8,
    Detokenizer,
    StopRule,
    TokenizerUnavailable,
    load_tokenizer,
)

TEXTS = ["hello", "", "a\0b", "naïve 😀 日本語", "<|endoftext|>", " \n\t ", "x" * 5000]


@pytest.fixture(scope="module", params=["bytes", "r50k_base"])
def tokenizer(request: pytest.FixtureRequest) -> tiktoken.Encoding:
    try:
        return load_tokenizer(request.param)
    except TokenizerUnavailable as error:
        pytest.skip(f"GPT-2's BPE file cannot be had here: {error}")


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_survives_the_way_to_ids_and_back(tokenizer: tiktoken.Encoding, text: str) -> None:
    ids = tokenizer.encode_ordinary(text)
    assert tokenizer.decode(ids) == text
    assert all(id_ < tokenizer.n_vocab - 1 for id_ in ids), "special-token text is ordinary text"
    if (tokenizer.name, text) == ("r50k_base", "hello"):
        assert ids == [31373]  # as GPT-2's
    assert len(text.encode()) <= len(ids) * LONGEST_TOKEN[tokenizer.name]


def test_every_id_can_be_decoded(tokenizer: tiktoken.Encoding) -> None:
    assert tokenizer.decode([tokenizer.n_vocab - 1]) == "<|endoftext|>"
    assert len(tokenizer.decode(list(range(tokenizer.n_vocab)))) > 256
    texts = tokenizer.decode_tokens_bytes(list(range(tokenizer.n_vocab - 1)))
    assert max(map(len, texts)) <= LONGEST_TOKEN[tokenizer.name]


def test_an_absent_tokenizer_names_the_ways_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    ways = "TIKTOKEN_CACHE_DIR .*--tokenizer bytes .*--model demo"
    with pytest.raises(TokenizerUnavailable, match=ways):
        load_tokenizer("r50k_base")


IDS = st.lists(st.integers(0, 256), max_size=40)  # 256: end-of-text
TEXT = st.text("abé\n", max_size=20).map(lambda text: list(text.encode()))


def in_pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    # the last id comes last
    edges = [0, *sorted(max(0, min(cut, len(ids) - 1)) for cut in cuts), len(ids)]
    return [
        detokenizer.completion(ids[a:b], last=n == len(cuts))
        for n, (a, b) in enumerate(pairwise(edges))
    ]


@given(IDS | TEXT, st.lists(st.integers(0, 40), max_size=8))
def test_pieces_of_a_text_are_the_text_whatever_its_bytes(ids: list[int], cuts: list[int]) -> None:
    tokenizer = load_tokenizer("bytes")
    assert "".join(in_pieces(Detokenizer(tokenizer), ids, cuts)) == tokenizer.decode(ids)


def until_stopped(rule: StopRule, ids: list[int]) -> list[int]:
    """The ids that an inference gets before its rule ends it."""
    stop = rule.new()
    return next((ids[: n + 1] for n, token in enumerate(ids) if stop(token)), ids)


# tokens that begin and end in characters, and hold several
ODD_TEXTS = [
    b"a", b"b", b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\xff",
    b"\x98", b"b\xff", b"\xacab", b"\xe2a\xe2", "b\ufffda".encode(), b"\xef\xbf",
]  # fmt: skip
ODD = tiktoken.Encoding(
    "odd", pat_str=r"[\s\S]+", special_tokens={"<|endoftext|>": len(ODD_TEXTS)},
    mergeable_ranks={text: id_ for id_, text in enumerate(ODD_TEXTS)},
)  # fmt: skip
ODD_IDS = st.lists(st.integers(0, ODD.eot_token), max_size=14)
ODD_STOPS = st.lists(st.text("ab\ufffdé€", min_size=1, max_size=4), min_size=1, max_size=3)


def whole_until_stopped(ids: list[int], strings: list[str], min_tokens: int) -> tuple[int, str]:
    """The tokens that come, and their text: all is decoded and searched again at each token."""
    early = 0  # characters

    def cut(text: str) -> str | None:
        ends = [at for s in strings if (at := text.find(s, max(0, early - len(s) + 1))) >= 0]
        return text[: min(ends)] if ends else None

    for n in range(1, len(ids) + 1):
        so_far = UTF8("replace").decode(ODD.decode_bytes(ids[:n]).replace(b"<|endoftext|>", b""))
        if n <= min_tokens:
            early = len(so_far)
        elif (stopped := cut(so_far)) is not None:
            return n, stopped
    whole = ODD.decode_bytes(ids).replace(b"<|endoftext|>", b"").decode(errors="replace")
    stopped = cut(whole)  # it may end in an unfinished character
    return len(ids), whole if stopped is None else stopped


@given(ODD_IDS, ODD_STOPS, st.integers(0, 4), st.lists(st.integers(0, 14), max_size=6), ODD_IDS)
def test_a_text_never_shows_a_stop_string_whatever_its_bytes_and_tokens(
    ids: list[int], strings: list[str], min_tokens: int, cuts: list[int], prompt: list[int]
) -> None:
    """Strings were looked for in bytes, which have no U+FFFD where the text shows one."""
    rule = StopRule(ODD, strings, (), min_tokens)
    got = until_stopped(rule, ids)
    n, expected = whole_until_stopped(ids, strings, min_tokens)
    assert len(got) == n
    echoing = Detokenizer(ODD, rule)
    unfinished = len(echoing.prompt(prompt)) < len(ODD.decode(prompt))
    plain, echoed = ("".join(in_pieces(d, got, cuts)) for d in (Detokenizer(ODD, rule), echoing))
    assert plain == expected
    if not unfinished:  # else the first bytes may end the prompt's last character
        assert echoed == expected
    if not min_tokens:
        assert not any(
            string in text for string in strings for text in (plain, echoed[unfinished:])
        )


def test_nothing_is_held_back_longer_than_it_must() -> None:
    tokenizer = load_tokenizer("bytes")
    detokenizer = Detokenizer(tokenizer, StopRule(tokenizer, ["stop"], {256}))
    pieces = [detokenizer.completion([byte], last=False) for byte in "ü st".encode()]
    assert pieces == ["", "ü", " ", "", ""], "half of a character, and the start of a stop string"
    assert detokenizer.completion(list(b"ar"), last=False) == "star"


def test_an_echoed_prompt_may_hold_a_stop_string_and_end_inside_a_character() -> None:
    tokenizer = load_tokenizer("bytes")
    detokenizer = Detokenizer(tokenizer, StopRule(tokenizer, ["a"], {256}))
    first, second = "é".encode()
    assert detokenizer.prompt([*b"banana ", first]) == "banana "
    assert detokenizer.completion([second, *b"!a"], last=True) == "é!"
