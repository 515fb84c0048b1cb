"""The launcher: checks the settings, fetches missing files, prints what will be served and becomes
gunicorn, whose worker serves `app.py`; or with --replicas the program that starts Ray Serve.

    python -m server.launch MODE [--replicas N …] [settings]

It resolves the Config once and hands it on; a bad setting ends with exit 2 before any worker boots.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from config.config import DOOMED_FILES, HANDOFF, LOADER, SPARE_FILES, Config, check_port
from config.flags import parse
from config.open_files import allow_open_files
from config.settings import ConfigError
from generate.auto import resolve, warnings
from generate.tokenizer import TokenizerUnavailable, load_tokenizer
from generate.weights import WeightsUnavailable, locate
from server.observers.line_writer import open_log
from server.processes.spawning import spawn

OF_REPLICAS = ("--replicas", "--router", "--autoscale")  # flags of server.replicas.serve


def starts_replicas(argv: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in OF_REPLICAS for word in argv)


def main(argv: Sequence[str], loader: str = "generate.loading:load_generator") -> None:
    """Become gunicorn, or the program that starts replicas. loader: the name of what makes the
    engine, a `serving.Load`.
    """
    if starts_replicas(argv):
        os.execv(sys.executable, [sys.executable, "-m", "server.replicas.serve", *argv])
    try:
        config = parse(argv, resolve)
        load_tokenizer(config.tokenizer)
        locate(config)
        check_port(config)
        _check_files(config)
    except (ConfigError, TokenizerUnavailable, WeightsUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for warning in warnings(config):
        print(f"warning: {warning}", file=sys.stderr)
    print(_served(config), file=sys.stderr)
    if config.host == "127.0.0.1":
        message = "other machines cannot connect; --host 0.0.0.0 lets them"
        print(message, file=sys.stderr)
    tempfile.gettempdir()  # gunicorn needs it, and ends with a traceback without
    _allow_files(config)
    _clear_gunicorns_own()
    os.environ |= {HANDOFF: config.handoff(), LOADER: loader}
    command = [sys.executable, "-m", "gunicorn", "--config", "server/gunicorn_conf.py"]
    os.chdir(Path(__file__).resolve().parents[1])
    if config.http_processes > 1:
        spawn()
    os.execv(sys.executable, [*command, "app:serve()"])


def _served(config: Config) -> str:
    kv = "no KV cache"
    if config.generator != "naive":
        n_blocks = str(config.n_blocks) if config.pool_is_known else "what memory is left in"
        kv = f"{n_blocks} KV blocks of {config.block_size} tokens"
    return (
        f"serving {config.model} ({config.shape.parameters / 1e6:.1f}M parameters, {config.dtype}, "
        f"{config.device}, {config.threads} threads, attention {config.attention}, linear "
        f"{config.linear}, sampler {config.sampler}) in mode {config.mode}: at most "
        f"{config.max_batch_size} rows, {kv}"
    )


def _clear_gunicorns_own() -> None:
    """Delete gunicorn's variables, which it reads before gunicorn_conf.py: a second worker would be
    a second engine.
    """
    for name in sorted(os.environ):
        if name.startswith("GUNICORN_") or name in ("WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS"):
            print(
                f"warning: {name} is gunicorn's own and is ignored here; the settings are flags or "
                "EB_… (--help)",
                file=sys.stderr,
            )
            del os.environ[name]


def _allow_files(config: Config) -> None:
    """Raise the limit of open files; warn where it is too low for all connections."""
    wanted = config.http_connections + SPARE_FILES
    if (most := allow_open_files(wanted + DOOMED_FILES)) < wanted:
        print(
            f"warning: this system allows {most:,} open files, so at most "
            f"{config.connections_within(most):,} connections are open at once instead of "
            f"{config.http_connections:,}; raise `ulimit -n` to {wanted:,}",
            file=sys.stderr,
        )


def _check_files(config: Config) -> None:
    """Raise ConfigError if a file that the server appends to cannot be written."""
    files = (config.request_log, "request log"), (config.record, "recording")
    for (path, what), setting in zip(files, ("--request-log", "--record")):
        if path is None:
            continue
        try:
            file = open_log(path)
        except OSError as error:
            raise ConfigError(
                f"the {what} {path} cannot be written ({error.strerror}); choose another {setting}"
            ) from None
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            # gunicorn's master keeps it open: a close would be the end to the pipe's reader
            os.set_inheritable(file, True)
        else:
            os.close(file)


if __name__ == "__main__":
    main(sys.argv[1:])
