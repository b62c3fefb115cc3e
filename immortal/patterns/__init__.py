"""Patterns for services, built on the SDK: queue, clone, harmony, pirate, groups."""
