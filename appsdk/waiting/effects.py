"""Effects that handlers wait for, and the results that the log brings.

A result is an impulse to oneself, with EFFECT_METHOD_ID and [number, what, detail, whether it raised, value]: ``what``
and ``detail`` are those of the journal, so that it is never taken for the result of another effect.
"""

from __future__ import annotations

import contextvars
import hashlib
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import make_writer
from immortal.appsdk.calls.run_contexts import handed_down
from immortal.appsdk.effects.options import EffectOptions
from immortal.appsdk.effects.request import EffectFunction, EffectRequest, EffectRunner
from immortal.appsdk.handlers.decorators import EFFECT_METHOD_ID
from immortal.appsdk.state.journal import WAYS_OUT, JournalError, described
from immortal.appsdk.waiting.operations import Operation, Owner
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import RpcType

_write_result = make_writer("the result of an effect", EFFECT_METHOD_ID, RpcType.IMPULSE)


class EffectResult(msgspec.Struct, array_like=True, frozen=True):
    """What the log brings. ``value`` is encoded: what was returned, or the exception."""

    number: int
    what: str
    detail: int
    raised: bool
    value: msgspec.Raw


class Effect(Operation):
    """Done when the log has its result. ``encoded``: its arguments. ``variables``: its context is a copy of this."""

    __slots__ = ("_arguments", "encoded", "function", "options", "variables")

    def __init__(
        self, task: Owner, function: EffectFunction, arguments: tuple[Any, ...], options: EffectOptions
    ) -> None:
        super().__init__(task, f"effect {function.name}")
        self.function = function
        self.options = options
        self._arguments = arguments
        self.encoded = b""
        self.variables: contextvars.Context | None = None

    def _start(self) -> None:
        self.variables = handed_down()
        self.encoded = self.function.encode_arguments(self._arguments, keeps_types=self.task.keeps_types)
        self._arguments = ()
        self.detail = crc64(self.encoded)
        self.task.begin(self)

    def decode(self, value: bytes) -> Any:
        return self.function.decode_result(value)

    def decode_error(self, value: bytes) -> Exception:
        return self.function.decode_error(value, self.options.raises)


class WaitingEffects:
    """Those of one instance that have no result yet. Once :meth:`start` has a runner they are run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._functions: dict[Callable[..., Any], EffectFunction] = {}
        self._waiting: dict[int, Effect] = {}
        self._requests: dict[int, EffectRequest] = {}
        self._runner: EffectRunner | None = None
        self._paused_runner: EffectRunner | None = None
        self._misfit = ""
        self.begun: list[tuple[int, str, int]] | None = None  # numbers, what and detail, where somebody looks

    @property
    def count(self) -> int:
        return len(self._waiting)

    def function(self, function: Callable[..., Any]) -> EffectFunction:
        """Raises UsageError, DefinitionError."""
        try:
            if (found := self._functions.get(function)) is None:
                found = self._functions[function] = EffectFunction(function)
        except TypeError:  # an object that can be called and can't be a key; or a DefinitionError, which comes again
            found = EffectFunction(function)
        return found

    def add(self, effect: Effect) -> None:
        self._waiting[effect.number] = effect
        if self.begun is not None:
            self.begun.append((effect.number, effect.what, getattr(effect, "detail", 0)))
        if self._runner is not None and not self._context.multicasts.holds_effect(effect.number):
            self._run(effect, self._runner)

    def unheld(self, number: int) -> None:
        """The multicasts that it waited for stand."""
        effect = self._waiting.get(number)
        if effect is not None and self._runner is not None and number not in self._requests:
            self._run(effect, self._runner)

    def get(self, number: int) -> Effect | None:
        return self._waiting.get(number)

    def request(self, number: int) -> EffectRequest | None:
        """What is run for it; None: it is not run yet, or not here."""
        return self._requests.get(number)

    def try_now(self, number: int) -> bool:
        """Whether it waited for its next attempt, which is made now."""
        request = self._requests.get(number)
        return request is not None and request.try_now is not None and request.try_now()

    def remove(self, effect: Effect) -> None:
        self._waiting.pop(effect.number, None)
        if (request := self._requests.get(effect.number)) is not None and self._runner is not None:
            self._forget(effect.number, request, self._runner)

    def forget_all(self) -> None:
        self._waiting.clear()

    def start(self, runner: EffectRunner | None) -> None:
        """The app is primary: all that wait are run, the oldest first. Raises JournalError.

        None: they wait on.
        """
        if self._misfit:
            raise JournalError(f"{self._misfit}; the app stops\n{WAYS_OUT}")
        self._paused_runner = runner
        self.resume()

    def pause(self) -> None:
        """What was done is done once more: nothing is run until :meth:`resume`; what runs goes on."""
        self._paused_runner, self._runner = self._runner or self._paused_runner, None

    def resume(self) -> None:
        """Run those that wait and do not run yet, and none that nobody waits for."""
        runner, self._paused_runner = self._paused_runner, None
        if runner is None:
            return
        self._runner = runner
        for number, request in list(self._requests.items()):
            if number not in self._waiting:
                self._forget(number, request, runner)
        for number, effect in sorted(self._waiting.items()):
            if number not in self._requests and not self._context.multicasts.holds_effect(number):
                self._run(effect, runner)

    def _forget(self, number: int, request: EffectRequest, runner: EffectRunner) -> None:
        del self._requests[number]
        request.is_cancelled = True
        runner.cancel(request)

    def _run(self, effect: Effect, runner: EffectRunner) -> None:
        task = effect.task  # which may have gone on by the time at which the key is asked for
        make_key = partial(self._key, effect.options.key, task.number, task.generation, effect.step)
        send = partial(self._send, effect.number, effect.what, effect.detail)
        request = EffectRequest(
            effect.number, effect.function, effect.encoded, effect.options, make_key, send, effect.variables
        )
        self._requests[effect.number] = request
        runner.start(request)

    def _key(self, given: str | None, task_number: int, generation: int, step: int) -> str:
        """The one that was given, or the same for the same step of the same handler of the same instance's life, and
        for no other's. Any thread."""
        if given is not None:
            return given
        digest = hashlib.blake2b(key=self._context.seed, digest_size=16)
        digest.update(f"{self._context.instance_name}\n{task_number} {generation} {step}".encode())
        return str(uuid.UUID(bytes=digest.digest(), version=4))

    def _send(self, number: int, what: str, detail: int, raised: bool, value: bytes) -> None:
        """Any thread. Raises UsageError for what is too large."""
        self._context.outbox.impulses.append_own(_write_result, (number, what, detail, raised, msgspec.Raw(value)))

    def take(self, result: EffectResult) -> Effect | None:
        """The effect that ``result`` is of, if it is still waited for."""
        effect = self._waiting.get(result.number)
        if effect is None:
            return None
        if not effect.fits(result):
            # In a replay of changed code it is an effect that the log knows nothing of. For one's own recovery it is
            # too late to say so by the time at which it is known not to be such a replay.
            self._misfit = self._misfit or (
                f"{effect.task.name} waits for {described(effect)}, and record {self._context.sequence_id} has the "
                f"result of {described(result)} for it"
            )
            return None
        return effect
