"""Reliable request-reply to a pool of servers: ``with connect([...]) as pool: pool.request(b"...")``.

Plain servers are processes with one function (``serve``); instances are found by their names
(``connect_instances``). `docs/patterns/pirate.md`.
"""

from __future__ import annotations

from immortal.appsdk.patterns.pirate.clients import (
    AsyncRequests,
    InstancesConnector,
    PoolConnector,
    Requests,
    connect,
    connect_instances,
)
from immortal.appsdk.patterns.pirate.frames import GaveUp, ServerError, StoreError, TooManyRequests
from immortal.appsdk.patterns.pirate.pool import Policy
from immortal.appsdk.patterns.pirate.server import Answer, Request, Server, serve

__all__ = [
    "Answer",
    "AsyncRequests",
    "GaveUp",
    "InstancesConnector",
    "Policy",
    "PoolConnector",
    "Request",
    "Requests",
    "Server",
    "ServerError",
    "StoreError",
    "TooManyRequests",
    "connect",
    "connect_instances",
    "serve",
]
