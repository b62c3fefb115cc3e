"""Hook of MkDocs: pages that are no files of docs/, tables that programs make, and links between all pages.

README.md is the first page. Files without a page (examples, the licence) are named, not linked: the site is read beside
the sources, and knows no address of these. A page can have a marker, ``<!-- table: NAME -->``; the site shows that
table in its place.
"""

from __future__ import annotations

import ast
import importlib
import posixpath
import re
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from types import ModuleType
from typing import Any

from click.testing import CliRunner
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from immortal.cli.registration import settings
from immortal.coordinator.notices.__main__ import metrics_table, notices_table
from immortal.protocol.call_permissions import ROWS
from scripts.docs_site.roles import without_roles
from tests.faults import matrix
from tests.soak import outcomes

BESIDE = {"index.md": "README.md", "CHANGELOG.md": "CHANGELOG.md", "SECURITY.md": "SECURITY.md"}
"""Pages that are files at the root."""

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def linked(markdown: str, page: str, pages: Set[str], is_file: Callable[[str], bool]) -> str:
    """Return ``markdown`` of ``page`` with the links of the site; code stays as it is.

    ``is_file``: returns True if the repository has that path. A link to a missing file stays, and fails the build.
    """

    def replaced(found: re.Match[str]) -> str:
        text, target = found.groups()
        if target.startswith(("#", "http:", "https:", "mailto:")):
            return found[0]
        path, hash_, anchor = target.partition("#")
        source = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), path))
        there = page_of(source)
        if there not in pages and is_file(source):
            return text if source in text else f"{text} (`{source}`)"
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{hash_}{anchor})"

    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in _FENCED.split(markdown))


def source_of(page: str) -> str:
    """Return the file of the repository that a page is made of."""
    return BESIDE.get(page, f"docs/{page}")


def page_of(source: str) -> str:
    """Return the page of a file of the repository, if it had one."""
    at_root = {file: page for page, file in BESIDE.items()}
    return at_root.get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else f"../{source}")


_ROOT = Path(__file__).parents[2]

FIGURES = _ROOT / "docs" / "benchmarks" / "figures.txt"

VECTORS = _ROOT / "tests" / "vectors" / "wire.txt"


def bytes_tables() -> dict[str, list[str]]:
    """Return the examples of bytes in WIRE.md by the names of their markers."""
    parts = re.findall(r"^= (\w+)\n((?:(?!= ).*\n)+)", VECTORS.read_text(), re.MULTILINE)
    return {f"bytes_{name}": ["```bytes", *lines.splitlines(), "```"] for name, lines in parts}


def folders_table() -> Iterable[str]:
    """Yield the folders of coordinator and SDK, with the first paragraphs of their docstrings."""
    yield "| folder | content |"
    yield "| --- | --- |"
    for room in ("coordinator", "appsdk"):
        for path in sorted((_ROOT / room).glob("**/__init__.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            if docstring and path.parent.parent != _ROOT:
                content = re.sub(r":\w+:(?=`)", "", " ".join(docstring.partition("\n\n")[0].split()))
                yield f"| `{path.parent.relative_to(_ROOT)}/` | {content} |"


def senders_table() -> Iterable[str]:
    """Yield the table of the messages that each sender can send."""
    yield "| from | to | in | kinds | RPC types | method IDs | caller |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        kinds, types = (", ".join(map(str, numbers)) for numbers in (row.kinds, row.rpc_types))
        yield f"| {row.sender} | {row.receiver} | {row.carried} | {kinds} | {types} | {row.method_ids} | {row.caller} |"


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "benchmarks": lambda: FIGURES.read_text().splitlines(),
    "faults": lambda: matrix.document().splitlines(),
    "folders": folders_table,
    "metrics": metrics_table,
    "notices": notices_table,
    "senders": senders_table,
    "settings": lambda: CliRunner().invoke(settings).output.splitlines(),
    "takeovers": lambda: outcomes.document().splitlines(),
    **{name: lines.copy for name, lines in bytes_tables().items()},
}

_MARKER = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def with_tables(markdown: str) -> str:
    """Return ``markdown`` with each marker replaced by its table. Raises KeyError for an unknown table."""
    return _MARKER.sub(lambda found: "\n".join(TABLES[found[1]]()), markdown)


ROOT = Path(__file__).parents[2]

REFERENCE = {
    "immortal": "Services",
    "immortal.errors": "Errors of services",
    "immortal.client": "Callers from outside",
    "immortal.embedded": "One process",
    "immortal.testing": "Tests",
    "immortal.log": "Logs",
    "immortal.messenger": "The messenger",
    "immortal.replay": "Replays",
    "immortal.pipeline": "Pipeline",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for module, page in reference_pages().items():
        files.append(File.generated(config, _reference(module), content=page))
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert config.nav is not None
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference.append({"API": [{title: _reference(module)} for module, title in REFERENCE.items()]})
    project = len(config.nav) - 1  # the last section stays the last
    config.nav.insert(project, {"Decisions": [f"decisions/{name}" for name in decisions]})
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = with_tables(markdown)
    return linked(markdown, page.file.src_uri, {file.src_uri for file in files}, lambda path: (ROOT / path).exists())


def reference_pages() -> dict[str, str]:
    """Return a page for each public module: its ``__all__``, or all that it defines. Each name is on one page."""
    pages, seen = {}, set()
    for name, title in REFERENCE.items():
        module: Any = importlib.import_module(name)
        offered = [one for one in _offered(module) if id(getattr(module, one)) not in seen]
        seen.update(id(getattr(module, one)) for one in offered)
        entries = "\n\n".join(f"::: {name}.{one}" for one in sorted(offered, key=str.lower))
        pages[name] = f"# {title}: `{name}`\n\n{without_roles(module.__doc__ or '')}\n\n{entries}\n"
    return pages


def _offered(module: Any) -> list[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        names = [name for name in own if not name.startswith("_")]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


def _reference(module: str) -> str:
    return f"reference/{module}.md"
