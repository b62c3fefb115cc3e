"""The docs as a site: its links, and what a browser would ask other hosts for. scripts/docs builds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docs_site.links import BESIDE, linked
from scripts.docs_site.offline import findings, loaded_by

ROOT = Path(__file__).parents[2]
PAGES = {"index.md", "CHANGELOG.md", "guarantees.md", "how-to/sdk.md", "how-to/async.md"}


@pytest.mark.parametrize(
    ("page", "markdown", "shown"),
    [
        ("index.md", "[g](docs/how-to/sdk.md#state)", "[g](how-to/sdk.md#state)"),
        ("how-to/sdk.md", "[g](../guarantees.md)", "[g](../guarantees.md)"),
        ("how-to/sdk.md", "[a](async.md), [b](#here)", "[a](async.md), [b](#here)"),
        ("how-to/sdk.md", "[the shop](../../examples/http)", "the shop (`examples/http`)"),
        ("how-to/sdk.md", "[first](../../README.md)", "[first](../index.md)"),
        ("CHANGELOG.md", "[sdk.md](docs/how-to/sdk.md)", "[sdk.md](how-to/sdk.md)"),
        ("index.md", "[LICENSE](LICENSE)", "LICENSE"),
        ("index.md", "[x](docs/no-such.md)", "[x](no-such.md)"),
        ("index.md", "```\n[x](docs/y.md)\n```\n[LICENSE](LICENSE)", "```\n[x](docs/y.md)\n```\nLICENSE"),
    ],
)
def test_links(page: str, markdown: str, shown: str) -> None:
    assert linked(markdown, page, PAGES, lambda path: (ROOT / path).exists()) == shown


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<img src="HTTP://img.example/x.png">',
        '<style>@import "https://fonts.example/css";</style>',
        '<p style="background: url(https://img.example/x.png)">x</p>',
        '<pre class="mermaid">graph</pre>',
    ],
)
def test_what_another_host_is_asked_for(html: str, tmp_path: Path) -> None:
    assert len(loaded_by(html, ".html")) == 1
    (tmp_path / "page.html").write_text(html)
    assert [one.partition(":")[0] for one in findings(tmp_path)] == ["page.html"]


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://example.org">a link that a reader may follow</a>',
        '<script src="assets/x.js"></script><img src="../x.png"><style>p { background: url(x.png) }</style>',
        "<code>https://example.org</code>",
    ],
)
def test_what_asks_nobody(html: str) -> None:
    assert loaded_by(html, ".html") == []


def test_every_page_is_in_the_navigation() -> None:
    """MkDocs looks as well, where it is installed."""
    named = set(re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    made = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert named == {page for page in made if not page.startswith("decisions/")} | set(BESIDE)


def test_each_input_that_is_promised_names_tests_that_there_are() -> None:
    table = (ROOT / "tests" / "requirements" / "inputs.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert rows
    assert len(rows) == len(set(rows))
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert named, row
        assert [path for path in named if not (ROOT / path).exists()] == [], row


def test_the_headings_that_messages_name_are_there() -> None:
    named = re.compile(r"\((docs/[\w/-]+\.md), ([^)]+)\)")
    found = named.findall("".join(path.read_text() for path in ROOT.glob("appsdk/**/*.py")))
    assert found
    for page, heading in found:
        assert f"## {heading}\n" in (ROOT / page).read_text(), (page, heading)
