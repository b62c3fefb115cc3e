"""Pairs of keys, and what the owner of one may send."""

from __future__ import annotations

import pytest

from immortal.messenger import KeyPair, Role


def test_a_pair_fits_if_its_secret_key_makes_its_public_one() -> None:
    pair, other = KeyPair.new(), KeyPair.new()
    assert pair.matches
    assert not KeyPair(pair.public, other.secret).matches
    assert not KeyPair(pair.public, "no key").matches
    assert pair.secret not in repr(pair)


@pytest.mark.parametrize(
    ("role", "a_peers_message", "a_clients_frame"),
    [
        (Role.INSTANCE, True, False),
        (Role.CLIENT, False, True),
        (Role.OWNER, False, True),
        (Role.OPERATOR, False, False),
    ],
)
def test_each_role_sends_one_kind_or_none(role: Role, a_peers_message: bool, a_clients_frame: bool) -> None:
    assert (role.may_send(False), role.may_send(True)) == (a_peers_message, a_clients_frame)
