"""Human approval by a link: a purchase waits for days, until somebody follows the link in a mail and decides.

Use it where a person has a say. The link has a random token, which nobody else knows, and opens a page with buttons:
programs that check mails follow links, too. After a week without a decision the purchase expires, and the link is dead.

immortal dev approval.py          # and, in another terminal: uvicorn approval:app --port 8000
immortal call purchases buy "a coffee machine" 90000 --start
"""

import smtplib
from datetime import timedelta

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

import immortal
from immortal import Immortal, rpc
from immortal.integrations.asgi import ImmortalMiddleware, Service


def mail(text: str) -> None:
    with smtplib.SMTP("localhost", timeout=10) as server:
        server.sendmail("shop@example.org", ["boss@example.org"], f"Subject: To be approved\n\n{text}")


class Purchases(Immortal):
    open: dict[str, str]  # what waits, by its token

    def __init__(self) -> None:
        self.open = {}

    @rpc
    async def buy(self, item: str, cents: int) -> str:
        token = immortal.uuid4().hex  # nobody can guess it: it comes from a seed that only the log has
        await immortal.step(lambda: self.open.update({token: item}))
        await immortal.effect(mail, f"{item}, {cents} cents: http://localhost:8000/approve/{token}")
        decision = await immortal.race(immortal.event(token, bool), immortal.sleep(timedelta(days=7)))
        await immortal.step(lambda: self.open.pop(token, None))
        return "expired" if decision.index == 1 else "bought" if decision.value else "refused"

    @rpc
    def decide(self, token: str, approved: bool) -> None:
        if self.open.pop(token, None) is not None:  # the first decision counts
            immortal.signal(token, approved)


purchases = Service(Purchases, "purchases")


async def page(request: Request) -> HTMLResponse:
    if request.method == "GET":
        return HTMLResponse("<form method=post><button name=yes>Buy</button> <button name=no>Don't</button></form>")
    await purchases(request).decide(request.path_params["token"], b"yes" in await request.body())
    return HTMLResponse("Thank you.")


app = Starlette(routes=[Route("/approve/{token}", page, methods=["GET", "POST"])])
app.add_middleware(ImmortalMiddleware, services=[purchases])
