"""Public API of Immortal, virtual resiliency for Python services: calls of an :class:`Immortal` survive crashes.

Programs import this module and the public modules below; all else is internal and can change:

    immortal                  services: the class, its decorators, functions for handlers, peers, errors, `run`
    immortal.client           callers from outside
    immortal.errors           errors of services
    immortal.testing          a test environment: coordinators in memory, crashes, replays
    immortal.embedded         an instance and its coordinator in one process
    immortal.patterns         building blocks: queue, clone, harmony, pirate, groups
    immortal.integrations     web frameworks (ASGI), Pydantic AI
    immortal.log              readers of logs
    immortal.messenger        conversations over ZeroMQ
    immortal.pipeline         logs as tables of Spark

Names are loaded at their first use: a coordinator imports this package and needs none of them.
"""

# ruff: noqa: F403, F405 (the SDK lists its names)
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from immortal.appsdk.api import *
    from immortal.appsdk.functions import (
        at,
        continue_as,
        create_node,
        destroy,
        effect,
        event,
        forget_key,
        holders_of,
        key,
        label,
        logger,
        multicast,
        node_of,
        now,
        now_ns,
        race,
        random,
        release_handle,
        revoke,
        signal,
        sleep,
        step,
        uuid4,
    )
else:

    def __getattr__(name: str) -> object:
        """Load a public name from the SDK. Raises AttributeError for any other name."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from immortal.appsdk import api, functions

        globals()[name] = value = getattr(functions if name in functions.NAMES else api, name)
        return value


__all__ = [
    "CallCancelled",
    "CallRefused",
    "CalleeFailed",
    "Cancelled",
    "EffectContext",
    "EffectFailed",
    "Handle",
    "Immortal",
    "Impulses",
    "Node",
    "Personal",
    "Retry",
    "Table",
    "Transient",
    "Winner",
    "at",
    "continue_as",
    "create_node",
    "cron",
    "destroy",
    "effect",
    "effect_context",
    "errors",
    "event",
    "every",
    "forget_key",
    "holders_of",
    "impulse",
    "initial",
    "key",
    "label",
    "logger",
    "multicast",
    "node_of",
    "now",
    "now_ns",
    "on_primary",
    "peer",
    "peers",
    "query",
    "race",
    "random",
    "register_type",
    "release_handle",
    "revoke",
    "rpc",
    "run",
    "signal",
    "sleep",
    "step",
    "table",
    "upgrades",
    "uuid4",
]
