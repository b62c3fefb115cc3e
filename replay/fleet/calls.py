"""Comparison of the calls of a what-if's services with those of their logs, message by message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from immortal.coordinator.log.record_contents import rpc_of
from immortal.protocol import decoding
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.messages import IncomingRpc, RpcKind, RpcType
from immortal.replay.comparison import aligned
from immortal.replay.fleet.model import Difference, Service
from immortal.replay.fleet.player import Output, Place


class CallComparison:
    """Comparison of calls then and now. It adds to ``differences``; a difference is identified by its index there."""

    def __init__(self, differences: list[Difference]) -> None:
        self._differences = differences
        self._once: dict[tuple[str, int], int] = {}  # old numbers of changed calls, by caller and new number
        self._by_place: dict[tuple[str, str, Place], int] = {}

    def number_at(self, sender: str, destination: str, place: Place) -> int | None:
        """Return the last difference in the outputs of the message at ``place`` to ``destination``; None if none."""
        return self._by_place.get((sender, destination, place))

    def compare(
        self,
        service: Service,
        destination: str,
        place: Place,
        old: Sequence[Output],
        new: Sequence[bytes],
        cause: int | None,
        time_ns: int,
        *,
        is_other: bool,
    ) -> Iterator[tuple[int | None, bytes | None, int | None]]:
        """Yield (old position, new message, difference) of the outputs of the message at ``place``, then and now.

        None: it has no old position, is no longer sent, is the same. ``is_other``: it is not at its place in the log.
        """
        before = [one.message for one in old]
        if not is_other and before == new:
            service.equal += len(new)
            yield from ((one.position, one.message, None) for one in old)
            return
        positions = iter([one.position for one in old])
        pairs = [(None, one, one) for one in new] if before == new else aligned(before, list(new), whole=True)
        for kind, was, is_now in pairs:
            number: int | None = None
            if was is not None and is_now is not None and self._is_same_answer(service, destination, was, is_now):
                number = cause  # the call that it answers has another number
                service.equal += 1
            elif kind is not None or is_other:
                name = "moved" if kind is None else kind.value
                one = Difference(service.name, name, destination, place, was, is_now, cause, time_ns)
                number = self._add(service, one)
            else:
                service.equal += 1
            yield None if was is None else next(positions), is_now, number

    def miss(self, service: Service, place: Place, cause: int | None) -> None:
        """Note that the message at ``place`` is missing, so that its outputs of then are missing too."""
        time_ns = service.log.time_of(place[0])
        for destination, outputs in service.recorded.outputs_of(place).items():
            for output in outputs:
                was = output.message
                self._add(service, Difference(service.name, "missing", destination, place, was, None, cause, time_ns))

    def _add(self, service: Service, difference: Difference) -> int:
        """Add a difference, or complete an earlier one with it; return the number of that."""
        keys: list[object] = []
        if difference.old is None or difference.new is None:
            keys += filter(None, ((difference.destination, difference.message), self._execution(service, difference)))
        if (paired := self._pair(service, difference, keys)) is not None:
            return paired
        if difference.new is not None:
            difference.began = self._start_place(service, difference.new, is_new=True)
        if difference.began is None and difference.old is not None:
            difference.began = self._start_place(service, difference.old, is_new=False)
        self._differences.append(difference)
        number = self._by_place[service.name, difference.destination, difference.place] = len(self._differences) - 1
        for key in keys:  # it can have a counterpart elsewhere
            service.unmatched.setdefault(key, []).append(number)
        self._note_changed_call(service, difference)
        return number

    def _pair(self, service: Service, difference: Difference, keys: Sequence[object]) -> int | None:
        """Pair an added call with a missing one; return the number of that difference. The call has moved if the
        messages are equal; it is changed if the same execution sent it, or the answers are for the same call."""
        wanted = "missing" if difference.old is None else "added"
        for key in keys:
            for index, number in enumerate(waiting := service.unmatched.get(key, [])):
                other = self._differences[number]
                if other.kind == wanted:
                    other.old, other.new = difference.old or other.old, difference.new or other.new
                    other.kind = "moved" if other.old == other.new else "changed"
                    self._note_changed_call(service, other)
                    del waiting[index]
                    return number
        return None

    def _is_same_answer(self, service: Service, destination: str, old: bytes, new: bytes) -> bool:
        """Return True if two answers differ only in their call's number, and that call is the same one."""
        if old == new:
            return False
        was, is_now = rpc_of(old), rpc_of(new)
        if RpcKind.CALL in (was.kind, is_now.kind) or was.kind != is_now.kind or destination == CLIENTS:
            return False
        (was_number, *was_rest), (number, *rest) = (
            decoding.decode(one.arguments, type=list[msgspec.Raw]) for one in (was, is_now)
        )
        once = self._once.get((service.receiver(destination), decoding.decode(number, type=int)))
        same = list(map(bytes, was_rest)) == list(map(bytes, rest))
        return same and once is not None and once == decoding.decode(was_number, type=int)

    def _execution(self, service: Service, difference: Difference) -> object | None:
        """Return the key of a call by the execution that makes it, or of an answer by its call; None if it has none."""
        destination, rpc = difference.destination, rpc_of(difference.message)
        if rpc.kind != RpcKind.CALL:
            front = decoding.decode(rpc.arguments, type=list[msgspec.Raw])[:2]
            if destination == CLIENTS:
                return destination, rpc.method_id, tuple(map(bytes, front))
            answered = decoding.decode(front[0], type=int)
            return destination, rpc.method_id, self._once.get((service.receiver(destination), answered), answered)
        if (number := number_of_awaited(service.name, rpc)) is None:
            return None
        if difference.old is None:
            call = service.player.tasks.calls.get(number)
            task = None if call is None else call.task.number
        else:
            task = service.recorded.draws.task_of(number)
        return None if task is None else (destination, rpc.method_id, "of", task)

    @staticmethod
    def _start_place(service: Service, message: bytes, *, is_new: bool) -> Place | None:
        """Return what began the execution that makes an awaited call; None if it is none, or began before the run."""
        if (number := number_of_awaited(service.name, rpc_of(message))) is None:
            return None
        if not is_new:
            return service.recorded.draws.start_of_task(service.recorded.draws.task_of(number))
        return service.player.start_of_call(number)

    def _note_changed_call(self, service: Service, difference: Difference) -> None:
        """Note a changed call's old number: answers have it."""
        if difference.kind != "changed" or difference.old is None or difference.new is None:
            return
        then, now = (number_of_awaited(service.name, rpc_of(call)) for call in (difference.old, difference.new))
        if then is not None and now is not None:
            self._once[service.name, now] = then


def number_of_awaited(caller: str, rpc: IncomingRpc) -> int | None:
    """Return the number of a call that an execution of the service ``caller`` waits for; None for others, such as a
    call of another caller that was held back, and is called now as a call to oneself."""
    if rpc.kind != RpcKind.CALL or rpc.rpc_type != RpcType.ASYNC:
        return None
    by, number, *_ = decoding.decode(rpc.arguments, type=list[msgspec.Raw])
    return decoding.decode(number, type=int) if decoding.decode(by) == caller else None
