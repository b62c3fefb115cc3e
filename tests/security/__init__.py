"""Attacks. Each test is named by what it tries; docs/guide/security.md lists them."""
