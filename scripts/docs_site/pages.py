"""A hook of MkDocs: the pages that are no files of docs/, and the links between all of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.docs_site.links import BESIDE, linked
from scripts.docs_site.roles import without_roles
from scripts.docs_site.tables import recipe_pages, with_tables

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
    for name, page in recipe_pages().items():
        files.append(File.generated(config, f"how-to/recipes/{name}.md", content=page))
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert config.nav is not None
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference.append({"API": [{title: _reference(module)} for module, title in REFERENCE.items()]})
    how_to = next(section["How-to"] for section in config.nav if "How-to" in section)
    recipes = next(section["Recipes"] for section in how_to if "Recipes" in section)
    recipes += [f"how-to/recipes/{name}.md" for name in recipe_pages()]
    project = len(config.nav) - 1  # the last section stays the last
    config.nav.insert(project, {"Decisions": [f"decisions/{name}" for name in decisions]})
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = with_tables(markdown)
    return linked(markdown, page.file.src_uri, {file.src_uri for file in files}, lambda path: (ROOT / path).exists())


def reference_pages() -> dict[str, str]:
    """Return a page for each public module: its ``__all__``, or all that it defines. Each name is on one page."""
    pages: dict[str, str] = {}
    seen: set[int] = set()
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
