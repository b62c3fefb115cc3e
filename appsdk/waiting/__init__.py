"""Waiting ``async def`` handlers: the operations that they wait for, and how each is run again over its journal."""
