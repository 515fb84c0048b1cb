"""Another processor for the tests: `NATIVE_BFLOAT16=yes ./test.sh`, or no, whatever this one is.

Every Python that finds this folder on its path imports this file before anything else; conftest.py
puts it there, so that the servers of the tests take part. What a processor computes natively is
read from /proc/cpuinfo, which says otherwise here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

NATIVE = {"yes": True, "no": False}[os.environ["NATIVE_BFLOAT16"]]
real = Path.read_text


def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
    text = real(path, *args, **kwargs)
    if str(path) == "/proc/cpuinfo":
        text = re.sub(r"\b(amx_bf16|avx512_bf16|bf16)\b *", "", text)
        for names, flag in (("flags", "avx512_bf16"), ("Features", "bf16")) if NATIVE else ():
            text = re.sub(rf"^({names}\s*): ", rf"\1: {flag} ", text, flags=re.MULTILINE)
    return text


Path.read_text = read_text  # type: ignore[assignment, method-assign]
