"""Checkpoints: found or fetched, and checked before anything is read. No torch.

A checkpoint is Hugging Face's safetensors form of GPT-2, tensor names with or without the
`transformer.` prefix.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from config.shapes import GPT2_REPOSITORIES, Shape

if TYPE_CHECKING:
    from config.config import Config

FETCH_TIMEOUT_S = 5
LARGEST_WEIGHT = 1e4  # beyond it sums overflow, and every text is token 0
DEMO = Path(__file__).parent / "demo"
Sizes = dict[str, tuple[int, ...]]  # the tensors' sizes by name


class WeightsUnavailable(Exception):
    """No checkpoint, or one that does not fit; the message names the tensor or the ways on."""


def locate(config: Config) -> Path | None:
    """Return the safetensors file of `config`, fetched if need be; None for random weights. Fetch
    its draft model's file, too.

    Raises WeightsUnavailable, within seconds when there is no network.
    """
    if config.draft_model is not None:
        locate(config.draft_model)
    if config.weights == "random" or config.model == "fake":
        return None
    shipped = {"demo": DEMO, "demo-draft": DEMO / "draft"}
    if config.model in GPT2_REPOSITORIES:
        path = _fetch(config.model)
    else:
        path = shipped.get(config.model, Path(config.model)) / "model.safetensors"
    if not path.is_file():
        mend = "restore it with git checkout"
        if config.model not in shipped:
            mend = "save the checkpoint in safetensors form, as one file (max_shard_size)"
        raise WeightsUnavailable(f"{path} does not exist; {mend}, or use --weights random")
    check(path, config.shape)
    return path


def _fetch(model: str) -> Path:
    from huggingface_hub import get_session, hf_hub_download, hf_hub_url

    repository, name = GPT2_REPOSITORIES[model], "model.safetensors"
    try:
        return Path(hf_hub_download(repository, name, local_files_only=True))
    except OSError:
        pass  # not cached yet
    try:
        # hf_hub_download retries for half a minute when there is no network: ask once before
        get_session().head(hf_hub_url(repository, name), timeout=FETCH_TIMEOUT_S)
        return Path(hf_hub_download(repository, name))
    except Exception as error:
        raise WeightsUnavailable(
            f"the weights of {model} could not be fetched ({type(error).__name__}): use --weights "
            "random (the same speed), --model demo, or --model FOLDER with a local Hugging Face "
            "GPT-2 checkpoint"
        ) from None


def expected_tensors(shape: Shape) -> Sizes:
    """Return names and sizes of a GPT-2's tensors, in the order of the computation. Linear weights
    are [in, out].
    """
    e = shape.n_embd

    def norm(name: str) -> Sizes:
        return {f"{name}.weight": (e,), f"{name}.bias": (e,)}

    def linear(name: str, n_in: int, n_out: int) -> Sizes:
        return {f"{name}.weight": (n_in, n_out), f"{name}.bias": (n_out,)}

    tensors: Sizes = {"wte.weight": (shape.vocab_size, e), "wpe.weight": (shape.n_ctx, e)}
    for h in (f"h.{i}" for i in range(shape.n_layer)):
        tensors |= norm(f"{h}.ln_1")
        tensors |= linear(f"{h}.attn.c_attn", e, 3 * e) | linear(f"{h}.attn.c_proj", e, e)
        tensors |= norm(f"{h}.ln_2")
        tensors |= linear(f"{h}.mlp.c_fc", e, 4 * e) | linear(f"{h}.mlp.c_proj", 4 * e, e)
    return tensors | norm("ln_f")


def check(path: Path, shape: Shape) -> dict[str, str]:
    """Return {our tensor name: name in the file} for every tensor of `shape`.

    Reads the header, and an LM head that the file may hold. Raises WeightsUnavailable naming the
    first tensor that is missing, has another size or holds no floating-point numbers, an LM head
    that is not the token embedding, or the file if it is truncated or no safetensors file. Other
    tensors (attention-mask buffers) are ignored.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            in_file = set(file.keys())
            names = {}
            for ours, size in expected_tensors(shape).items():
                name = f"transformer.{ours}" if f"transformer.{ours}" in in_file else ours
                if name not in in_file:
                    raise WeightsUnavailable(
                        f"{path} has no tensor {ours}; it is not a GPT-2 of {shape}"
                    )
                tensor = file.get_slice(name)
                actual, kind = tuple(tensor.get_shape()), tensor.get_dtype()
                if actual != size:
                    raise WeightsUnavailable(
                        f"{path}: tensor {name} has shape {actual}, and config.json wants {size}"
                    )
                if kind not in ("F32", "F16", "BF16", "F64"):
                    raise WeightsUnavailable(
                        f"{path}: tensor {name} holds {kind}; save it as floating-point numbers"
                    )
                names[ours] = name
        head, embedding = "lm_head.weight", names["wte.weight"]
        if head in in_file and _bytes(path, head) != _bytes(path, embedding):
            raise WeightsUnavailable(
                f"{path}: {head} differs from {embedding}, and only a head that is tied to the "
                "token embedding can be served; choose another --model"
            )
        return names
    except (SafetensorError, OSError) as error:
        raise WeightsUnavailable(
            f"{path} is damaged or no safetensors file ({error}); fetch it again"
        ) from None


def _bytes(path: Path, tensor: str) -> memoryview:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        first, end = json.loads(file.read(length))[tensor]["data_offsets"]
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return memoryview(mapped)[8 + length + first : 8 + length + end]
