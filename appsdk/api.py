"""Names that services import from :mod:`immortal`, except the functions for handlers. `docs/how-to/sdk.md`."""

from immortal.appsdk import errors
from immortal.appsdk.dispatch.lifecycle import upgrades
from immortal.appsdk.effects.effect import EffectContext, Retry, effect_context
from immortal.appsdk.errors import CallCancelled, CalleeFailed, CallRefused, Cancelled, EffectFailed
from immortal.appsdk.handlers.decorators import cron, every, impulse, initial, on_primary, query, rpc
from immortal.appsdk.handlers.proxy import Impulses, peer, peers
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.nodes.node import Node
from immortal.appsdk.running.runner import run
from immortal.appsdk.state.schema import Transient
from immortal.appsdk.state.table import Table, table
from immortal.appsdk.types.handles import Handle
from immortal.appsdk.types.personal import Personal
from immortal.appsdk.types.registry import register_type
from immortal.appsdk.waiting.loop import Winner

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
    "cron",
    "effect_context",
    "errors",
    "every",
    "impulse",
    "initial",
    "on_primary",
    "peer",
    "peers",
    "query",
    "register_type",
    "rpc",
    "run",
    "table",
    "upgrades",
]
