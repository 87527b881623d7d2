"""The second stream of a run: groups of earlier steps whose successes are trained once more (RLEP, arXiv 2507.07451).

    store: groups that steps have used up, young enough, with successes and spread -> drawn by (seed, step)

Which groups a step gets depends on the seed, the step and the groups of the steps before it, never on time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nearpolicy.config import RunConfig
from nearpolicy.errors import RunFolderError
from nearpolicy.launch.rows import replayed
from nearpolicy.records import Group, Row
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.payload import PayloadError
from nearpolicy.store.reader import RunReader
from nearpolicy.store.record import RunRecord

_PURPOSE = 0x5EED0F01D
"""Apart from the random numbers of anything else that a step draws."""


class Successes:
    """Draws them from the store of the run; call it with a step."""

    def __init__(self, config: RunConfig, folder: RunFolder, store: RunRecord) -> None:
        self._config = config
        self._settings = config.queue.replay
        self._store = store
        self._run = RunReader(folder.path)
        self._wanted = max(1, round(self._settings.share * config.queue.prompts_per_step))

    def __call__(self, step: int) -> tuple[Sequence[Group], tuple[Row, ...]]:
        self._store.flush()  # what the steps before have used up
        there = self._run.successful_groups(step - self._settings.max_age, self._settings.min_reward)
        if not there:
            return (), ()
        numbers = np.random.Generator(np.random.Philox(key=[self._config.run.seed, _PURPOSE + step]))
        chosen = numbers.choice(len(there), size=min(self._wanted, len(there)), replace=False)
        try:
            groups = [self._run.group(*there[place]) for place in sorted(chosen)]
        except PayloadError as error:
            raise RunFolderError(f"a group that queue.replay has drawn is damaged: {error}") from error
        rows = replayed(self._config, groups)
        with_rows = {row.group for row in rows}
        return [group for group in groups if group.index in with_rows], rows

    def close(self) -> None:
        self._run.close()
