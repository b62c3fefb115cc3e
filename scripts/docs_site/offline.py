"""Checks that a built site asks no other host and has no code of its tools' makers that would.

A link that a reader may follow is none of that: what the browser loads by itself is looked at, and what scripts fetch.

    python -m scripts.docs_site.offline FOLDER
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADS = {
    ("link", "href"), ("script", "src"), ("img", "src"), ("img", "srcset"), ("iframe", "src"), ("source", "src"),
    ("video", "src"), ("audio", "src"), ("embed", "src"), ("object", "data"), ("form", "action"), ("use", "href"),
}  # fmt: skip
_REMOTE = re.compile(r"(?:https?:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?\s*((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        for name, value in attrs:
            is_loaded = (tag, name) in _LOADS and ("rel", "canonical") not in attrs
            if is_loaded and value is not None and _REMOTE.match(value):
                self.loaded.append(f"<{tag} {name}={value!r}>")
            elif name == "class" and value is not None and "mermaid" in value.split():
                self.loaded.append("a diagram of mermaid, which the theme gets from another host")
            elif name == "style" and value is not None:
                self.loaded += _IN_STYLE.findall(value)

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loaded += _IN_STYLE.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def loaded_by(text: str, suffix: str) -> list[str]:
    """List what a page or a style sheet makes the browser load from another host."""
    if suffix == ".css":
        return _IN_STYLE.findall(text)
    page = _Page()
    page.feed(text)
    page.close()
    return page.loaded


def findings(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            for one in loaded_by(path.read_text(), path.suffix):
                yield f"{path.relative_to(site)}: {one}"


def main() -> int:
    site = Path(sys.argv[1])
    pages = len(list(site.rglob("*.html")))
    if not pages:
        print(f"error: there are no pages in {site}: 'scripts/docs' makes them", file=sys.stderr)
        return 1
    found = list(findings(site))
    for one in found:
        print(f"asks another host: {one}", file=sys.stderr)
    print(f"docs: {pages} pages in {site}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
