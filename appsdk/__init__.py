"""Immortal services: write a class below :class:`Immortal`, and its calls survive every crash. `docs/guide/sdk.md`."""

from appsdk import errors
from appsdk.effects import EffectContext, Retry, effect_context
from appsdk.errors import CalleeFailed, CallRefused, EffectFailed
from appsdk.handlers import cron, every, impulse, initial, on_primary, query, rpc
from appsdk.immortal import Immortal
from appsdk.proxy import Impulses, peer
from appsdk.runner import run
from appsdk.state import Transient
from appsdk.upgrades import upgrades
from appsdk.waits import Winner

__all__ = [
    "CallRefused",
    "CalleeFailed",
    "EffectContext",
    "EffectFailed",
    "Immortal",
    "Impulses",
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
    "rpc",
    "run",
    "upgrades",
]
