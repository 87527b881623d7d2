"""What replicas do with their time: utilisation, and the bubbles in which one rests although work waits elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from nearpolicy.roles import Load


@dataclass(slots=True)
class _Replica:
    last: Load
    wall_s: float = 0.0
    busy_s: float = 0.0
    bubble_s: float = 0.0
    sampled: int = 0


class Usage:
    """Sums what replicas report, from one report to the next."""

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}
        self._waited_s = 0.0
        """Time in which some request waited for room, up to ``_since``."""
        self._waits = False
        self._since = 0.0
        self._waited_when_seen: dict[int, float] = {}

    def waits(self, waits: bool, now: float) -> None:
        """Whether requests wait that no replica has taken on, from now on."""
        if self._waits:
            self._waited_s += now - self._since
        self._waits, self._since = waits, now

    def observe(self, number: int, load: Load, now: float) -> None:
        """The time between two reports counts by the replica's own clock; of what it rested, the bubble is at most the
        time in which work waited."""
        self.waits(self._waits, now)
        replica = self._replicas.get(number)
        waited = self._waited_s - self._waited_when_seen.get(number, self._waited_s)
        self._waited_when_seen[number] = self._waited_s
        if replica is None or load.busy_s < replica.last.busy_s or load.at < replica.last.at:  # another one by now
            self._replicas[number] = _Replica(load)
            return
        wall, busy = load.at - replica.last.at, load.busy_s - replica.last.busy_s
        replica.wall_s += wall
        replica.busy_s += min(busy, wall)
        replica.bubble_s += min(waited, max(0.0, wall - busy))
        replica.sampled += load.sampled - replica.last.sampled
        replica.last = load

    def metrics(self) -> dict[str, float]:
        """By replica, since the last call; nothing of one that has not reported twice."""
        found: dict[str, float] = {}
        for number, replica in sorted(self._replicas.items()):
            if replica.wall_s > 0:
                found[f"utilisation/generator_{number}"] = replica.busy_s / replica.wall_s
                found[f"bubble/generator_{number}"] = replica.bubble_s / replica.wall_s
                found[f"throughput/generator_{number}_tokens_per_s"] = replica.sampled / replica.wall_s
            replica.wall_s = replica.busy_s = replica.bubble_s = 0.0
            replica.sampled = 0
        return found

    def forget(self, number: int) -> None:
        self._replicas.pop(number, None)
        self._waited_when_seen.pop(number, None)
