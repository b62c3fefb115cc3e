"""Links between the files of the repository, as links between the pages of the site.

README.md is the first page. Files that no page is made of (examples, the licence) are named, not linked: the site is
read beside the sources, and knows no address of these.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Set

BESIDE = {"index.md": "README.md", "CHANGELOG.md": "CHANGELOG.md", "SECURITY.md": "SECURITY.md"}
"""Pages that are files at the root."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def linked(markdown: str, page: str, pages: Set[str], is_file: Callable[[str], bool]) -> str:
    """``markdown`` of ``page`` with the links that the site has; code is left as it is.

    ``is_file``: whether there is a file or folder of that path in the repository. A link to none stays, and fails the
    build.
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
    """The file of the repository that a page is."""
    return BESIDE.get(page, f"docs/{page}")


def page_of(source: str) -> str:
    """The page that a file of the repository would be."""
    at_root = {file: page for page, file in BESIDE.items()}
    return at_root.get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else f"../{source}")
