"""App whose every step the test takes, beside a real coordinator."""

from __future__ import annotations

import socket

from immortal.protocol.extensions import ALL_EXTENSIONS, AppDescription, Hello, encode_app_description, encode_hello
from immortal.protocol.messages import MessageType, decode_messages, encode_checkpoint
from immortal.protocol.readers import BlobData, BlobStart, RecordReader
from tests.helpers.processes import DEADLINE_S, CoordinatorProcess


class SteppingApp:
    """App whose every step the test takes: it gathers its input, and sends only what the test says."""

    def __init__(self, process: CoordinatorProcess, version: int = 2) -> None:
        settings = process.settings
        self.socket = socket.create_connection(("127.0.0.1", settings.app_port), DEADLINE_S)
        self.reader = RecordReader()
        self.blob = b""
        self.types: list[int] = []
        self.logged: list[int] = []
        hello = Hello(ALL_EXTENSIONS, f"app:V{version}")
        self.socket.sendall(encode_hello(hello) + encode_app_description(AppDescription(version)))

    def until(self, message_type: MessageType) -> None:
        self.until_any(message_type)

    def until_any(self, *message_types: MessageType) -> None:
        while not any(message_type in self.types for message_type in message_types):
            data = self.socket.recv(1 << 16)
            assert data, f"the connection ended before any of {message_types}: {self.types}"
            self.reader.receive_data(data)
            while (event := self.reader.next_event()) is not None:
                if isinstance(event, BlobStart):
                    self.blob = b""
                elif isinstance(event, BlobData):
                    self.blob += event.data
                else:
                    if event.header.sequence_id >= 0:
                        self.logged.append(event.header.sequence_id)
                    self.types += [kind for kind, _, _ in decode_messages(event.content)]

    def checkpoint(self, blob: bytes) -> None:
        self.socket.sendall(encode_checkpoint(len(blob)) + blob)
