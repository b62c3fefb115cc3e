"""Tables and pages that programs make. A page has a marker, ``<!-- table: NAME -->``; the site has the table there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from click.testing import CliRunner

from immortal.cli.registration import settings
from immortal.coordinator.notices.__main__ import metrics_table, notices_table
from immortal.protocol.call_permissions import ROWS
from tests.faults import matrix
from tests.soak import outcomes

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
    """Yield the table of what each sender may send."""
    yield "| from | to | in | kinds | RPC types | method IDs | caller |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        kinds, types = (", ".join(map(str, numbers)) for numbers in (row.kinds, row.rpc_types))
        yield f"| {row.sender} | {row.receiver} | {row.carried} | {kinds} | {types} | {row.method_ids} | {row.caller} |"


def recipes_table() -> Iterable[str]:
    """Yield the table of recipes, with links to their pages."""
    yield "| recipe | content |"
    yield "| --- | --- |"
    for name, page in recipe_pages().items():
        title, content = page[2:].split("\n")[:3:2]
        yield f"| [{title}](recipes/{name}.md) | {content} |"


def recipe_pages() -> dict[str, str]:
    """Return a page for each recipe: its docstring, the commands at the end of that, and the program."""
    pages = {}
    for path in sorted((_ROOT / "examples" / "recipes").glob("*.py")):
        docstring, program = path.read_text().removeprefix('"""').split('"""\n', 1)
        title, text = docstring.strip().split(": ", 1)
        text, commands = text.rsplit("\n\n", 1)
        code = f"```sh\n{commands}\n```\n\n```python\n{program.strip()}\n```\n"
        pages[path.stem] = f"# {title}\n\n{text[0].upper()}{text[1:]}\n\n{code}"
    return pages


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "benchmarks": lambda: FIGURES.read_text().splitlines(),
    "faults": lambda: matrix.document().splitlines(),
    "folders": folders_table,
    "metrics": metrics_table,
    "notices": notices_table,
    "recipes": recipes_table,
    "senders": senders_table,
    "settings": lambda: CliRunner().invoke(settings).output.splitlines(),
    "takeovers": lambda: outcomes.document().splitlines(),
    **{name: lines.copy for name, lines in bytes_tables().items()},
}
_MARKER = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def with_tables(markdown: str) -> str:
    """``markdown`` with each marker replaced by its table. KeyError if there is no table of that name."""
    return _MARKER.sub(lambda found: "\n".join(TABLES[found[1]]()), markdown)
