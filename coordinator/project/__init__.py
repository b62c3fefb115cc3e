"""A project: the services that one folder runs together, as `immortal.toml` says, or as one file of Python has them.

    immortal.toml   read by :mod:`immortal.coordinator.project.project`: names, classes, settings, environment
    .immortal/      its registry, which :mod:`immortal.coordinator.project.fleet` keeps like the file

:mod:`coordinator.project.fleet` runs all of them, each under an `immortal run` of its own; what comes of them is shown
by :mod:`immortal.coordinator.project.output` at a terminal, or kept by :mod:`immortal.coordinator.project.output`.
"""
