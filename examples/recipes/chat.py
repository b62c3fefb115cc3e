"""Chat room with a page: all that was said is there after any crash, in one order for all.

Use it for what people see live. The room is an instance; browsers follow it by server-sent events, through any number
of web processes, and go on behind the last line that they have.

immortal dev chat.py             # and, in another terminal: uvicorn chat:app --port 8000
"""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import immortal
from immortal import Immortal, query, rpc
from immortal.integrations.asgi import ImmortalMiddleware, Service, progress

PAGE = """<title>Chat</title><ul id=lines></ul>
<form id=form><input name=who placeholder=name> <input name=text placeholder=text> <button>Say</button></form>
<script>
new EventSource("/lines").onmessage = event =>
  lines.append(Object.assign(document.createElement("li"), {textContent: JSON.parse(event.data)}))
form.onsubmit = event => { event.preventDefault()
  fetch("/say", {method: "POST", body: JSON.stringify(Object.fromEntries(new FormData(form)))})
}
</script>"""


class Room(Immortal):
    lines: list[str]  # it only grows

    def __init__(self) -> None:
        self.lines = []

    @rpc
    def say(self, who: str, text: str) -> None:
        self.lines.append(f"{immortal.now():%H:%M} {who}: {text}")

    @query
    def lines_after(self, position: int) -> list[str]:
        return self.lines[position:]


room = Service(Room, "room")


async def say(request: Request) -> Response:
    await room(request).say(**await request.json())
    return Response(status_code=204)


async def lines(request: Request) -> Any:
    return await progress(request, room(request).lines_after, is_last=lambda line: False)


routes = [Route("/", lambda _: HTMLResponse(PAGE)), Route("/say", say, methods=["POST"]), Route("/lines", lines)]
app = Starlette(routes=routes)
app.add_middleware(ImmortalMiddleware, services=[room])
