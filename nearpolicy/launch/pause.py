"""A run that waits for a person: a file says why, and removing it lets the run go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from nearpolicy.waits import waiting

PAUSED = "PAUSED"
_LOOK_EVERY_S = 0.2


async def pause(
    folder: Path, reason: str, *, most_s: float, say: Callable[[str], None], is_stopped: Callable[[], bool]
) -> bool:
    """True when the file was removed; False when the run is stopped, or nobody came for ``most_s`` seconds."""
    file, until = folder / PAUSED, time.monotonic() + most_s
    file.write_text(
        f"{reason}\nRemove this file to let the run go on; Ctrl-C ends it. By itself it ends after {most_s:g} s.\n"
    )
    say(f"paused: {reason}. To go on: rm {file}")
    try:
        with waiting("the run", f"a person to remove {file} (paused: {reason})"):
            while file.exists():
                if is_stopped():
                    return False
                if time.monotonic() > until:
                    say(f"nobody let the run go on for {most_s:g} s (pause_s); it ends")
                    return False
                await asyncio.sleep(_LOOK_EVERY_S)
        say("going on")
        return True
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
