"""Where metrics go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio.

Each needs its extra and is imported only when asked for. A sink that cannot start ends the run at once, while nothing
is lost; a sink that fails later is reported once and left out from then on: training never stops for it.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from nearpolicy.errors import UserError, nearest

_LOG = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the metrics of a step; may raise."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in ``<run>/tensorboard``, written without torch or TensorFlow. Shows NaN and infinity as such."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        writer = _need("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events = _need("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _need("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writer = writer.EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of the same name in the project ``nearpolicy``; account and mode come from wandb's own environment."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        wandb = _need("wandb", "wandb")
        self._run = wandb.init(project="nearpolicy", name=run_dir.name, dir=str(run_dir), config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """A run of the same name in the local trackio project ``nearpolicy``."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        trackio = _need("trackio", "trackio")
        self._run = trackio.init(project="nearpolicy", name=run_dir.name, config=dict(config), embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # trackio keeps its records as JSON, which cannot say NaN; metrics.jsonl names what is missing here.
        self._run.log(metrics={name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        self._run.finish()


_MODULES = {
    "tensorboard": ("tensorboard.summary.writer.event_file_writer",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
SINKS: Mapping[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


class Sinks:
    """Several sinks as one that never raises after the start."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        self._each(lambda sink: sink.log(step, numbers))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, act: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                act(sink)
            except Exception as error:  # foreign code with a network behind it: whatever it raises, the run goes on
                del self._sinks[name]
                _LOG.warning(
                    "sink %s failed and is left out from now on (metrics.jsonl has everything): %s: %s",
                    *(name, type(error).__name__, error),
                )


def open_sinks(names: Iterable[str], run_dir: str | Path, config: Mapping[str, Any]) -> Sinks:
    """Start the named sinks; if one cannot start, the others are closed again."""
    opened: dict[str, Sink] = {}
    try:
        for name in names:
            opened[name] = SINKS[name](Path(run_dir), config)
    except BaseException:
        Sinks(opened).close()
        raise
    return Sinks(opened)


def require_sinks(names: Iterable[str]) -> None:
    """`UserError` if a sink is unknown or its extra is not installed; nothing is started."""
    for name in names:
        if name not in SINKS:
            close = nearest(name, list(SINKS))
            hint = f"; did you mean {close}" if close else ""
            raise UserError(f"telemetry.sinks names {name!r}{hint}? Known are {', '.join(SINKS)}")
        for module in _MODULES[name]:
            _need(module, name)


def _need(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"telemetry.sinks asks for {extra}, which cannot be imported ({error}). "
            f"Install it with: pip install 'nearpolicy[{extra}]'"
        ) from error
