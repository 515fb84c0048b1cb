"""Text to ids and back: GPT-2's byte-pair encoding, or plain bytes. Both are `tiktoken.Encoding`s.

Special-token text in a prompt ("<|endoftext|>") is ordinary text: encode with `encode_ordinary`.

    StopRule       ends a completion before it has all its tokens
    Detokenizer    ids in, text out, piece by piece
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

import tiktoken

# bytes of the longest text that one id stands for: a prompt of n bytes has at least n / this ids
LONGEST_TOKEN = {"r50k_base": 128, "bytes": 1}
UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenizerUnavailable(Exception):
    """The tokenizer's file could not be fetched; the message names the ways on."""


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the encoding called `name`: "r50k_base" or "bytes".

    r50k_base's one file is fetched once and cached by tiktoken (in TIKTOKEN_CACHE_DIR if that is
    set). Raises TokenizerUnavailable.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes",
            pat_str=r"[\s\S]+",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
    try:
        return tiktoken.get_encoding(name)
    # no network (requests' errors are OSErrors), or a damaged file
    except (OSError, ValueError) as error:
        raise TokenizerUnavailable(
            f"GPT-2's tokenizer could not be fetched ({type(error).__name__}): connect once, set "
            "TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer bytes with --weights "
            "random, or --model demo"
        ) from None


class StopRule:
    """Ends a completion before it has all its tokens, at one of some ids or a stop string.

    A stop string may begin or end inside a token, and a token in a character: strings are looked
    for in the text as it is shown. `hidden`: these ids and end-of-text, whose text is not shown. A
    string that is whole with the first `min_tokens` tokens ends nothing; the sampler draws no such
    id among them.
    """

    def __init__(
        self,
        tokenizer: tiktoken.Encoding,
        strings: Sequence[str],
        ids: Collection[int],
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._ids = frozenset(ids)
        self.hidden = self._ids | {tokenizer.eot_token}
        self.min_tokens = min_tokens

    def new(self) -> Callable[[int], bool]:
        """Return `Inference.stop` of one inference: it takes the tokens one by one, and returns
        whether to end.
        """
        tail, n, utf8 = "", 0, UTF8("replace")

        def stop(token: int) -> bool:
            nonlocal tail, n
            n += 1
            if token in self.hidden:
                return token in self._ids
            if not self._strings:
                return False
            # a stop string may begin in it
            before = tail[max(0, len(tail) - self._longest + 1) :]
            tail = before + utf8.decode(self._tokenizer.decode_single_token_bytes(token))
            # only where a string can end in the new text: this runs for every row and iteration
            return n > self.min_tokens and self.find(tail, len(before)) is not None

        return stop

    def find(self, text: str, after: int = 0) -> int | None:
        """Return where the first stop string begins that ends after so many characters."""
        places = [text.find(string, max(0, after - len(string) + 1)) for string in self._strings]
        return min((place for place in places if place >= 0), default=None)

    def held_back(self, text: str) -> int:
        """Return how many characters at the end of `text` may begin a stop string."""
        longest = 0
        for string in self._strings:
            at = max(0, len(text) - len(string) + 1)
            while (at := text.find(string[:1], at)) >= 0 and not string.startswith(text[at:]):
                at += 1
            longest = max(longest, len(text) - at if at >= 0 else 0)
        return longest


class Detokenizer:
    """Ids in, text out, piece by piece; the pieces together are the text of all ids at once.

    Bytes of an unfinished character are held back until it is whole; bytes that are no UTF-8 become
    U+FFFD. With a StopRule, the possible beginning of a stop string is held back, too; the text
    ends before one, and end-of-text is not shown.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, rule: StopRule | None = None):
        self._tokenizer = tokenizer
        self._rule = rule
        self._held = ""
        self._early = 0  # characters of `_held` in which no stop string may end
        self._unstoppable = rule.min_tokens if rule else 0  # next tokens in which nothing may end
        self._of_prompt = 0  # characters to come that an echoed prompt began
        self._utf8 = UTF8("replace")

    def prompt(self, ids: Sequence[int]) -> str:
        """Return the text of an echoed prompt, whose stop strings do not count. Call it first."""
        text = self._utf8.decode(self._tokenizer.decode_bytes(ids))
        self._of_prompt = 1 if self._utf8.getstate()[0] else 0
        return text

    def completion(self, ids: Sequence[int], last: bool) -> str:
        """Return the text that the next completion ids add; after the `last` none is held back."""
        if self._rule is None:
            return self._utf8.decode(self._tokenizer.decode_bytes(ids), last)
        early, later = (
            self._tokenizer.decode_bytes([id_ for id_ in some if id_ not in self._rule.hidden])
            for some in (ids[: self._unstoppable], ids[self._unstoppable :])
        )
        self._unstoppable = max(0, self._unstoppable - len(ids))
        text = self._utf8.decode(early)
        self._early += len(text)
        text = self._held + text + self._utf8.decode(later, last)
        begun, text = text[: self._of_prompt], text[self._of_prompt :]
        self._of_prompt -= len(begun)
        self._early = max(0, self._early - len(begun))
        end = self._rule.find(text, self._early) if last else None
        shown = end if end is not None else len(text) - (0 if last else self._rule.held_back(text))
        self._held, self._early = text[shown:], max(0, self._early - shown)
        return begun + text[:shown]
