"""Personal values: encrypted by a key of the person whom they are about, until that person is forgotten.

A value is encrypted as it is made, and decrypted as it is read. So a call, a state, a log and all copies of them have
nothing but the ciphertext. Equal values of a person have the same bytes (AES-SIV), in each run and each replay.
"""

from __future__ import annotations

import typing
from typing import Any, Generic, TypeVar

from msgspec import inspect as shapes

from immortal.appsdk.types import registry
from immortal.appsdk.types.encoding import form_of
from immortal.appsdk.types.handles import MARK, read_extension
from immortal.appsdk.types.registry import Codec, describe_received, unsupported_type
from immortal.appsdk.types.steps import NotRoundTrippableError, encoder
from immortal.protocol import decoding, distribution, personal_keys
from immortal.protocol.extension_values import encode_extension, kind_of
from immortal.protocol.personal_keys import SUBJECT_CHARACTERS_MAX, Person, PersonalKeyError
from immortal.protocol.safe_output import is_encodable

T = TypeVar("T")

_CIPHERTEXT_SHOWN_BYTES = 4
_FORM = form_of(Any)
_UNTYPED = (shapes.StructType, shapes.DataclassType, shapes.NamedTupleType, shapes.EnumType, shapes.CustomType)
"""Types whose values are decoded as another type where no annotation is known."""


class Personal(Generic[T]):
    """Value about a person, who can be forgotten: ``name: Personal[str] = Personal("customer-17", "Ann Miller")``.

    ``subject``: the person's ID, which stays in plain: a number, no name. ``value``: None, numbers, text, bytes, times,
    and lists, dicts, tuples and sets of them. ``str`` and ``repr`` do not show it, so that no line of output has it by
    accident.
    """

    __slots__ = ("_ciphertext", "_subject")

    _subject: str
    _ciphertext: bytes  # b"": made of a person who was forgotten already

    def __init__(self, subject: str, value: T) -> None:
        """Encrypt a value. Raises TypeError for one that can't be kept, PersonalKeyError."""
        if not isinstance(subject, str) or not 0 < len(subject) <= SUBJECT_CHARACTERS_MAX or not is_encodable(subject):
            raise TypeError(
                f"Personal({subject!r:.40}, ...): the ID of a person was expected, a text of 1 to"
                f" {SUBJECT_CHARACTERS_MAX} characters"
            )
        try:
            plain = _FORM.encode(value)
        except NotRoundTrippableError as error:  # its path has keys of the value
            raise TypeError(f"Personal({subject!r}, ...): {error.problem}") from None
        if MARK in plain:
            raise TypeError(f"Personal({subject!r}, ...): a handle can't be personal")
        person = personal_keys.find_or_create(subject)
        self._subject = subject
        self._ciphertext = b"" if person.forgotten else _cipher(person).encrypt(plain, None)

    @property
    def subject(self) -> str:
        """ID of the person."""
        return self._subject

    @property
    def forgotten(self) -> bool:
        """True once the person is forgotten."""
        return not self._ciphertext or bool((found := personal_keys.find(self._subject)) and found.forgotten)

    @property
    def value(self) -> T | None:
        """The value; None once the person is forgotten. Raises PersonalKeyError without the key."""
        person = personal_keys.find(self._subject) if self._ciphertext else Person(self._subject, forgotten="before")
        if person is None:
            raise PersonalKeyError(
                f"{personal_keys.folder()} has no key of {self._subject!r}: {personal_keys.KEYS_VARIABLE} must name the"
                f" folder that the app had which made this value"
            )
        if person.forgotten:
            return None
        cipher = _cipher(person)
        from cryptography.exceptions import InvalidTag

        try:
            plain = cipher.decrypt(self._ciphertext, None)
        except InvalidTag:
            raise PersonalKeyError(
                f"the key of {self._subject!r} in {personal_keys.folder()} is missing, or another one than this value"
                f" was encrypted with, or the value is damaged: one folder of keys is for all apps that exchange"
                f" such values"
            ) from None
        found: T = decoding.decode(plain, ext_hook=read_extension)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Personal):
            return NotImplemented
        return self._encoded == other._encoded

    def __hash__(self) -> int:
        return hash(self._encoded)

    def __repr__(self) -> str:
        return f"<{_shown(self)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Personal._decoded, self._encoded

    @property
    def _encoded(self) -> tuple[str, bytes]:
        return self._subject, self._ciphertext

    @classmethod
    def _decoded(cls, subject: str, ciphertext: bytes) -> Personal[Any]:
        made: Personal[Any] = cls.__new__(cls)
        made._subject, made._ciphertext = subject, ciphertext
        return made


def _cipher(person: Person) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    except ImportError as error:
        raise PersonalKeyError(
            f"personal values need the extra encryption ({error}): {distribution.add_extra('encryption')}"
        ) from None
    return AESSIV(bytes.fromhex(person.key))


def _shown(value: Personal[Any]) -> str:
    """Describe a value without its content. Different values have different texts."""
    whose = f"{value._subject!r} {value._ciphertext[:_CIPHERTEXT_SHOWN_BYTES].hex()}".rstrip()
    try:
        person = personal_keys.find(value._subject)
    except PersonalKeyError:
        person = None
    if person is not None and person.forgotten:
        return f"forgotten on {person.forgotten}: {whose}"
    return f"personal: {whose}" if value._ciphertext else f"forgotten: {whose}"


def _decode(annotation: Any, plain: Any) -> Personal[Any]:
    if not isinstance(plain, Personal):  # else plain values would be in the log
        raise ValueError(f"Expected a personal value (immortal.Personal), got {describe_received(plain)}")
    return plain


def _problem(annotation: Any) -> str | None:
    (kind,) = typing.get_args(annotation) or (Any,)
    if (problem := unsupported_type(kind)) is not None:
        return problem
    for info in registry._types_in(registry.type_info(kind)):
        cls = getattr(info, "cls", object)
        if isinstance(info, _UNTYPED) and (cls is Personal or kind_of(cls) is None):
            return f"Personal[{getattr(cls, '__qualname__', cls)}]: a value of plain types was expected, such as a dict"
    return None


registry._registered[Personal] = Codec(
    lambda value: encode_extension(value, encoder.encode), _decode, show=_shown, problem=_problem
)
