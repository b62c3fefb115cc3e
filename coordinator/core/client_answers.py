"""What clients are told: frames are answered at once, replies gather until the end of a turn.

What a client was told before it may be told again, but no more of it at once, and a second, than an allowance.
"""

from __future__ import annotations

from collections.abc import Iterable

from immortal.coordinator.core.allowance import Allowance
from immortal.coordinator.core.client_table import REPLY_OVERHEAD_BYTES, Client, ClientTable
from immortal.coordinator.core.effects import Effect, ReplyToClient
from immortal.coordinator.core.interfaces import Token
from immortal.coordinator.core.limits import Limits
from immortal.protocol.client import ClientCode, ClientFrame, ClientFrameType, Reply, encode_replies

REPLY_FRAME_SIZE_BYTES = 1 << 20  # replies to one client are joined up to this
REPLY_FRONT_SIZE_BYTES = 16  # number, kind and size, at most
LOOKING_BYTES = 4  # for each byte of a PING: to look takes as long as to tell so many


class ClientAnswers:
    """Of the instance ``name``. ``effects``: where effects go; the machine's."""

    def __init__(self, name: str, limits: Limits, table: ClientTable, effects: list[Effect]) -> None:
        self.committer_id = 0
        self._name = name
        self._limits = limits
        self._table = table
        self._effects = effects
        self._outgoing: dict[str, dict[int, Reply]] = {}  # by client and number
        self._again = Allowance(limits.again_bytes, 0)
        self._asked: set[str] = set()  # who has sent a PING in this turn

    # --- at once -----------------------------------------------------------------------------------------------------

    def welcome(self, token: Token, frame: ClientFrame, client: Client, time_ns: int, methods: bytes) -> None:
        numbers = client.number, client.released
        self._say(token, ClientFrame(ClientFrameType.WELCOME, *self._ends(frame), *numbers, 0, time_ns, methods))

    def pong(self, token: Token, frame: ClientFrame, client: Client, code: ClientCode = ClientCode.NONE) -> None:
        """What was taken of the client. BUSY: what is behind that is to be sent again later."""
        numbers = client.number, client.released
        self._say(token, ClientFrame(ClientFrameType.PONG, *self._ends(frame), *numbers, code=code))

    def refuse(self, token: Token, frame: ClientFrame, code: ClientCode, reason: str) -> None:
        """The number says which query is meant; it is 0 where it is none."""
        number = frame.number if frame.frame_type is ClientFrameType.QUERY else 0
        self._say(token, ClientFrame(ClientFrameType.REFUSED, *self._ends(frame), number, code=code, reason=reason))

    def answer_query(self, token: Token, frame: ClientFrame, reply: Reply) -> None:
        payload = encode_replies((reply,))
        self._say(token, ClientFrame(ClientFrameType.ANSWER, *self._ends(frame), frame.number, 0, 1, payload=payload))

    def tell_at_once(self, token: Token, frame: ClientFrame, client: Client, replies: list[Reply]) -> None:
        """Who has sent ``frame``, and nobody else who has its client's ID."""
        if replies:
            numbers = client.number, client.released, len(replies)
            payload = encode_replies(replies)
            self._say(token, ClientFrame(ClientFrameType.REPLY, *self._ends(frame), *numbers, payload=payload))

    def _ends(self, frame: ClientFrame) -> tuple[str, str, int]:
        return frame.client_id, self._name, self.committer_id

    def _say(self, token: Token, answer: ClientFrame) -> None:
        self._effects.append(ReplyToClient(token, answer))

    # --- at the end of the turn --------------------------------------------------------------------------------------

    def tell(self, client_id: str, client: Client, reply: Reply) -> None:
        """What one of its requests came to, if it was heard in this life; else it will ask."""
        if client.token is not None:
            self._outgoing.setdefault(client_id, {})[reply.number] = reply

    def asked(self, frame: ClientFrame, client: Client, now_ns: int) -> None:
        """A PING: to look is not free either, and counts as what it brings."""
        if frame.client_id in self._asked:
            return  # it asks again, after this turn
        self._asked.add(frame.client_id)
        again = self._again_of(client, now_ns)
        if again.is_left(now_ns) and self._again.is_left(now_ns):
            looking_bytes = len(frame.payload) * LOOKING_BYTES
            again.take(looking_bytes)
            self._again.take(looking_bytes)
            numbers = (asked for asked in frame.asked_numbers() if asked <= client.number)
            self.tell_again(frame.client_id, client, numbers, now_ns)

    def tell_again(self, client_id: str, client: Client, numbers: Iterable[int], now_ns: int) -> None:
        """Say what the requests ``numbers``, which were taken, came to; nothing yet of one that is open, and no more
        than may be told at once: it is asked for again."""
        again = self._again_of(client, now_ns)
        outgoing = self._outgoing.setdefault(client_id, {})
        for number in numbers:
            reply = None if number in outgoing else client.reply(number)
            if reply is None:
                continue
            if not (again.is_left(now_ns) and self._again.is_left(now_ns)):
                return
            size_bytes = len(reply.value) + REPLY_OVERHEAD_BYTES
            again.take(size_bytes)
            self._again.take(size_bytes)
            outgoing[number] = reply

    def _again_of(self, client: Client, now_ns: int) -> Allowance:
        if client.again is None:
            client.again = Allowance(self._limits.client_again_bytes, now_ns)
        return client.again

    def forget(self, client_id: str) -> None:
        self._outgoing.pop(client_id, None)

    def flush(self) -> None:
        """Send the replies that have gathered."""
        for client_id, replies in self._outgoing.items():
            client = self._table.get(client_id)
            if client is None:
                continue
            for some in _in_frames(replies.values()):
                numbers = client.number, client.released, len(some)
                payload = encode_replies(some)
                reply = ClientFrame(
                    ClientFrameType.REPLY, client_id, self._name, self.committer_id, *numbers, payload=payload
                )
                self._say(client.token, reply)
        self._outgoing.clear()
        self._asked.clear()


def _in_frames(replies: Iterable[Reply]) -> Iterable[list[Reply]]:
    some: list[Reply] = []
    size_bytes = 0
    for reply in replies:
        reply_size_bytes = len(reply.value) + REPLY_FRONT_SIZE_BYTES
        if some and size_bytes + reply_size_bytes > REPLY_FRAME_SIZE_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(reply)
        size_bytes += reply_size_bytes
    if some:
        yield some
