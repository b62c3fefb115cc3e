"""Projects: the services that one folder runs together, listed in `immortal.toml` or found in one Python file.

    immortal.toml   read by :mod:`immortal.coordinator.project.project`: names, classes, settings, environment
    .immortal/      its registry, which :mod:`immortal.coordinator.project.fleet` updates from the file

:mod:`coordinator.project.fleet` runs all of them, each under an `immortal run` of its own;
:mod:`coordinator.project.output` shows their output at a terminal, or keeps it in files.
"""
