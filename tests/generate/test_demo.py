"""The shipped model is what generate/demo/README.md says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from config.shapes import SHAPES, shape_of
from generate.auto import build
from generate.checkpoint import load_model
from generate.weights import DEMO, locate
from model import causal_attention
from scheduling.inference import Inference
from scheduling.sampling import Sampling
from server.serving import Server

README = (DEMO / "README.md").read_text()


def served(group: list[Inference], **settings: object) -> list[str]:
    """Return the texts of a server of demo."""
    server = Server(build("dynamic", {"model": "demo"} | settings, {}))
    server.manager.enqueue(group)
    assert all(each.done.wait(60) for each in group)
    server.close()
    return [bytes(each.tokens).decode() for each in group]


@pytest.mark.parametrize(
    ("name", "folder", "most"), [("demo", DEMO, 8e6), ("demo-draft", DEMO / "draft", 1.5e6)]
)
def test_the_files_are_small_and_of_the_shape_stated(name: str, folder: Path, most: float) -> None:
    path = folder / "model.safetensors"
    assert path.stat().st_size <= most
    assert shape_of(str(folder)) == SHAPES[name] and SHAPES[name].n_ctx == 1024
    with safe_open(path, framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118


def test_its_draft_model_guesses_what_it_writes() -> None:
    prompts = ("The function returns", "Return True if", "This module provides classes for")
    texts, drafts = [], {"speculate": 4, "draft": "model:demo-draft"}
    for settings in ({}, drafts):
        group = [
            Inference([*prompt.encode()], 60, Sampling(i % 2 * 0.8, seed=i))
            for i, prompt in enumerate(prompts)
        ]
        texts.append(served(group, **settings))
    assert texts[0] == texts[1]
    verified = sum(each.drafts.verified for each in group)
    assert sum(each.drafts.accepted for each in group) > 0.3 * verified > 30


def test_the_completion_in_its_readme_is_what_it_writes() -> None:
    [body] = re.findall(r"curl localhost:8500/inference --json '(.*)'", README)
    asked = json.loads(body)
    sampling = Sampling(asked["temperature"], seed=asked["seed"])
    [text] = served([Inference([*asked["prompt"].encode()], asked["num_tokens"], sampling)])
    shown = "".join(re.findall(r"^> ?(.*\n)", README, re.MULTILINE))
    assert shown.split() == (asked["prompt"] + text).split()


def test_the_text_it_is_measured_on_is_whole() -> None:
    """A tool that edits all files once shortened it."""
    size = (DEMO / "held_out.txt").stat().st_size
    assert f"held_out.txt, {size:,} bytes" in README


@pytest.mark.nightly
def test_bits_per_byte_are_as_stated_and_every_position_is_trained() -> None:
    config = build("dynamic", {"model": "demo"}, {})
    model = load_model(config.shape, locate(config), 0, torch.float32, "cpu")
    text, positions = (DEMO / "held_out.txt").read_bytes(), torch.arange(1024)
    bits = []
    for at in range(0, len(text) - 1024, 1024):
        ids = torch.tensor(list(text[at : at + 1025]))
        with torch.inference_mode():
            logits = model(ids[:-1], positions, causal_attention, positions)
        bits.append(F.cross_entropy(logits, ids[1:], reduction="none") / math.log(2))
    by_position = torch.stack(bits).mean(0)
    [stated] = re.findall(r"\| demo, [\d.]+M parameters \| ([\d.]+) \|", README)
    assert float(stated) <= 2.1
    assert abs(by_position[512:].mean() - float(stated)) <= 0.05
    first, *later = by_position.view(8, 128).mean(1)
    assert max(later) < first


def test_each_shipped_adapter_writes_in_its_form() -> None:
    names = ("capitals", "list")
    folders = ",".join(f"{name}={DEMO / 'lora' / name}" for name in names)
    asked = [Inference(list(b"Raise ValueError.\n"), 40, adapter=name) for name in ("", *names)]
    own, capitals, listed = served(asked, lora=folders)
    assert capitals.isupper() and not own.isupper()
    assert listed.startswith("* ") and not own.startswith("*")
