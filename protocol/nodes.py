"""Calls by which handles work (`docs/NODES.md`). Their IDs are above users', as those of :mod:`protocol.ordering`."""

from __future__ import annotations

NODE_METHOD_ID = (1 << 20) + 4  # a call of a node: [sender, keys, method ID, arguments]
HANDLES_METHOD_ID = (1 << 20) + 3  # what owners and holders tell each other: [sender, message]
