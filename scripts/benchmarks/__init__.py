"""The benchmark suite: Immortal beside its rivals and beside the limits of the machine, in one run.

`scripts/bench` makes the environment and runs it. Each part is a module of ``parts`` with ``run(context)``; rivals that
need more than a library are in ``rivals``.
"""
