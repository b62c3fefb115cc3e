"""Webhooks with signatures: they come in once, and go out until they are taken.

Use it with a payment service, say, and your customers; the form is that of standardwebhooks.com. A delivery that comes
twice, with one webhook-id, is handled once. What goes out has one webhook-id in all attempts, for three days.

export WEBHOOK_SECRET=whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw
immortal dev webhooks.py                 # and, in another terminal: uvicorn webhooks:app --port 8000
"""

import hmac
import json
import os
import time
from base64 import b64decode, b64encode
from datetime import timedelta
from urllib import request as web

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from immortal import Immortal, Retry, effect, effect_context, rpc
from immortal.client import start
from immortal.integrations.asgi import ImmortalMiddleware, Service


def signature(key: str, time_s: str, body: bytes) -> str:
    secret = b64decode(os.environ["WEBHOOK_SECRET"].removeprefix("whsec_"))
    return "v1," + b64encode(hmac.digest(secret, f"{key}.{time_s}.".encode() + body, "sha256")).decode()


def post(url: str, event: dict[str, str]) -> None:
    key, time_s, body = effect_context().key, f"{time.time():.0f}", json.dumps(event).encode()
    headers = {"webhook-id": key, "webhook-timestamp": time_s, "webhook-signature": signature(key, time_s, body)}
    web.urlopen(web.Request(url, body, headers), timeout=15).close()


class Orders(Immortal):
    @rpc
    async def ship(self, event: dict[str, str]) -> None:
        patient = effect.options(retry=Retry(give_up_after=timedelta(days=3)))
        await patient(post, "https://customer.example.org/webhook", {"type": "shipped", "order": event["order"]})


orders = Service(Orders, "orders")


async def receive(request: Request) -> Response:
    key, time_s = request.headers["webhook-id"], request.headers.get("webhook-timestamp", "")
    right = signature(key, time_s, body := await request.body()).encode()
    given = request.headers.get("webhook-signature", "").encode().split()  # several, while the secret is replaced
    if not any(hmac.compare_digest(right, one) for one in given) or abs(time.time() - int(time_s)) > 300:
        return Response(status_code=401)  # not ours; or an old one, which somebody sends again
    await start(orders(request).ship, json.loads(body))  # it is in the log: so the sender may forget it
    return Response(status_code=204)


app = Starlette(routes=[Route("/webhook", receive, methods=["POST"])])
app.add_middleware(ImmortalMiddleware, services=[orders], key_header="webhook-id", requires_key=True)
