"""Immortal services: write a class below :class:`Immortal`, and its calls survive every crash. `docs/guide/sdk.md`."""

import sys

from appsdk import errors
from appsdk.dispatch.upgrades import upgrades
from appsdk.effects.options import EffectContext, Retry, effect_context
from appsdk.errors import CallCancelled, CalleeFailed, CallRefused, Cancelled, EffectFailed
from appsdk.handlers.decorators import cron, every, impulse, initial, on_primary, query, rpc
from appsdk.handlers.proxy import Impulses, peer
from appsdk.immortal import Immortal
from appsdk.nodes.node import Node
from appsdk.running.runner import run
from appsdk.state.schema import Transient
from appsdk.types.handles import Handle
from appsdk.types.registry import register_type
from appsdk.waiting import waits
from appsdk.waiting.waits import Winner

# States that pickle wrote name Winner by the module that it was in then.
sys.modules["appsdk.waits"] = waits

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
    "Retry",
    "Transient",
    "Winner",
    "cron",
    "effect_context",
    "errors",
    "every",
    "impulse",
    "initial",
    "on_primary",
    "peer",
    "query",
    "register_type",
    "rpc",
    "run",
    "upgrades",
]
