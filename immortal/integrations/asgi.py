"""Web frameworks (ASGI) in front of instances. `docs/how-to/integrations.md`."""

from immortal.appsdk.integrations.asgi import ImmortalMiddleware, Service, TooManyCalls, gateway, progress

__all__ = [
    "ImmortalMiddleware",
    "Service",
    "TooManyCalls",
    "gateway",
    "progress",
]
