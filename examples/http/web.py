"""HTTP over the shop: a web server that may be killed at any moment, since it keeps nothing.

uvicorn web:app

POST /orders {"order": "17", "item": "book"} takes an order. With the header Idempotency-Key it is taken once, however
often the request is sent, to whichever process of this server, before or after crashes, and the answer is the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from shop import Shop, SoldOut
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from appsdk.client import CalleeFailed, CallRefused, CallTimeout, ClientError, connect, with_key

TIMEOUT_S = 20.0  # of a call: a crash of the shop in the middle is well within
KEY_HEADER = "idempotency-key"

Handler = Callable[[Request], Awaitable[JSONResponse]]


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with connect(Shop, "shop", timeout=TIMEOUT_S) as shop:
        app.state.shop = shop
        yield


def answering(handler: Handler) -> Handler:
    """What can go wrong, in the words of HTTP."""

    async def handle(request: Request) -> JSONResponse:
        try:
            return await handler(request)
        except SoldOut as error:
            item, there = error.args
            return JSONResponse({"error": f"there are {there} of {item!r}"}, 409)
        except (CallRefused, KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": f"this is no order: {error}"}, 400)
        except CallTimeout as error:  # with the same key it may be sent again; without, it may have been done
            return JSONResponse({"error": error.reason}, 503, {"Retry-After": "1"})
        except CalleeFailed as error:  # it will not be done, and sent again with the same key it gets the same answer
            body = {"error": error.message, "type": error.type_name, "reference": error.reference}
            return JSONResponse(body, 500)
        except ClientError as error:
            return JSONResponse({"error": str(error)}, 500)

    return handle


@answering
async def place(request: Request) -> JSONResponse:
    shop: type[Shop] = request.app.state.shop
    order = await request.json()
    key = request.headers.get(KEY_HEADER)
    if key is not None:
        shop = with_key(shop, key)
    receipt = await shop.place(order["order"], order["item"], order.get("count", 1))
    return JSONResponse({"receipt": receipt}, 201)


@answering
async def show(request: Request) -> JSONResponse:
    shop: type[Shop] = request.app.state.shop
    receipts = await shop.order(request.path_params["order"])
    return JSONResponse({"receipts": receipts}, 200 if receipts else 404)


app = Starlette(
    routes=[Route("/orders", place, methods=["POST"]), Route("/orders/{order}", show)],
    lifespan=lifespan,
)
