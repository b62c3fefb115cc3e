"""Instances behind a web server: Starlette, FastAPI, or any other library that uses Starlette's requests.

    shop = Service(Shop, "shop")

    async def place(request: Request) -> JSONResponse:
        receipt = await shop(request).place("17", "book")
        return JSONResponse({"receipt": receipt}, 201)

    app = Starlette(routes=[Route("/orders", place, methods=["POST"])])
    app.add_middleware(ImmortalMiddleware, services=[shop])

The web process is a client and keeps nothing: it can be killed at any moment, and any number of such processes can
run. `docs/how-to/integrations.md`.
"""

from immortal.protocol import distribution

try:
    import sse_starlette.sse  # noqa: F401  # which needs Starlette
except ModuleNotFoundError as error:
    raise ImportError(f"the bridge to ASGI needs Starlette ({error}): {distribution.add_extra('http')}") from None

from immortal.appsdk.integrations.asgi.gateway import gateway
from immortal.appsdk.integrations.asgi.middleware import ImmortalMiddleware
from immortal.appsdk.integrations.asgi.progress import progress
from immortal.appsdk.integrations.asgi.services import Service, TooManyCalls

__all__ = ["ImmortalMiddleware", "Service", "TooManyCalls", "gateway", "progress"]
