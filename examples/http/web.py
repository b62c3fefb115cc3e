"""HTTP for the shop: a web server that can be killed at any moment, since it keeps no state.

uvicorn web:app

POST /orders {"order": "17", "item": "book"} takes an order. With the header Idempotency-Key it is taken once, however
often the request is sent, to any process of this server, before or after crashes, and the answer is the same.
Errors are problem details (RFC 9457): `docs/how-to/integrations.md`.
"""

from __future__ import annotations

from shop import Shop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from immortal.integrations.asgi import ImmortalMiddleware, Service

shop = Service(Shop, "shop", timeout=20.0)  # long enough for a crash and recovery of the shop


async def place(request: Request) -> JSONResponse:
    try:
        order = await request.json()
        ordered = (order["order"], order["item"], order.get("count", 1))
    except (KeyError, TypeError, ValueError) as error:
        raise HTTPException(400, 'an order is {"order": ..., "item": ..., "count": ...}') from error
    receipt = await shop(request).place(*ordered)
    return JSONResponse({"receipt": receipt}, 201)


async def show(request: Request) -> JSONResponse:
    receipts = await shop(request).order(request.path_params["order"])
    return JSONResponse({"receipts": receipts}, 200 if receipts else 404)


app = Starlette(
    routes=[Route("/orders", place, methods=["POST"]), Route("/orders/{order}", show)],
    middleware=[Middleware(ImmortalMiddleware, services=[shop])],
)
