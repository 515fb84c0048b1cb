"""The shipped model is what generate/demo/README.md says, and its training can be repeated."""

from __future__ import annotations

import json
import math
import re
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from config.shapes import SHAPES, Shape, shape_of
from generate.auto import build
from generate.checkpoint import load_model
from generate.weights import DEMO, locate
from lab.training import HELD_OUT, evaluate
from lab.training import train as training
from lab.training.adapters import STYLES
from lab.training.corpus import Corpus, load_corpus
from lab.training.evaluate import bits_of_bytes, causal_logits, complete
from lab.training.train import Recipe, train
from model import GPT2, causal_attention
from scheduling.inference import Inference
from scheduling.sampling import Sampling
from server.serving import Server
from tests.programs import output, ran
from tests.servers import ROOT


@pytest.fixture(scope="module")
def model() -> GPT2:
    config = build("dynamic", {"model": "demo"}, {})
    return load_model(config.shape, locate(config), 0, torch.float32, "cpu")


def stated_bits_per_byte() -> float:
    """Return it; it is of this very text, which a tool that edits all files once shortened."""
    page = (DEMO / "README.md").read_text()
    size = HELD_OUT.stat().st_size
    assert f"held_out.txt, {size:,} bytes" in page
    [bits] = re.findall(r"\| demo, [\d.]+M parameters \| ([\d.]+) \|", page)
    return float(bits)


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
    texts, drafts = [], {"speculate": 4, "draft": "model:demo-draft"}
    for settings in ({}, drafts):
        server = Server(build("dynamic", {"model": "demo"} | settings, {}))
        group = [
            Inference([*prompt.encode()], 60, Sampling(seed % 2 * 0.8, seed=seed))
            for seed, prompt in enumerate(evaluate.PROMPTS)
        ]
        server.manager.enqueue(group)
        assert all(each.done.wait(60) for each in group)
        server.close()
        texts.append([each.tokens for each in group])
    assert texts[0] == texts[1]
    verified = sum(each.drafts.verified for each in group)
    assert sum(each.drafts.accepted for each in group) > 0.3 * verified > 100


def test_the_completion_in_its_readme_is_what_it_writes() -> None:
    text = (ROOT / "generate" / "demo" / "README.md").read_text()
    [body] = re.findall(r"curl localhost:8500/inference --json '(.*)'", text)
    request = json.loads(body)
    prompts = [request["prompt"]] * (request["seed"] + 1)
    config = build("dynamic", {"model": "demo"}, {})
    completion = complete(config, prompts, request["num_tokens"], request["temperature"])[-1]
    shown = "".join(re.findall(r"^> ?(.*\n)", text, re.MULTILINE))
    assert shown.split() == (request["prompt"] + completion).split()


@pytest.mark.nightly
def test_bits_per_byte_are_as_stated_and_every_position_is_trained(model: GPT2) -> None:
    text = HELD_OUT.read_bytes()
    assert stated_bits_per_byte() <= 2.1
    bits, before = bits_of_bytes(model, text, 1024, stride=1024)
    assert abs(bits[before > 512].mean() - stated_bits_per_byte()) <= 0.05
    parts = [(before > low) & (before <= low + 128) for low in range(0, 1024, 128)]
    first, *later = [bits[part].mean() for part in parts]
    assert max(later) < first


@pytest.mark.nightly
def test_no_paragraph_is_in_both_parts_and_nothing_is_imported() -> None:
    sysconfig.get_path("stdlib")  # imports a module of its own the first time
    before = set(sys.modules)
    corpus = load_corpus()
    assert {name.split(".")[0] for name in set(sys.modules) - before} <= {"encodings"}
    train_part, held_out = (
        {" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", part.decode())}
        for part in (corpus.train, corpus.held_out)
    )
    assert train_part.isdisjoint(held_out)
    assert len(corpus.train) > 10 * len(corpus.held_out) > 100_000


def test_copies_that_other_spacing_hides_are_found() -> None:
    copy = "a run of so many characters is surely no coincidence, whoever wrote it"
    held_out = "new " + copy.replace(" ", "\n   ") + " and new"
    corpus = Corpus(f"Said once: {copy}.".encode(), held_out.encode())
    copied = bytes(byte for byte, is_copy in zip(corpus.held_out, corpus.copied_bytes()) if is_copy)
    assert copied.split() == copy.encode().split()


def test_sequences_side_by_side_give_the_logits_of_each_alone() -> None:
    model = load_model(TINY, None, 0, torch.float32, "cpu")
    ids = torch.randint(0, 257, (3, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 100, 248])[:, None] + torch.arange(40)
    together = causal_logits(model, ids, positions).view(3, 40, -1)
    for i in range(3):
        expected = model(ids[i], positions[i], causal_attention, torch.arange(40))
        assert (together[i] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("stride", [144, 288])
@pytest.mark.parametrize("length", [700, 577, 100, 2])
def test_every_byte_but_the_first_counts_once(stride: int, length: int) -> None:
    model = load_model(TINY, None, 0, torch.float32, "cpu")
    text = TEXT[:length]
    bits, before = bits_of_bytes(model, text, 288, stride)
    assert len(bits) == len(before) == length - 1
    if stride == 144 and length > 288:
        assert before[288:].min() > 144
    for i in {0, length // 3, 287, 288, 575, length - 2} & set(range(length - 1)):
        n = int(before[i])
        ids = torch.tensor(list(text[i + 1 - n : i + 1]))
        logits = model(ids, torch.arange(n), causal_attention, torch.tensor([n - 1]))
        assert abs(-logits[0].log_softmax(-1)[text[i + 1]] / math.log(2) - bits[i]) < 1e-4


TINY = Shape(n_layer=1, n_head=2, n_embd=16, n_ctx=288, vocab_size=257)
SHORT = Recipe(
    shape=TINY, steps=6, bytes_per_step=576, phases=((0.5, 32), (1.0, 288)), warm_up=2, report=2
)
TEXT = b"A list is a sequence of objects. A tuple is a sequence that cannot be changed.\n" * 40
CORPUS = Corpus(TEXT, TEXT[:400])


def test_training_learns_and_arrives_at_the_same_weights_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, again = (train(SHORT, CORPUS) for _ in range(2))
    lines = capsys.readouterr().out
    held_out = [float(value) for value in re.findall(r"held out ([\d.]+)", lines)][:3]
    assert held_out[2] < held_out[1] < held_out[0] < 8, "bits of a byte without a model"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))


def test_what_training_writes_can_be_measured_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)  # the other tests keep theirs
    monkeypatch.setattr(training, "Recipe", lambda: replace(SHORT, steps=2))
    monkeypatch.setattr(training, "load_corpus", lambda: CORPUS)
    monkeypatch.setattr(evaluate, "load_corpus", lambda: CORPUS)
    monkeypatch.setattr(evaluate, "PROMPTS", ["A list"])
    folder = tmp_path / "new" / "folder"
    assert "learnt from another text" in output("lab.training.train", f"--out {folder}")
    files = "model.safetensors config.json held_out.txt tokenizer.json tokenizer_config.json"
    assert {path.name for path in folder.iterdir()} == {*files.split()}
    assert json.loads((folder / "config.json").read_text())["trained_on"]["sha256"] == CORPUS.digest
    assert locate(build("dynamic", {"model": str(folder)}, {})) == folder / "model.safetensors"
    text = output("lab.training.evaluate", str(folder))
    assert all(f"| {name} | " in text for name in ("folder, 0.01M parameters", "gzip -9"))
    assert re.search(r"likeliest byte is demo's in \d+\.\d% of places", text)
    assert "without the 100% that are copied" in text
    assert "predicted from 145 to 288 bytes" in text
    monkeypatch.setattr(evaluate, "PROMPTS", ["A list" * 20])  # 200 bytes more are too long
    assert "Completions of 168 bytes" in output("lab.training.evaluate", str(folder))
    trained = ran("lab.training.train", "--out", str(folder / "config.json"))
    measured = ran("lab.training.evaluate", str(tmp_path))
    assert trained.returncode == measured.returncode == 2
    assert "config.json" in trained.stderr and "no config.json" in measured.stderr


def test_what_is_no_model_of_bytes_has_no_bits_per_byte(tmp_path: Path) -> None:
    """A GPT-2 read bytes as if they were its tokens, and got a number; so did `fake`."""
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16}
    for name, more in {"bpe": {"vocab_size": 50257}, "short": {"n_positions": 50}}.items():
        (tmp_path / name).mkdir()
        settings = {"vocab_size": 257} | sizes | more
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
    for model in ("fake", "gpt2", str(tmp_path / "bpe"), str(tmp_path / "short")):
        done = ran("lab.training.evaluate", model)
        assert done.returncode == 2
        assert f"{model} is no model of bytes with a context of 53 or more" in done.stderr


def test_each_shipped_adapter_writes_in_its_form() -> None:
    folders = ",".join(f"{name}={DEMO / 'lora' / name}" for name in ("capitals", "list"))
    server = Server(build("dynamic", {"model": "demo", "lora": folders}, {}))
    asked = [Inference(list(b"Raise ValueError.\n"), 40, adapter=name) for name in ("", *STYLES)]
    server.manager.enqueue(asked)
    assert all(inference.done.wait(60) for inference in asked)
    own, capitals, listed = (bytes(inference.tokens).decode() for inference in asked)
    server.close()
    assert capitals.isupper() and not own.isupper()
    assert listed.startswith("* ") and not own.startswith("*")
