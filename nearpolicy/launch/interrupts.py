"""Ctrl-C, in its own time: the first one is obeyed by whoever is at work, the second ends the process at once.

    SIGINT -> handler, in the main thread, between two of its instructions     the first: `obey`'s action, or leave
           -> a byte in a pipe -> counting thread                              the second: the process ends here

The handler alone would not do: the main thread may be inside one long call, and of two signals during it a handler sees
one. This module loads nothing, so that it can listen before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells count it."""
CLEAN_UP_S = 20.0
"""What leaving may take; then the process ends as it is."""

_action: Callable[[], None] | None = None
_seen = 0
_leave_by: float | None = None


def listen() -> None:
    """Called once, at the start of the command line, in the main thread."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _handle)
    threading.Thread(target=_count, args=(read,), name="interrupts", daemon=True).start()


def obey(action: Callable[[], None]) -> None:
    """What the first Ctrl-C does from now on. ``action`` runs in the main thread, anywhere; it may `leave`."""
    global _action, _seen
    _action, _seen = action, 0
    signal.signal(signal.SIGINT, _handle)


@contextlib.contextmanager
def first_of_a_script(action: Callable[[], None]) -> Iterator[None]:
    """Inside, the first Ctrl-C runs ``action``, which may raise; the next one raises KeyboardInterrupt, as ever.

    For a program that is not ours. Only the main thread hears signals, and whoever listens already is left alone: then
    nothing changes here.
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        action()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def leave(message: str) -> NoReturn:
    """Say why, and unwind the main thread so that everything is closed; within `CLEAN_UP_S`, or without it."""
    global _leave_by
    _leave_by = time.monotonic() + CLEAN_UP_S
    say(message)
    raise SystemExit(INTERRUPTED)


def say(message: str) -> None:
    """To stderr past Python's buffers: a handler may run while the main thread is inside them."""
    os.write(2, f"\n{message}\n".encode())


def _handle(*_: object) -> None:
    global _seen
    _seen += 1
    if _seen > 1:
        os._exit(INTERRUPTED)
    if _action is not None:
        _action()
    else:
        leave("nearpolicy: stopped")


def _count(read: int) -> None:
    seen = 0
    while seen < 2 and (_leave_by is None or time.monotonic() < _leave_by):
        if select.select([read], [], [], 1.0)[0]:
            seen += os.read(read, 64).count(signal.SIGINT)
    os._exit(INTERRUPTED)
