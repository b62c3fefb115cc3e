"""Sources of apps that several tests run as processes of their own."""

COUNTER = """
from immortal import Immortal, rpc


class Counter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def add(self) -> int:
        self.count += 1
        return self.count

    @rpc
    def reset(self) -> int:
        self.count = 0
        return self.count
"""
