"""Text to ids and back: GPT-2's byte-pair encoding, or plain bytes. Both are `tiktoken.Encoding`s.

Special-token text in a prompt ("<|endoftext|>") is ordinary text: encode with `encode_ordinary`.

    StopRule       where a completion ends before it has all its tokens
    Detokenizer    ids in, text out, piece by piece
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

import tiktoken

# The longest text that one id stands for, in UTF-8 bytes: a prompt of n bytes has at least n / this
# many ids.
LONGEST_TOKEN = {"r50k_base": 128, "bytes": 1}


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
    """Where a completion ends before it has all its tokens: at one of some ids or a stop string.

    Works on bytes, as a stop string may begin or end inside a token, and a token in a character.
    `hidden`: ids whose text is not shown, which are those and end-of-text. A string that is whole
    with the first `min_tokens` tokens ends nothing; that no such id is among them is the sampler's.
    """

    def __init__(
        self,
        tokenizer: tiktoken.Encoding,
        strings: Sequence[str],
        ids: Collection[int],
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer
        self._strings = [string.encode() for string in strings]
        self._longest = max(map(len, self._strings), default=0)
        self._ids = frozenset(ids)
        self.hidden = self._ids | {tokenizer.eot_token}
        self.min_tokens = min_tokens

    def new(self) -> Callable[[int], bool]:
        """`Inference.stop` of one inference: told its tokens one by one, it says when to end."""
        tail, n = b"", 0

        def stop(token: int) -> bool:
            nonlocal tail, n
            n += 1
            if token in self.hidden:
                return token in self._ids
            if not self._strings:
                return False
            new = self._tokenizer.decode_single_token_bytes(token)
            tail += new
            # each string where it can end in the new bytes: this runs between iterations, for every
            # row
            found = n > self.min_tokens and any(
                tail.find(string, max(0, len(tail) - len(new) - len(string) + 1)) >= 0
                for string in self._strings
            )
            # what may be the beginning of a stop string
            tail = tail[max(0, len(tail) - self._longest + 1) :]
            return found

        return stop

    def find(self, text: bytes, after: int = 0) -> int | None:
        """Where the first stop string in `text` begins that ends after so many bytes."""
        return min(
            (
                at
                for string in self._strings
                if (at := text.find(string, max(0, after - len(string) + 1))) >= 0
            ),
            default=None,
        )

    def held_back(self, text: bytes) -> int:
        """How many bytes at the end of `text` may be the beginning of a stop string."""
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
    U+FFFD. With a StopRule, so is what may be the beginning of a stop string; the text ends before
    one, and end-of-text is not shown.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, rule: StopRule | None = None):
        self._tokenizer = tokenizer
        self._rule = rule
        self._held = b""
        self._early = 0  # bytes of `_held` in which no stop string may end
        self._left = rule.min_tokens if rule else 0  # tokens that are still to come of those
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, ids: Sequence[int]) -> str:
        """The text of an echoed prompt, in which no stop string is looked for. Before all else."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def completion(self, ids: Sequence[int], last: bool) -> str:
        """The text that the next completion ids add.

        `last`: no more will come, so nothing is held back.
        """
        if self._rule is None:
            return self._utf8.decode(self._tokenizer.decode_bytes(ids), last)
        early, later = (
            self._tokenizer.decode_bytes(
                [token for token in some if token not in self._rule.hidden]
            )
            for some in (ids[: self._left], ids[self._left :])
        )
        self._left = max(0, self._left - len(ids))
        text = self._held + early + later
        self._early += len(early)
        end = self._rule.find(text, self._early) if last else None
        shown = end if end is not None else len(text) - (0 if last else self._rule.held_back(text))
        self._held, self._early = text[shown:], max(0, self._early - shown)
        return self._utf8.decode(text[:shown], last)
