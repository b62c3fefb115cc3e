"""Client of the Debug Adapter Protocol, as an editor is one: requests, their answers, and events, over a socket."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

DEADLINE_S = 20.0


class DapClient:
    """Client of a debugpy that listens at a port of this machine; breakpoints are set when it attaches."""

    def __init__(self, port: int, breakpoints: dict[str, list[int]] | None = None) -> None:
        self._socket = _connect(port)
        self._socket.settimeout(DEADLINE_S)
        self._input = self._socket.makefile("rb")
        self._sequence = 0
        self._events: list[dict[str, Any]] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self.request("initialize", adapterID="test", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        attached = self._send("attach", {"justMyCode": False, "subProcess": False})
        self.event("initialized")
        for path, lines in (breakpoints or {}).items():
            self.request("setBreakpoints", source={"path": path}, breakpoints=[{"line": line} for line in lines])
        self.request("configurationDone")
        self._answer(attached)

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request; return the body of the answer."""
        return self._answer(self._send(command, arguments))

    def _send(self, command: str, arguments: dict[str, Any]) -> int:
        self._sequence += 1
        message = {"seq": self._sequence, "type": "request", "command": command, "arguments": arguments}
        content = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        return self._sequence

    def _answer(self, sequence: int) -> dict[str, Any]:
        while sequence not in self._answers:
            self._read()
        message = self._answers.pop(sequence)
        assert message["success"], message
        body: dict[str, Any] = message.get("body") or {}
        return body

    def _read(self) -> None:
        size = 0
        while (line := self._input.readline()) != b"\r\n":
            if not line:
                raise EOFError("the debugger has closed the connection")
            size = int(line.split(b":")[1])
        message: dict[str, Any] = json.loads(self._input.read(size))
        if message["type"] == "event":
            self._events.append(message)
        elif message["type"] == "response":
            self._answers[message["request_seq"]] = message

    def event(self, name: str) -> dict[str, Any]:
        """Return the body of the next event of that name."""
        while True:
            for place, event in enumerate(self._events):
                if event["event"] == name:
                    del self._events[place]
                    body: dict[str, Any] = event.get("body") or {}
                    return body
            self._read()

    def stopped(self) -> Stop:
        """Return where the program stops next."""
        thread = self.event("stopped")["threadId"]
        return Stop(self, thread, self.request("stackTrace", threadId=thread)["stackFrames"][0])

    def close(self) -> None:
        """Detach: the program continues."""
        with contextlib.suppress(OSError, EOFError):  # it has ended
            self.request("disconnect", terminateDebuggee=False)
        self._input.close()
        self._socket.close()


class Stop:
    """Place at which the program is stopped. ``frame``: the innermost one."""

    def __init__(self, client: DapClient, thread: int, frame: dict[str, Any]) -> None:
        self._client, self._thread, self._frame = client, thread, frame

    @property
    def place(self) -> tuple[str, int]:
        return self._frame["name"], self._frame["line"]

    def evaluate(self, expression: str) -> str:
        body = self._client.request("evaluate", expression=expression, frameId=self._frame["id"], context="watch")
        return str(body["result"])

    def variables(self, *path: str) -> dict[str, str]:
        """Return local variables and their values as text, or the attributes of the object at ``path`` within them."""
        scopes = self._client.request("scopes", frameId=self._frame["id"])["scopes"]
        found = self._client.request("variables", variablesReference=scopes[0]["variablesReference"])["variables"]
        for name in path:
            (reference,) = [one["variablesReference"] for one in found if one["name"] == name]
            found = self._client.request("variables", variablesReference=reference)["variables"]
        return {one["name"]: one["value"] for one in found}

    def step(self) -> Stop:
        """Go to the next line, and return where that is."""
        self._client.request("next", threadId=self._thread)
        return self._client.stopped()

    def go_on(self) -> None:
        self._client.request("continue", threadId=self._thread)


def _connect(port: int) -> socket.socket:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s, f"nobody listens at port {port}"
            time.sleep(0.05)
