"""Build the playground: `python -m simulate.playground.build` writes a folder of static files.

Pyodide comes from npm, as pinned here by version and hash. The project's own modules are those that
`worker` loads, and the settings are those that ./simulate.sh has for each of the costs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import sortedcontainers

from client.saving import write
from config.config import Config
from config.settings import ConfigError
from server.live import page
from simulate.costs import FOLDER, Costs
from simulate.playground import worker
from simulate.playground.serve import serve
from simulate.program import parse

VERSION = "314.0.7"
PYODIDE = {  # its files that a browser loads, by their SHA-256
    "pyodide.mjs": "6f1d60f7bf529beb300f0f47983c921d3982363640ba20af0e38efdddbc66109",
    "pyodide.asm.mjs": "f7cdc8ece80678ceb712f8e65ebe6d3a83203a180c399865f49612a051693635",
    "pyodide.asm.wasm": "cc36e3cab04fdfc9a63ff13eb52eae2b911bf46c025cc7b281f394bd3de1d5e6",
    "python_stdlib.zip": "fa1957e5777068fc4f7437f96d860ae2fbe9c19732ba06c84e004ec16dd7dd7a",
    "pyodide-lock.json": "5dc2fc119108bc148c7457dc86e7675b5c87e1cafd420b9c34c1eaef7b36c010",
}
FETCHED = [name for name in PYODIDE if not name.endswith(".mjs")]  # others are imported
ROOT = Path(__file__).resolve().parents[2]
PAGE = ("index.html", "style.css", "page.js", "charts.js", "worker.js")
MOST_BYTES = 16_000_000
ESTIMATES = ("roofline:h100,gpt2-xl,bfloat16",)  # beside all fitted costs
LOAD = {"prompt": 20, "tokens": 100, "spread": 0.8}
SERVER = {"rows": 32, "blocks": 2048, "budget": 256}
BURST = LOAD | SERVER | {"longest": 512, "rate": 1e9, "requests": 300, "seed": 0, "stream": False}


class BuildError(Exception):
    """A reason why the playground cannot be built; one sentence that names the fix."""


def pyodide(folder: Path) -> None:
    """Put Pyodide's files into a folder, from npm unless they are there. Raises BuildError."""
    if all(_sha256(folder / name) == PYODIDE[name] for name in PYODIDE):
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", f"pyodide@{VERSION}"]
        try:
            subprocess.run(command, cwd=scratch, check=True, capture_output=True)
            with tarfile.open(Path(scratch) / f"pyodide-{VERSION}.tgz") as files:
                contents = {
                    name: member.read()
                    for name in PYODIDE
                    if (member := files.extractfile(f"package/{name}"))
                }
        except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
            raise BuildError(
                f"pyodide {VERSION} cannot be got from npm ({error}); install Node.js, which has "
                "npm, or try again with a network"
            ) from None
    for name, content in contents.items():
        write(folder / name, content)
    for name, sha256 in PYODIDE.items():
        if _sha256(folder / name) != sha256:
            raise BuildError(f"{name} of pyodide {VERSION} is not the one pinned in {__file__}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def settings(own: Path | None = None) -> tuple[worker.Settings, dict[str, Any]]:
    """Return the settings of each of the costs; and what the page says of them and offers. own: a
    file of costs that is no part of the repository. Raises ConfigError.
    """
    all_settings, offered = {}, {}
    given = {own.name: str(own)} if own else {}  # so a command names a file, and no other costs
    for name in [*given, *sorted(path.stem for path in FOLDER.glob("*.json")), *ESTIMATES]:
        words = given.get(name, name)
        options = parse(["--costs", words, "--modes", "dynamic"])
        config = options.config("dynamic")
        values = config.model_dump(mode="json")
        all_settings[name] = values | {"lora_slots": config.lora_slots}
        usual, ranges = _sliders(config)
        burst = BURST | usual | {"costs": words}
        answers = worker.served("dynamic", burst, {words: all_settings[name]})["answers"]
        rate = 0.8 * len(answers) / max(ended_at for *_, ended_at in answers)
        offered[name] = _menu(name, options.costs, config) | {
            "words": _origin(options.costs),
            "doubts": " ".join(options.costs.source.get("remarks", ())),
            "usual": usual | {"rate": float(f"{rate:.2g}")},
            "ranges": ranges,
        }
    return all_settings, dict(sorted(offered.items(), key=_rank))


def _sliders(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return where sliders begin, and their ranges, in which no request is too long for the server.

    A vLLM begins with its own settings, and has the lengths of a chat.
    """
    longest = min(worker.LONGEST, config.max_model_len // 2)
    usual = LOAD | SERVER | {"longest": longest}
    is_vllm = config.budget_counts == "all"
    if is_vllm:
        usual |= {"prompt": 500, "tokens": 200, "rows": config.max_batch_size}
        usual |= {"blocks": config.n_blocks, "budget": config.token_budget}
    rows, blocks, budget = (usual[name] for name in SERVER)
    return usual, {
        "prompt": (1, 0.8 * longest),
        "tokens": (2, 0.8 * longest),
        "rows": (1, max(256, rows)),
        "blocks": (2 * longest // config.block_size, max(16384, 2 * blocks)),
        # a vLLM's counts the rows that decode, too
        "budget": (max(256, rows) if is_vllm else 16, max(2048, 2 * budget)),
    }


def _menu(name: str, costs: Costs, config: Config) -> dict[str, str]:
    """Return model and GPU as the menus show them, which name the costs of other machines."""
    model = str(costs.source.get("model", config.model)).rpartition("/")[2]
    served = costs.source.get("served")
    if served is None:
        return {"model": model, "gpu": name}
    several = f"{served['gpus']} × " if served["gpus"] > 1 else ""
    gpu = f"{several}{served['gpu'].upper().replace('-', ' ')}"
    return {"model": model.removeprefix("Meta-"), "gpu": gpu}


def _rank(costs: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
    """Order models on GPUs first."""
    name, offered = costs
    return offered["gpu"] == name, offered["model"].casefold(), name


def _origin(costs: Costs) -> str:
    source = costs.source
    if estimate := source.get("estimate"):
        within = f"{1.645 * costs.uncertainty:.0%}"  # for a normal distribution
        return f"an estimate, not measured: {estimate}; nine in ten real runs are within {within}"
    if recording := source.get("recording"):
        return str(recording)
    if not {"hardware", "config", "date"} <= source.keys():
        return f"{costs.name}, of a file that does not say where they were measured"
    hardware, model = source["hardware"], source["config"]["model"]
    return f"{model} as measured on {hardware['gpu'] or hardware['cpu']}, {source['date'][:10]}"


def archive(all_settings: worker.Settings, own: Path | None = None) -> bytes:
    """Return a zip of the modules that `worker` loads, with costs and settings."""
    listing = (
        "import sys, simulate.playground.worker; print(*(m.__file__ for m in sys.modules.values() "
        "if getattr(m, '__file__', None)), sep='\\n')"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", listing], cwd=ROOT, check=True, capture_output=True, encoding="utf-8"
    )
    ours = [Path(line) for line in loaded.stdout.splitlines()]
    files = {
        str(path.relative_to(ROOT)): path.read_bytes()
        for path in [*ours, *FOLDER.glob("*.json")]
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts
    }
    if own:
        files[own.name] = own.read_bytes()
    for path in Path(sortedcontainers.__file__).parent.glob("*.py"):
        files[f"sortedcontainers/{path.name}"] = path.read_bytes()
    files["settings.json"] = json.dumps(all_settings).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as into:
        for name, content in sorted(files.items()):
            into.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # without a date
    return packed.getvalue()


def build(folder: Path, own: Path | None = None) -> int:
    """Write all files; return their bytes. Raises BuildError, ConfigError and OSError."""
    if own and not own.is_file():
        raise BuildError(f"--costs: there is no file {own}; all of results/costs are there anyway")
    pyodide(folder)
    all_settings, shown = settings(own)
    here = Path(__file__).parent
    live = page.read().replace(page.RUNS, page.RUNS.replace("[]", "null"))  # page.js gives them
    files = {name: (here / name).read_bytes() for name in PAGE} | {"live.html": live.encode()}
    files |= {f"live/{name}": page.read(name).encode() for name in page.FILES}
    files |= {"app.zip": archive(all_settings, own), "costs.json": json.dumps(shown).encode()}
    n = len(files["app.zip"]) + sum((folder / name).stat().st_size for name in FETCHED)
    files["worker.js"] = f"const BYTES = {n};\n".encode() + files["worker.js"]
    names = sorted([*files, *PYODIDE])
    for name, content in files.items():
        write(folder / name, content)
    digest = hashlib.sha256("".join(_sha256(folder / name) for name in names).encode())
    version, kept = f"playground-{digest.hexdigest()[:12]}", json.dumps(["./", *names])
    begin = f'const VERSION = "{version}", FILES = {kept};\n'
    write(folder / "offline.js", begin + (here / "offline.js").read_text("utf-8"))
    return sum((folder / name).stat().st_size for name in [*names, "offline.js"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m simulate.playground.build",
        description="Write the playground's static files.",
    )
    port: dict[str, Any] = {"nargs": "?", "type": int, "const": 8600, "metavar": "PORT"}
    default, add = Path(__file__).parent / "site", parser.add_argument
    add("--out", type=Path, default=default, help="(default: simulate/playground/site)")
    add("--costs", type=Path, metavar="FILE", help="costs of your own, besides all others")
    add("--serve", **port, help="then serve them on this machine (port: 8600)")
    arguments = parser.parse_args()
    out = arguments.out
    try:
        size = build(out, arguments.costs)
    except (BuildError, ConfigError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {out} cannot be written ({error.strerror}); choose another folder")
    print(f"{out}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        sys.exit(f"error: more than {MOST_BYTES / 1e6:.0f} MB; find what has grown")
    if arguments.serve is not None:
        serve(out, arguments.serve)


if __name__ == "__main__":
    main()
