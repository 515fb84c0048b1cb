"""Text to ids and back: GPT-2's byte-pair encoding, or plain bytes. Both are `tiktoken.Encoding`s.

Special-token text in a prompt ("<|endoftext|>") is ordinary text: encode with `encode_ordinary`.
"""

from __future__ import annotations

import tiktoken

# The longest text that one id stands for, in UTF-8 bytes: a prompt of n bytes has at least n / this many ids.
LONGEST_TOKEN = {"r50k_base": 128, "bytes": 1}


class TokenizerUnavailable(Exception):
    """The tokenizer's file could not be fetched; the message names the ways on."""


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the encoding called `name`: "r50k_base" or "bytes".

    r50k_base's one file is fetched once and cached by tiktoken (in TIKTOKEN_CACHE_DIR if that is set).
    Raises TokenizerUnavailable.
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
    except (OSError, ValueError) as error:  # no network (requests' errors are OSErrors), or a damaged file
        raise TokenizerUnavailable(
            f"GPT-2's tokenizer could not be fetched ({type(error).__name__}): connect once, set TIKTOKEN_CACHE_DIR "
            "to a folder that has it, or use --tokenizer bytes with --weights random, or --model demo"
        ) from None
