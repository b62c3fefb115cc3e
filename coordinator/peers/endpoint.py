"""Endpoint for frames to and from peers and clients: routes, keys, retransmission."""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections.abc import Callable, Mapping

from immortal.coordinator.audit import Auditor
from immortal.coordinator.clock import earliest
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import SendToPeer
from immortal.coordinator.core.permissions import Permission
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.messenger import ClientRoute, Messenger, Received
from immortal.coordinator.notices import Notices
from immortal.coordinator.peers.discovery import Discovery, Routes
from immortal.coordinator.peers.security import PeerSecurity
from immortal.protocol.client_frames import decode_client_frame, encode_client_frame
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.peer_frames import FRAME_PARTS_MAX, FrameType, PeerFrame, decode_frame, encode_frame

RETRY_DELAY_NS_MIN = 100_000_000  # before the second time that a frame is sent again
RETRY_DELAY_NS_MAX = 5_000_000_000


class PeerRetransmissions:
    """Queue of frames that wait to be sent again. Times are monotonic, in ns."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, SendToPeer, int]] = []  # a heap: (due, number, effect, attempt)
        self._numbers = itertools.count()

    def add(self, effect: SendToPeer, attempt: int, now_ns: int) -> None:
        """Schedule the next retransmission of a frame. ``attempt``: the number of times that it was sent, from 1."""
        delay_ns = 0 if attempt == 1 else min(RETRY_DELAY_NS_MIN << min(attempt - 2, 32), RETRY_DELAY_NS_MAX)
        heapq.heappush(self._waiting, (now_ns + delay_ns, next(self._numbers), effect, attempt + 1))

    def next_deadline_ns(self) -> int | None:
        """Return the time when the next frame is due; None if none waits."""
        return self._waiting[0][0] if self._waiting else None

    def pop_due(self, now_ns: int) -> list[tuple[SendToPeer, int]]:
        """Remove and return the frames that are due, each with the number of its next attempt."""
        due = []
        while self._waiting and self._waiting[0][0] <= now_ns:
            _, _, effect, attempt = heapq.heappop(self._waiting)
            due.append((effect, attempt))
        return due

    def forget(self, destination: str) -> None:
        """Drop the frames for ``destination``, whose stream begins anew."""
        self._waiting = [one for one in self._waiting if one[2].destination != destination]
        heapq.heapify(self._waiting)


class PeerEndpoint:
    """Driver's port to other instances and clients: routes, keys, permissions and frames.

    ``post``: called with each event.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        registry: Registry,
        log: Notices,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._name = settings.name
        self._own_endpoint = settings.peer
        self._log, self._post = log, post
        self._routes = Routes(Discovery(settings, registry), log.warning)
        self.security = PeerSecurity(settings, registry, self._routes.names_at, log.warning)
        self._permissions: tuple[Mapping[str, Permission], bool] = (settings.permissions, False)
        self._retries = PeerRetransmissions()
        self._blocked: dict[str, str] = {}  # destinations that must not be connected to, and why
        self._impostors = 0  # frames under another name than that of their key
        # The windows of streams limit what is pending. No reply here has a callback, so all frames go to the server
        # loop, in order.
        self._messenger = Messenger(security=self.security.security, pending=None)
        self.begin_turn = self._messenger.hold
        self.fileno = self._messenger.fileno
        # Deadlines on the monotonic clock, as of the last next_deadline_ns():
        self._messenger_due_ns: int | None = None
        self._poll_due_ns: int | None = None  # for peers and keys

    def listen(self) -> None:
        self._post_permissions()  # ahead of all frames
        self._messenger.listen(
            self._own_endpoint,
            self._handle_frame,
            ordered=True,
            client_loop=self._handle_client_frame,
            parts_max=FRAME_PARTS_MAX,
            most_bytes=lambda: self.security.call_size_mib_max() << 20,
        )

    # --- the loop's port ---------------------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        self._messenger_due_ns = self._messenger.next_deadline_ns()
        self._poll_due_ns = earliest(self._routes.next_deadline_ns(), self.security.next_deadline_ns())
        return earliest(self._messenger_due_ns, self._poll_due_ns, self._retries.next_deadline_ns())

    def process(self, now_ns: int, *, ready: bool) -> bool:
        """Receive frames, and do what is due. ``ready``: True if the descriptor is readable. Return True if peers and
        keys were polled."""
        if self._messenger_due_ns is not None and now_ns >= self._messenger_due_ns:
            self._messenger.process()
        elif ready:
            self._messenger.receive(replies=False)
        polled = self._poll_due_ns is not None and now_ns >= self._poll_due_ns
        if polled:
            self._poll_routes(now_ns)
            self._poll_keys(now_ns)
        for effect, attempt in self._retries.pop_due(now_ns):
            self._send(effect, attempt)
        return polled

    def audit(self, auditor: Auditor, refusals: Mapping[str, Mapping[str, int]], now_ns: int) -> None:
        """Record refusals and security changes. ``refusals``: the machine's counts by caller."""
        counters = self._messenger.counters()
        auditor.observe(counters, self.security.security, self._permissions[0], refusals, self._impostors, now_ns)

    def close(self) -> None:
        self._messenger.close()
        self._routes.close()

    # --- the driver's port -------------------------------------------------------------------------------------------

    def open(self, effect: ef.OpenPeer) -> None:
        self._routes.add(effect.destination, time.monotonic_ns())

    def send(self, effect: ef.SendToPeer) -> None:
        self._send(effect, 1)

    def _send(self, effect: ef.SendToPeer, attempt: int) -> None:
        endpoint = self._routes.endpoint(effect.destination)
        if endpoint is not None and not self._is_blocked(effect.destination, endpoint):
            reach(FaultPoint.BEFORE_SEND)
            reply = functools.partial(self._handle_reply, effect, attempt)
            self._messenger.send_message(endpoint, encode_frame(effect.frame), reply)

    def reset(self, effect: ef.ResetPeer) -> None:
        self._retries.forget(effect.destination)
        endpoint = self._routes.endpoint(effect.destination)
        if endpoint is not None:
            self._drop(endpoint, effect.destination)

    def reply(self, effect: ef.ReplyToPeer) -> None:
        token = effect.token
        if isinstance(token, Received):
            reach(FaultPoint.BEFORE_ANSWER)
            token.reply(*encode_frame(effect.frame))

    def reply_to_client(self, effect: ef.ReplyToClient) -> None:
        token = effect.token
        if isinstance(token, ClientRoute):
            token.send(encode_client_frame(effect.frame))

    @property
    def has_new(self) -> bool:
        return self._messenger.has_new

    def flush(self, *, patient: bool) -> None:
        self._messenger.patient = patient
        self._messenger.flush()

    @property
    def replies_wait(self) -> bool:
        return self._messenger.replies_wait

    def receive(self) -> None:
        self._messenger.receive()

    # --- routes and keys ---------------------------------------------------------------------------------------------

    def _poll_routes(self, now_ns: int) -> None:
        for name, endpoint_before in self._routes.poll(now_ns, self._messenger.connected):
            endpoint = self._routes.endpoint(name)
            self._log.info("peer found" if endpoint_before is None else "peer moved", peer=name, endpoint=endpoint)
            if endpoint_before is not None:
                self._drop(endpoint_before, name)
            self._post(ev.PeerMoved(name))
            self.security.schedule_check()  # it may have another key there

    def _post_permissions(self) -> None:
        before = self._permissions
        self._permissions = given, has_keys = self.security.permissions, self.security.security is not None
        if self._permissions != before:
            self._post(ev.PermissionsChanged(given, has_keys))
        if given != before[0]:
            self._log.info("permissions changed", limited=sorted(given))

    def _poll_keys(self, now_ns: int) -> None:
        changed = self.security.poll(now_ns)
        self._post_permissions()
        if not changed:
            return
        security = self.security.security
        if security is not None:
            self._messenger.secure(security)
            self._log.info(
                "keys or callers changed", key=security.own.public, callers=sorted(security.callers.values())
            )
        for name in list(self._blocked):
            endpoint = self._routes.endpoint(name)
            if endpoint is None or self.security.block_reason(endpoint) is None:
                del self._blocked[name]
                self._post(ev.PeerMoved(name))

    def _is_blocked(self, name: str, endpoint: str) -> bool:
        problem = self.security.block_reason(endpoint)
        if problem is None:
            self._blocked.pop(name, None)
            return False
        if self._blocked.get(name) != problem:
            self._blocked[name] = problem
            self._log.warning(f"nothing is sent to {name!r}, its calls wait: {problem}")
        return True

    def _drop(self, endpoint: str, destination: str) -> None:
        """Drop the frames in flight to ``endpoint``. Those for others than ``destination`` are sent again."""
        self._messenger.drop(endpoint)
        for name in self._routes.names_at(endpoint):
            if name != destination:
                self._post(ev.PeerMoved(name))

    # --- incoming frames ---------------------------------------------------------------------------------------------

    def _handle_reply(self, effect: ef.SendToPeer, attempt: int, parts: list[bytes]) -> None:
        # No parts: acknowledged, but the answer is no longer kept. The frame is sent again, also after an answer that
        # was damaged in transit, or that only a later build knows.
        frame = self._decode(effect.destination, parts) if parts else None
        if frame is not None and frame.frame_type is FrameType.UNKNOWN:
            self._log.warning(
                f"an answer of {effect.destination!r} was dropped: {frame.reason} is not known here",
                kind=("answer", effect.destination),
            )
            frame = None
        if frame is None:
            self._retries.add(effect, attempt, time.monotonic_ns())
        else:
            self._post(ev.PeerReplied(effect.destination, effect.tag, frame))

    def _decode(self, origin: str, parts: list[bytes]) -> PeerFrame | None:
        try:
            return decode_frame(parts)
        except RemoteProtocolError as error:
            self._log.warning("a frame was dropped", kind="frame", origin=origin, reason=str(error))
            return None

    def _handle_frame(self, received: Received) -> None:
        reach(FaultPoint.FRAME_RECEIVED)
        frame = self._decode(f"{received.sender:016x}", received.parts)
        if frame is None:
            received.reply()  # its sender sends it again
        elif frame.frame_type is FrameType.UNKNOWN:  # its sender is told which types are known here
            sender = received.peer or frame.sender
            self._log.warning(
                f"a frame of {sender!r} was refused: {frame.reason} is not known here", kind=("unknown", sender)
            )
            self._post(ev.PeerFrameReceived(received, frame))
        elif received.peer is not None and received.peer != frame.sender:
            self._impostors += 1
            self._log.warning(
                f"a frame was dropped: it says that {frame.sender!r} sends it, its key {received.peer!r}",
                kind=("sender", received.peer),
            )
        else:
            if frame.frame_type is FrameType.HELLO and (endpoint := self._routes.endpoint(frame.sender)) is not None:
                self._messenger.reconnect(endpoint)  # it has just been started
            self._post(ev.PeerFrameReceived(received, frame))

    def _handle_client_frame(self, route: ClientRoute, data: bytes) -> None:
        try:
            frame = decode_client_frame(data)
        except RemoteProtocolError as error:
            self._log.warning(f"a client's frame was dropped: {error}", kind="client")
        else:
            self._post(ev.ClientFrameReceived(route, frame, route.peer or ""))

    def describe_security(self) -> dict[str, object]:
        counters = self._messenger.counters()
        security = self.security.security
        return {
            "key": None if security is None else security.own.public,
            "strangers_refused": counters.strangers_refused,
            "strangers_dropped": counters.strangers_dropped + self._impostors,
            "roles_refused": counters.roles_refused,
        }

    def describe_output(self, destination: str, error: object) -> dict[str, object]:
        """Describe the connection to ``destination``. ``error``: the problem that the machine knows, or None."""
        if destination == self._name:
            return {"endpoint": "", "connected": True, "error": error}
        route = self._routes.describe(destination)
        endpoint = route["endpoint"] or ""
        return {
            "endpoint": endpoint,
            "connected": bool(endpoint) and self._messenger.connected(endpoint),
            "error": error or route["problem"] or self._blocked.get(destination),
        }

    def describe_peer(self, name: str, error: object) -> dict[str, object]:
        """Describe the connection to any instance, for `immortal peers`."""
        route = self._routes.describe(name)
        endpoint = route["endpoint"]
        since_ns = self._messenger.connected_since_ns(endpoint) if endpoint else None
        return {
            "endpoint": endpoint,
            "origin": route["origin"],
            "connected_s": None if since_ns is None else round((time.monotonic_ns() - since_ns) / 1e9, 3),
            "error": error or route["problem"] or self._blocked.get(name),
        }
