"""Tables that programs make. A page has a marker, ``<!-- table: NAME -->``; the site has the table there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from click.testing import CliRunner

from immortal.cli.registration import settings
from immortal.coordinator.notices.__main__ import metrics_table, notices_table
from tests.faults import matrix
from tests.soak import outcomes

FIGURES = Path(__file__).parents[2] / "docs" / "benchmarks" / "figures.txt"
TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "benchmarks": lambda: FIGURES.read_text().splitlines(),
    "faults": lambda: matrix.document().splitlines(),
    "metrics": metrics_table,
    "notices": notices_table,
    "settings": lambda: CliRunner().invoke(settings).output.splitlines(),
    "takeovers": lambda: outcomes.document().splitlines(),
}
_MARKER = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def with_tables(markdown: str) -> str:
    """``markdown`` with each marker replaced by its table. KeyError if there is no table of that name."""
    return _MARKER.sub(lambda found: "\n".join(TABLES[found[1]]()), markdown)
