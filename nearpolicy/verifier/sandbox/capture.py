"""Pipes out of a run, read as they fill and never waited for: a run's end is told by its process, not by a stream."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable

LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16
_PAUSE_S = 0.002
"""After a read of less than a page: a program that writes single bytes would keep the event loop of the judge busy."""
_LITTLE = 4096


class Capture:
    """Keeps the first ``keep`` bytes of a pipe, or the ``last`` ones; says once when there are more than ``cap``."""

    def __init__(self, keep: int, cap: int, on_excess: Callable[[], None], *, last: bool = False) -> None:
        self._keep = keep
        self._last = last
        self._cap = cap
        self._on_excess = on_excess
        self._kept = bytearray()
        self._seen = 0
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._listening = False
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reading, False)

    @property
    def kept(self) -> bytes:
        return bytes(self._kept)

    @property
    def excess(self) -> bool:
        return self._seen > self._cap

    def listen(self) -> None:
        """Read from now on, and not only what the pipe holds in the end."""
        self._pause, self._listening = None, True
        self._loop.add_reader(self._reading, self._readable)

    def _do_not_listen(self) -> None:
        if self._listening:
            self._loop.remove_reader(self._reading)
        self._listening = False

    def _readable(self) -> None:
        seen = self._seen
        if self._read() and self._seen - seen < _LITTLE:
            self._do_not_listen()
            self._pause = self._loop.call_later(_PAUSE_S, self.listen)

    def _read(self) -> bool:
        """Whether there may be more at once."""
        try:
            data = os.read(self._reading, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._do_not_listen()
            return False
        was = self.excess
        self._seen += len(data)
        if self._last:
            self._kept += data
            del self._kept[: -self._keep]
        else:
            self._kept += data[: max(0, self._keep - len(self._kept))]
        if self.excess and not was:
            self._on_excess()
        self._arrived()
        return True

    def _arrived(self) -> None:
        """More is kept."""

    def close_writing(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def finish(self) -> None:
        """Take what is in the pipe, up to the cap, and close it."""
        self.close_writing()
        while not self.excess and self._read():
            pass
        self.close()

    def close(self) -> None:
        self.close_writing()
        if self._pause is not None:
            self._pause.cancel()
        if self._reading >= 0:
            self._do_not_listen()
            os.close(self._reading)
            self._reading = -1


class Frames(Capture):
    """A pipe of frames: the first is kept whole; of a conversation each is handed over as it comes."""

    def __init__(self, cap: int, on_excess: Callable[[], None], on_frame: Callable[[bytes], None] | None) -> None:
        super().__init__(cap, cap, on_excess)
        self._on_frame = on_frame

    @property
    def first(self) -> bytes | None:
        return self._frame_at(0)

    def _frame_at(self, place: int) -> bytes | None:
        if len(self._kept) < place + LENGTH.size:
            return None
        [length] = LENGTH.unpack_from(self._kept, place)
        begin = place + LENGTH.size
        return bytes(self._kept[begin : begin + length]) if len(self._kept) >= begin + length else None

    def _arrived(self) -> None:
        while self._on_frame is not None and (frame := self._frame_at(0)) is not None:
            # A conversation may be long: what has been handed over counts no more.
            taken = LENGTH.size + len(frame)
            del self._kept[:taken]
            self._seen -= taken
            self._on_frame(frame)
