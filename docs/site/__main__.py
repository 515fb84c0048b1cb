"""The documentation as a site of static files, in runs/site/html:  ./docs.sh [--build] [--port N]

Pages keep their paths in the repository, so that their links hold. Code that a page links to
becomes a page as well. Wide commands become several lines, and their comments come before them.
MkDocs builds the site, and fails at a link to nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from client.machine import git_environ
from client.saving import write
from simulate.playground.serve import serve

ROOT = Path(__file__).resolve().parents[2]
HERE, OUT = Path(__file__).parent, ROOT / "runs" / "site"
PAGES, BUILT = OUT / "pages", OUT / "html"  # as in mkdocs.yml
LEFT_OUT = ("tests/", "docs/site/", ".")
FIGURES = (".png", ".gif", ".svg")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FENCE = re.compile(r"^(```\w+) .+$", re.MULTILINE)  # that names a run, which MkDocs does not read
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
QUOTED = re.compile("'[^']*'|\"[^\"]*\"")
UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
COLUMNS = 88  # columns of code that a page has at 1,280 px
# pages need the room of columns beside them: a wide drawing, long cells, figures' small letters
HIDDEN = {
    "README.md": ["navigation"],
    "docs/field.md": ["navigation", "toc"],
    "docs/arena.md": ["navigation", "toc"],
    "results/arena/arena.md": ["navigation", "toc"],
}
SEARCHED = {  # what readers look for that is in no heading of the page, or in more of other pages
    page: words.split(", ")
    for page, words in {
        "docs/measuring.md": "overload, slow request, csv, pandas, resume, price, regression, CI",
        "docs/scaling.md": "docker, kubernetes",
        "docs/gpu.md": "energy",
    }.items()
}
CODE = {"search": {"boost": 0.1}}  # guides are found before it
LANGUAGES = {"py": "python", "sh": "bash", "cpp": "cpp"}
CLAIMS = """---
hide: [navigation, toc]
---
# Claims

Papers and other systems claim something for each of these policies. We ran each rule here and give
the verdict on its claim, and the number with its interval. Numbers come from the files
in [results](results/README.md). A click on a column's head sorts the table by it.

| question | policy | command, after `./server.sh` | claim | verdict | found here |
|---|---|---|---|---|---|
"""


class Pages:
    """The repository's pages and figures, written to a folder as the site has them."""

    def __init__(self, tracked: set[str], folder: Path):
        """tracked: paths of files, relative to the repository."""
        self._tracked, self._folder = tracked, folder
        self._code: set[str] = set()  # files and folders that pages link to

    def write(self) -> None:
        for path in sorted(self._tracked):
            if path.startswith(LEFT_OUT):
                continue
            if path.endswith(".md"):
                text = FENCE.sub(r"\1", COMMENT.sub("", (ROOT / path).read_text("utf-8")))
                text = LINK.sub(lambda link, page=path: self._target(page, link[1]), text)  # type: ignore[misc]
                text = COMMANDS.sub(lambda block: f"```bash\n{folded(block[1])}```", text)
                settings = {"hide": HIDDEN.get(path), "tags": SEARCHED.get(path)}
                self._write("index.md" if path == "README.md" else path, text, **settings)
                if path == "docs/field.md":
                    self._write("claims.md", claims(text))
            elif path.endswith(FIGURES):
                (self._folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, self._folder / path)
        for path in sorted(self._code):
            self._write(f"{path}.md", self._shown(path), **CODE)

    def _target(self, page: str, link: str) -> str:
        """Return where a page's link leads on the site; one to nothing stays as it is."""
        folder = posixpath.dirname(page)
        path = posixpath.normpath(posixpath.join(folder, link))
        if path == "README.md":
            return posixpath.relpath("index.md", folder or ".")
        if f"{path}/README.md" in self._tracked:
            return f"{link.rstrip('/')}/README.md"
        if path.endswith((".md", *FIGURES)) or not (ROOT / path).exists():
            return link
        self._code.add(path)
        return f"{link.rstrip('/')}.md"

    def _shown(self, path: str) -> str:
        """Return a file's text, or the names of a folder's files, as a page."""
        if path not in self._tracked:
            names = sorted(each for each in self._tracked if posixpath.dirname(each) == path)
            return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
        try:
            text = (ROOT / path).read_text("utf-8")
        except UnicodeDecodeError:
            text = "not text"
        return f"# {path}\n\n````{LANGUAGES.get(path.rpartition('.')[2], 'text')}\n{text}\n````\n"

    def _write(self, path: str, text: str, **settings: Any) -> None:
        """settings: the page's own, for MkDocs."""
        given = ((name, value) for name, value in settings.items() if value)
        front = "".join(f"{name}: {json.dumps(value)}\n" for name, value in given)
        write(self._folder / path, f"---\n{front}---\n{text}" if front else text)


def folded(commands: str) -> str:
    """Return a block's commands, none wider than COLUMNS unless one of its flags is."""
    lines = commands.splitlines()
    if all(len(line) <= COLUMNS for line in lines):
        return commands
    shown: list[str] = []
    for line in lines:
        command, _, comment = line.partition(" #")
        if comment:
            shown.append(f"#{comment}")
        if not line.startswith(("#", " ")) and not line.endswith("\\"):  # else a part of one
            # its quotations, and each flag with its value, stay together
            command = QUOTED.sub(lambda quoted: quoted[0].replace(" ", "\0"), command.rstrip())
            command = re.sub(r"(?<= )(-\S+) (?=[^-\s])", "\\1\0", command)
            parts = textwrap.wrap(command, COLUMNS - 2, subsequent_indent="    ", **UNBROKEN)
            command = " \\\n".join(parts).replace("\0", " ")
        shown.append(command)
    return "\n".join(shown) + "\n"


def claims(field: str) -> str:
    """Return the claims of the field's map, a row each, with its question and its verdict."""
    rows, question = [], ""
    table = field[field.index("| their word |") :].split("\n\n")[0].splitlines()[2:]
    for line in table:
        word, here, _, claim, found = (cell.strip() for cell in line.strip("|").split("|"))
        if not here:
            question = word.strip("*")
        elif claim not in ("–", "") and found not in ("–", ""):
            bold, verdict, rest = found.split("**", 2) if "**" in found else ("", found, "")
            rest = rest.lstrip(": ,")
            rows.append(f"| {question} | {word} | {here} | {claim} | {bold}{verdict} | {rest} |")
    from_root = lambda link: posixpath.normpath(posixpath.join("docs", link[1]))  # noqa: E731
    return CLAIMS + LINK.sub(from_root, "\n".join(rows))


def tracked() -> set[str]:
    """Return the repository's files, new ones too, without those that git ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    how: dict[str, Any] = {"encoding": "utf-8", "env": git_environ()}
    listed = subprocess.run(command, capture_output=True, check=True, **how).stdout
    return {path for path in listed.splitlines() if (ROOT / path).is_file()}


def build() -> None:
    """Build the site anew. Raises CalledProcessError, which has another program's message."""
    shutil.rmtree(OUT, ignore_errors=True)
    Pages(tracked(), PAGES).write()
    shutil.copytree(HERE / "assets", PAGES / "assets")
    shutil.copy(HERE / "try.md", PAGES)
    trace = ["--arrival", "poisson:45", "--numsamples", "120", "--max-batch-size", "16"]
    _run("simulate", "--modes", "static,dynamic", *trace, "--out", str(OUT / "run"))
    _run("simulate.saved_page", str(OUT / "run"), "--out", str(PAGES / "assets" / "live.html"))
    _run("simulate.playground.build")  # it keeps what it got from npm there
    shutil.copytree(ROOT / "simulate" / "playground" / "site", PAGES / "playground")
    shutil.copy(HERE / "mkdocs.yml", OUT)
    make_html()


def make_html() -> None:
    """Make the pages HTML. Raises CalledProcessError at a link to nothing."""
    # not --quiet, which hides warnings from `strict`, too
    _run("mkdocs", "build", "--config-file", str(OUT / "mkdocs.yml"))


def _run(module: str, *arguments: str) -> None:
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=environ)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="./docs.sh", description="Build the documentation as a site in runs/site/html."
    )
    parser.add_argument("--build", action="store_true", help="build it, and do not show it")
    parser.add_argument("--port", type=int, default=8700, help="to show it at (default: 8700)")
    arguments = parser.parse_args()
    try:
        build()
        if not arguments.build:
            serve(BUILT, arguments.port)
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
