from __future__ import annotations

import pytest
import tiktoken

from tokenizer import LONGEST_TOKEN, TokenizerUnavailable, load_tokenizer

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
    assert len(text.encode()) <= len(ids) * LONGEST_TOKEN[tokenizer.name]


def test_every_id_can_be_decoded(tokenizer: tiktoken.Encoding) -> None:
    assert tokenizer.decode([tokenizer.n_vocab - 1]) == "<|endoftext|>"
    assert len(tokenizer.decode(list(range(tokenizer.n_vocab)))) > 256
    longest = max(len(tokenizer.decode_single_token_bytes(id_)) for id_ in range(tokenizer.n_vocab - 1))
    assert longest <= LONGEST_TOKEN[tokenizer.name]


def test_gpt2s_ids_are_gpt2s() -> None:
    try:
        assert load_tokenizer("r50k_base").encode_ordinary("Hello, world") == [15496, 11, 995]
    except TokenizerUnavailable as error:
        pytest.skip(f"GPT-2's BPE file cannot be had here: {error}")


def test_a_tokenizer_that_cannot_be_fetched_names_the_ways_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(TokenizerUnavailable, match=r"TIKTOKEN_CACHE_DIR .*--tokenizer bytes .*--model demo"):
        load_tokenizer("r50k_base")
