"""Requests to a pool of servers, each executed once. `docs/patterns/pirate.md`."""

from immortal.appsdk.patterns.pirate import (
    Answer,
    AsyncRequests,
    GaveUp,
    InstancesConnector,
    Policy,
    PoolConnector,
    Request,
    Requests,
    Server,
    ServerError,
    StoreError,
    TooManyRequests,
    connect,
    connect_instances,
    serve,
)

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
