"""Verdicts that are known already: the same completion of the same row, judged by a reward that has no other state.

Samples of one group are often alike, letter by letter, and come at one time: what is being asked is not asked twice.
What failed, and what ran into a limit, is never kept: it says something about that moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from nearpolicy.records import Outcome, Verdict
from nearpolicy.verifier.config import FunctionReward, JudgeReward, RewardConfig, RubricReward
from nearpolicy.verifier.rewards import Sample

_LIMITS = ("time_limit", "memory_limit", "recursion_limit", "output_limit")


def is_deterministic(reward: RewardConfig) -> bool:
    """Whether the same completion always gets the same verdict. Nobody knows that of a user's function; a program may
    read the clock, and an endpoint may waver at temperature 0, but a verdict is no better the second time."""
    judging = reward.judge if isinstance(reward, RubricReward) else reward
    if isinstance(reward, JudgeReward | RubricReward) and judging is not None:
        return judging.temperature == 0
    return not isinstance(reward, FunctionReward)


class VerdictCache:
    """The newest ``entries`` verdicts by what they depend on."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Future[Verdict]] = {}

    async def verdict(self, key: str | None, sample: Sample, ask: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """The known verdict of source ``key`` on a sample, or what ``ask`` finds. None for a source that is not to be
        remembered."""
        if key is None or not self._entries or (name := _name(key, sample)) is None:
            return await ask()
        while name not in self._known and name in self._under_way:
            # Equal samples of a group come together. If who asks for them all is cancelled, the next one asks.
            under_way = self._under_way[name]
            await asyncio.wait([under_way])
            if not under_way.cancelled():
                return under_way.result()
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        return await self._asked(name, ask)

    async def _asked(self, name: bytes, ask: Callable[[], Awaitable[Verdict]]) -> Verdict:
        self._under_way[name] = under_way = asyncio.get_running_loop().create_future()
        try:
            found = await ask()
            under_way.set_result(found)
        finally:
            under_way.cancel()  # unless there is a result
            del self._under_way[name]
        if found.outcome is Outcome.SCORED and not found.reason.startswith(_LIMITS):
            self._known[name] = found
            if len(self._known) > self._entries:
                self._known.popitem(last=False)
        return found


def is_chosen(key: str, sample: Sample, share: float) -> bool:
    """Whether a sample belongs to a share of all, always the same ones."""
    text = f"{key}\n{sample.text}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") < share * 2**32


def _name(key: str, sample: Sample) -> bytes | None:
    """A digest of all that a verdict may depend on; None for a row that cannot be written down."""
    try:
        text = json.dumps([key, sample.text, sample.prompt, dict(sample.columns)], sort_keys=True)
    except (TypeError, ValueError):
        return None
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
