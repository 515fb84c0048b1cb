"""A GPT-2 of random weights as a folder that ours and every peer loads.

    PEERS-ENV/bin/python -m lab.benchmarks.peers.checkpoint --size gpt2 --out FOLDER

Its vocabulary is a stand-in: prompts are ids, and converters want a tokenizer. Beside it OpenVINO's
forms (float32, and weights in int8) and CTranslate2's. Needs lab/benchmarks/requirements-peers.txt.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from client.saving import write
from lab.benchmarks import HELP

SIZES = {  # layers, heads, width
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
}


def vocabulary(folder: Path) -> None:
    """Write GPT-2's number of tokens, the i-th of them "ti", and no merges."""
    tokens = {f"t{i}": i for i in range(50256)} | {"<|endoftext|>": 50256}
    write(folder / "vocab.json", json.dumps(tokens))
    write(folder / "merges.txt", "#version: 0.2\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, **HELP)
    parser.add_argument("--size", choices=SIZES, default="gpt2", help="default: gpt2")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    options = parser.parse_args()
    import ctranslate2
    import nncf
    import openvino
    import torch
    from optimum.intel import OVModelForCausalLM
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

    folder = options.out
    layers, heads, width = SIZES[options.size]
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
    GPT2LMHeadModel(config).save_pretrained(folder)
    vocabulary(folder)
    GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)

    converter = ctranslate2.converters.TransformersConverter(str(folder))
    converter.convert(str(folder / "ctranslate2"), force=True)
    exported = OVModelForCausalLM.from_pretrained(folder, export=True)
    exported.save_pretrained(folder / "openvino")
    model = openvino.Core().read_model(folder / "openvino" / "openvino_model.xml")
    symmetric = nncf.CompressWeightsMode.INT8_SYM
    exported.model = nncf.compress_weights(model, mode=symmetric)
    exported.save_pretrained(folder / "openvino-int8")


if __name__ == "__main__":
    main()
