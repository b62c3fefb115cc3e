"""Counts the lines of plain.py that had to change to make it durable: python lines.py [PLAIN DURABLE]

A line of code of DURABLE counts if PLAIN lacks it, also if it was only moved or indented further. Blank lines, comments
and docstrings are no code. Lines of PLAIN that DURABLE lacks are printed as well.
"""

from __future__ import annotations

import ast
import difflib
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Changes(NamedTuple):
    plain_count: int
    durable_count: int
    new: list[str]
    gone: list[str]


def code_lines(source: str) -> list[str]:
    """Return the lines with code, with their indentation."""
    lines = source.splitlines()
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            numbers.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return [lines[number - 1].rstrip() for number in sorted(numbers)]


def compare(plain: Path, durable: Path) -> Changes:
    before, after = code_lines(plain.read_text()), code_lines(durable.read_text())
    marked = list(difflib.ndiff(before, after))
    new = [line[2:] for line in marked if line.startswith("+ ")]
    gone = [line[2:] for line in marked if line.startswith("- ")]
    return Changes(len(before), len(after), new, gone)


def main() -> None:
    plain, durable = map(Path, sys.argv[1:3]) if len(sys.argv) == 3 else (HERE / "plain.py", HERE / "durable.py")
    changes = compare(plain, durable)
    print(f"{plain.name}: {changes.plain_count} lines of code, {durable.name}: {changes.durable_count}")
    print(f"new or changed: {len(changes.new)}")
    for line in changes.new:
        print(f"+ {line}")
    print(f"gone, or changed: {len(changes.gone)}")
    for line in changes.gone:
        print(f"- {line}")


if __name__ == "__main__":
    main()
