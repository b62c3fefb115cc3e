"""A peer that means harm: it speaks the frames of coordinators by hand, under a name that may call."""

from __future__ import annotations

import threading
from types import TracebackType

from immortal.messenger import Messenger, Security
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.peer_frames import FrameType, PeerFrame, decode_frame, encode_frame

DEADLINE_S = 20.0


class Forger:
    """``name`` to ``victim``, which listens at ``endpoint``; with its own keys in ``security``."""

    def __init__(self, name: str, victim: str, endpoint: str, security: Security | None) -> None:
        self.name = name
        self._victim = victim
        self._endpoint = endpoint
        self._messenger = Messenger(security=security)
        self._position = 0

    def __enter__(self) -> Forger:
        self._messenger.start()
        welcome = self.ask(PeerFrame(FrameType.HELLO, self.name, self._victim, 7, 1, 0, time_ns=1))
        assert welcome.frame_type is FrameType.WELCOME, welcome
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._messenger.close()

    def ask(self, frame: PeerFrame) -> PeerFrame:
        answered = threading.Event()
        answers: list[PeerFrame] = []

        def reply(parts: list[bytes]) -> None:
            answers.append(decode_frame(parts))
            answered.set()

        self._messenger.send_message(self._endpoint, encode_frame(frame), reply)
        assert answered.wait(DEADLINE_S), frame
        return answers[0]

    def send(self, *messages: bytes) -> PeerFrame:
        """The next Batch of the stream, and what is answered: a TrimTo once it is taken and durable."""
        first, count = self._position + 1, len(messages)
        batch = PeerFrame(FrameType.BATCH, self.name, self._victim, 7, 1, first, count, 1, b"".join(messages))
        answer = self.ask(batch)
        if answer.frame_type is FrameType.TRIM_TO:
            self._position = answer.position
        return answer


def call(method_id: int, arguments: bytes, rpc_type: RpcType = RpcType.FORK) -> bytes:
    return encode_incoming_rpc(method_id, rpc_type, arguments)


def answer(method_id: int, arguments: bytes, kind: RpcKind = RpcKind.RETURNED_VALUE) -> bytes:
    return encode_incoming_rpc(method_id, RpcType.ASYNC, arguments, kind)
