"""Policies, orders and victims in users' files: FILE.py:NAME wherever one of them is named.

Their fields are settings, so `config.settings` loads them before it reads the tables: the files
that a command line, EB_MODE, EB_ORDER and EB_VICTIM name, and in a process started by another one
(a server's worker) those that the first has loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from scheduling.inference import Inference
from scheduling.policies import MODES, ORDERS, VICTIMS, Order, Plan, Policy, Victim, chosen

WORD = re.compile(r"[^\s'\",=]+\.py:[A-Za-z_]\w*")  # FILE.py:NAME, also within a --variant
HANDED_ON = "EFFECTIVE_BATCHING_FILES"  # the variable that hands paths to processes started later
# what users' code raises, but for Ctrl-C: sys.exit in a policy must not end a program as if well
FAULTS = (Exception, SystemExit, GeneratorExit)


class UserFileError(Exception):
    """A file or class that is no policy, order or victim; the message names the fix."""


class Source(NamedTuple):
    """Origin of a class: its FILE.py:NAME, and the first digits of its file's SHA-256."""

    word: str
    sha256: str


LONGEST_S = 60.0  # after which a plan is taken to go on for ever
Kind = type[Policy] | type[Order] | type[Victim]
SOURCES: dict[Kind, Source] = {}
PROBLEMS: dict[str, str] = {}  # why a FILE.py:NAME cannot be used


def words(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return each FILE.py:NAME of a command line and of the variables that name one; after
    --policy, FILE.py is all that the file defines.
    """
    held = [text for flag, text in itertools.pairwise(arguments) if flag == "--policy"]
    named = [text for text in held if Path(text.rpartition(":")[0]).is_file()]  # with spaces, too
    texts = [text for text in arguments if text not in named]
    texts += [environ.get(f"EB_{name}", "") for name in ("MODE", "ORDER", "VICTIM")]
    named += [word for text in texts for word in WORD.findall(text)]
    for path in held:
        if path.endswith(".py"):
            try:
                named += offered(Path(path)) or [path]
            except BaseException as error:
                PROBLEMS[path] = f"{path} cannot be used: {described(error, path)}"
    return list(dict.fromkeys(named))


def load(
    named: Iterable[str],
    environ: MutableMapping[str, str],
    modes: dict[str, Any] = MODES,
    orders: dict[str, Any] = ORDERS,
    victims: dict[str, Any] = VICTIMS,
) -> None:
    """Add the class of each FILE.py:NAME, and of each that the environment hands on, to its table,
    under that name. environ: hands the paths on to processes started later.
    """
    paths: dict[str, str] = json.loads(environ.get(HANDED_ON, "{}"))
    for word in named:
        path = Path(word.rpartition(":")[0])
        paths[word] = str((path.expanduser() if path.parts[0] == "~" else path).resolve())
    if paths:
        environ[HANDED_ON] = json.dumps(paths)
    for word, file in paths.items():
        try:
            kind = _class_of(word, Path(file))
            _check(kind, [*modes.values(), *orders.values(), *victims.values()])
        except BaseException as error:  # whatever a user's file does
            PROBLEMS[word] = f"{word} cannot be used: {described(error, file)}"
        else:
            tables = {Policy: modes, Order: orders, Victim: victims}
            next(tables[base] for base in tables if issubclass(kind, base))[word] = kind


def described(error: BaseException, *paths: str) -> str:
    """Return an exception in words, with the last line that it passed of one of the files."""
    passed = _passed(error, paths)
    where = f" ({Path(passed[-1].filename).name}, line {passed[-1].lineno})" if passed else ""
    kind = "" if isinstance(error, UserFileError) else f"{type(error).__name__}: "
    try:
        text = str(error)
    except BaseException as another:  # its text is a user's code, too
        text = f"its text is not shown, for its __str__ raises {type(another).__name__}"
    return f"{kind}{text}".removesuffix(": ") + where


def _passed(error: BaseException, paths: Collection[str]) -> list[traceback.FrameSummary]:
    """Return the lines of these files that an exception passed."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename in paths]


def reason(error: BaseException, *kinds: type) -> str | None:
    """Return a sentence about what one of users' kinds raised; None if none is a user's, or for
    Ctrl-C: only where that is ignored can a KeyboardInterrupt be known to be a file's own.
    """
    users = [kind for kind in kinds if kind in SOURCES]
    files = [file_of(kind) for kind in users]
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    is_ctrl_c = isinstance(error, KeyboardInterrupt) and not (ignored and _passed(error, files))
    if not users or is_ctrl_c:
        return None
    names = " with ".join(SOURCES[kind].word for kind in users)
    return f"{names} failed: {described(error, *files)}"


class Deciding:
    """Context of calls of a policy and its order and victim, of these kinds: since when one runs,
    and what it raised, in words.
    """

    def __init__(self, kinds: Sequence[type], clock: Callable[[], float]):
        self._users = [kind for kind in kinds if kind in SOURCES]  # classes of users' files
        self._names = " with ".join(SOURCES[kind].word for kind in self._users) or kinds[0].__name__
        self._clock = clock
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = self._clock()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise UserFileError in place of what ends a thread, such as SystemExit."""
        self._since = None
        if error is not None and not isinstance(error, Exception):
            raise UserFileError(described(error)).with_traceback(error.__traceback__)

    def hangs_because(self) -> str | None:
        """Return a sentence about a call that has run for LONGEST_S. Takes no lock."""
        since = self._since
        if since is None or self._clock() - since <= LONGEST_S:
            return None
        return f"a plan of {self._names} has been running for more than {LONGEST_S:.0f} s"

    def in_words(self, error: BaseException, deciding: bool) -> str:
        """Return what failed, with the line of a user's file; deciding: not in the engine."""
        why = reason(error, *self._users) if deciding else None
        return why or described(error, *map(file_of, self._users))


def check_plan(plan: Plan, policy: Policy) -> None:
    """Raise TypeError for what a user's policy returned that is no plan, or has wrong fields."""
    if type(policy) not in SOURCES:
        return
    if not isinstance(plan, Plan):
        raise TypeError(f"plan returned {plan!r}; it returns a Plan")
    for name, tokens in ("run", "tokens to compute"), ("admit", "tokens to reserve"):
        pairs = getattr(plan, name)
        if not isinstance(pairs, Collection) or any(
            not isinstance(each, (tuple, list)) or [*map(type, each)] != [Inference, int]
            for each in pairs
        ):
            raise TypeError(
                f"Plan.{name} is a list of pairs, as [(inference, {tokens})], and not {pairs!r:.60}"
            )
    preempt = plan.preempt
    if not isinstance(preempt, Collection) or not all(isinstance(i, Inference) for i in preempt):
        raise TypeError(f"Plan.preempt is a list of inferences, and not {preempt!r:.60}")
    if plan.wake_at is not None and not -inf < plan.wake_at < inf:
        raise ValueError(f"Plan.wake_at is a time in seconds or None, and not {plan.wake_at!r}")


def offered(path: Path) -> list[str]:
    """Return the FILE.py:NAME of each policy, order and victim that a file defines."""
    module, _ = _module(path)
    return [
        f"{path}:{name}"
        for name, each in vars(module).items()
        if isinstance(each, type)
        and issubclass(each, (Policy, Order, Victim))
        and each.__module__ == module.__name__
    ]


def problem(name: str | None) -> str | None:
    """Return why a mode, order or victim of this name, if it is one of a file, cannot be used."""
    loaded = [source.word for source in SOURCES.values()]
    if name and name not in loaded and re.search(r"[\s'\",=].*\.py:\w", name):
        return (
            f"{name!r} cannot be used: its path must have no space, quote, comma or =; "
            f"run the command in its folder, as {Path(name).name}"
        )
    return PROBLEMS.get(name or "")


def misfit(settings: Any) -> str | None:
    """Return why a user's policy, order or victim cannot be used with a server's settings."""
    tables: list[dict[str, Any]] = [MODES, ORDERS, VICTIMS]
    for table, name in zip(tables, (settings.mode, settings.order, settings.victim)):
        if table[name] in SOURCES:
            try:
                _try(chosen(table, name, settings), settings.max_batch_size)
            except BaseException as error:
                return f"{name} cannot be used: {described(error, file_of(table[name]))}"
    return None


def absent(settings: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence on the first FILE.py:NAME of servers' settings that is not loaded; None if
    there is none.
    """
    known = {source.word for source in SOURCES.values()}
    for name in (str(each.get(key)) for each in settings for key in ("mode", "order", "victim")):
        if WORD.fullmatch(name) and name not in known:
            fix = f"{name} is not loaded; set EB_MODE={name} in the environment"
            return PROBLEMS.get(name, fix)
    return None


def file_of(kind: type) -> str:
    """Return the path of the file that defines a class."""
    return str(sys.modules[kind.__module__].__file__)


def _class_of(word: str, path: Path) -> Kind:
    module, sha256 = _module(path)
    name = word.rpartition(":")[2]
    kind = vars(module).get(name)
    if not (isinstance(kind, type) and issubclass(kind, (Policy, Order, Victim))):
        raise UserFileError(
            f"{path} defines no subclass of Policy, Order or Victim named {name}; it has "
            f"{', '.join(offered(path)) or 'none at all'}"
        )
    for each in reversed(kind.__mro__):
        if each.__module__ == module.__name__ and "__dataclass_fields__" not in vars(each):
            dataclass(frozen=True)(each)
    SOURCES[kind] = Source(word, sha256)
    return kind


def _module(path: Path) -> tuple[ModuleType, str]:
    """Import a file; return its module, and the first digits of the file's SHA-256."""
    if not path.is_file():
        raise UserFileError(f"there is no file {path}")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()[:10]
    name = f"user_{path.stem}_{sha256}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.append(str(path.resolve().parent))  # for files beside it, which hide none of ours
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name], sha256


def _check(kind: Kind, others: Iterable[type[Any]]) -> None:
    """Raise UserFileError for a class whose fields cannot be settings, or that cannot be made."""
    assert is_dataclass(kind)
    known = {each.name: each for other in others for each in fields(other)}
    for each in fields(kind):
        if "limits" not in each.metadata:
            raise UserFileError(f"write its field {each.name} as setting(default, 'what it means')")
        if each.name in known and known[each.name] is not kind.__dataclass_fields__[each.name]:
            raise UserFileError(f"its field {each.name} is a setting already; give it another name")
    _try(kind(), 1)


def _try(made: Policy | Order | Victim, rows: int) -> None:
    """Make the calls that come before any request. Raises what they raise."""
    _ = [memory() for memory in made.remembers]
    if isinstance(made, Policy):
        range(made.max_rows(rows)), range(made.n_bins), "".join(made.warnings(rows))
