"""The benchmark suite: Immortal beside its rivals and beside what the machine itself can do, in one run.

`scripts/bench` makes the environment and runs it. Each part is a module of ``parts`` with ``run(context)``; the rivals
that need more than a library are in ``rivals``.
"""
