"""Leaderboard of a game, with seasons of a week: the best hundred, anybody's rank, and who won before.

Use it where many small updates have to be counted once, and asked for at once. All is in memory: a rank is a binary
search, and no database is asked. A result that the game sends twice with one key counts once. On Mondays at noon the
season ends: its winners are kept, and the next one begins.

immortal dev leaderboard.py              # and, for the game: immortal serve leaderboard=leaderboard:Leaderboard
immortal call leaderboard add ann 120 --key match-17
immortal call leaderboard top 10 --query
"""

from bisect import bisect_left, insort

from immortal import Immortal, Transient, cron, query, rpc


class Leaderboard(Immortal):
    points: dict[str, int]
    winners: list[list[tuple[str, int]]]  # the first three of each season
    ranking: Transient[list[tuple[int, str]]]  # the same points, the most first: made of them, so not saved

    def __init__(self) -> None:
        self.points, self.winners = {}, []

    def prepare(self) -> None:
        self.ranking = sorted((-points, player) for player, points in self.points.items())

    @rpc
    def add(self, player: str, points: int) -> int:
        """Add the points of a match; return the player's rank."""
        if player in self.points:
            self.ranking.pop(bisect_left(self.ranking, (-self.points[player], player)))
        self.points[player] = self.points.get(player, 0) + points
        insort(self.ranking, (-self.points[player], player))
        return self.rank(player)

    @query
    def rank(self, player: str) -> int:
        """Return the player's rank, 1 for the best; players with equal points share a rank."""
        return 1 + bisect_left(self.ranking, (-self.points.get(player, 0), ""))

    @query
    def top(self, count: int = 100) -> list[tuple[str, int]]:
        return [(player, -points) for points, player in self.ranking[:count]]

    @cron("0 12 * * mon")
    def end_season(self) -> None:
        self.winners.append(self.top(3))
        self.points.clear()
        self.ranking.clear()
