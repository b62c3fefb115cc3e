"""The parts: what is measured."""
