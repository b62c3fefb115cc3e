"""Nodes and handles (`docs/guide/nodes.md`): objects of an instance that others call, and what they call them by."""
