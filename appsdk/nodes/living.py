"""The nodes that an instance has, by number: made, kept in checkpoints, and moved to newer classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from immortal.appsdk.errors import StateError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.nodes.node import Node, NodeContext, node_definition


class SavedNode(msgspec.Struct, array_like=True):
    number: int
    class_name: str
    state: bytes


class LivingNodes:
    """``life``: an immortal.appsdk.nodes.nodes.Nodes, which nodes name as their own."""

    def __init__(self, life: Any) -> None:
        self.definition: Definition | None = None
        self._life = life
        self._nodes: dict[int, Node] = {}

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    def get(self, number: int) -> Node | None:
        return self._nodes.get(number)

    def use(self, definition: Definition) -> None:
        """From here on this class's code runs. Raises StateError where it does not fit the nodes that there are."""
        before, self.definition = self.definition, definition
        if before is not None and before is not definition:
            self.restore(self.save())

    def save(self) -> list[SavedNode]:
        """Raises StateError."""
        saved, keeps_types = [], self._life.context.keeps_types
        for number, node in self._nodes.items():
            definition = node_definition(type(node))
            saved.append(SavedNode(number, definition.name, definition.encode(node, keeps_types=keeps_types)))
        return saved

    def restore(self, saved: Iterable[SavedNode]) -> None:
        """In place of those that there are. Raises StateError."""
        self._nodes = {one.number: self._restored(one) for one in saved}

    def _restored(self, saved: SavedNode) -> Node:
        classes = () if self.definition is None else self.definition.nodes
        for cls in classes:
            definition = node_definition(cls)
            if saved.class_name in (definition.name, *definition.formerly):
                node = self._new(cls, saved.number)
                definition.restore(node, saved.class_name, saved.state, self._life.context.sites.rules)
                return node
        name = "?" if self.definition is None else self.definition.name
        known = ", ".join(cls.__qualname__ for cls in classes) or "none"
        raise StateError(
            f"there is a node of the class {saved.class_name!r}, and {name} has {known}: name it in nodes=(...); if it "
            f"was renamed: class New(Node, formerly=({saved.class_name!r},))"
        )

    def make(self, cls: type, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raises what its ``__init__`` raises; then it is there, and has no handle."""
        node: Any = self._new(cls, number)
        self._nodes[number] = node
        node.__init__(*arguments, **keywords)

    def remove(self, number: int) -> None:
        self._nodes.pop(number, None)

    def _new(self, cls: type, number: int) -> Node:
        given: Any = cls
        made: Node = given.__new__(given)
        made._immortal_context = NodeContext(made, self._life, number)
        return made
