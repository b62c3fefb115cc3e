"""Attacks. Each test is named by what it tries; tests/requirements/attacks.md lists them."""
