"""A state for a page: only as much of it as anybody reads, with the path of each part."""

from __future__ import annotations

import json
from typing import Any

from immortal.appsdk.state.tree import Fields, Members, Tree, to_json
from immortal.replay.travel.paths import MISSING, step_text

NODES_MAX = 1500
ITEMS_MAX = 100  # of one container
DEPTH_MAX = 8
TEXT_CHARACTERS_MAX = 300

Node = dict[str, Any]
"""{"label", "path", "kind"}; of a plain value "text"; of a container "count", "items", and how many "more"."""

_KINDS: dict[type, str] = {Fields: "object", Members: "set", list: "list", dict: "dict"}


def text_of(value: Tree, characters: int = TEXT_CHARACTERS_MAX) -> str:
    """A value as JSON, clipped; "absent" where there is none."""
    if value is MISSING:
        return "absent"
    if isinstance(value, str) and len(value) > characters:
        value = value[:characters] + "…"  # before it is quoted: it may have MiBs
    text = json.dumps(to_json(value), ensure_ascii=False)
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def shown(whole: Tree, path: str = "") -> Node:
    """The tree at ``path``, cut to NODES_MAX nodes, those near the root first."""
    left = NODES_MAX
    root: Node = {"label": path or "state", "path": path}
    level: list[tuple[Node, Tree]] = [(root, whole)]
    for depth in range(DEPTH_MAX + 1):
        below: list[tuple[Node, Tree]] = []
        for node, value in level:
            kind = _KINDS.get(type(value))
            if kind is None:
                node.update(kind=type(value).__name__, text=text_of(value))
                continue
            node.update(kind=kind, count=len(value), items=[], more=0)
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            for number, (key, part) in enumerate(parts):
                if left <= 0 or number >= ITEMS_MAX or depth == DEPTH_MAX:
                    node["more"] = len(value) - number
                    break
                left -= 1
                label = str(key) if isinstance(value, Fields) else text_of(key, 60) if kind == "dict" else f"{key}"
                inner = node["path"]
                # A set has no order that a path could name: its members are shown, and not gone to.
                child: Node = {"label": label, "path": "" if kind == "set" else step_text(value, key, inner)}
                node["items"].append(child)
                below.append((child, part))
        level = below
    return root
