"""What travels between the controller and actors: answers that keep their errors, and events with their age."""

from __future__ import annotations

import contextlib
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from nearpolicy.errors import ConfigError, NearpolicyError, described

Events = Sequence[tuple[str, dict[str, Any]]]
"""Kind and fields of what is told to the time line; ``ago``: how many seconds before the answer."""
SAME_EVERYWHERE = ("nearpolicy", "torch", "transformers", "numpy", "safetensors", "xxhash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one call of a host."""

    value: Any = None
    error: Exception | None = None
    """Raised there; it keeps its kind here, which errors that Ray passes on do not."""
    trace: str = ""
    events: Events = ()
    state: dict[str, Any] = field(default_factory=dict)
    """What of the host changes with its calls."""
    said: tuple[str, ...] = ()
    """To the person who runs it."""

    def result(self) -> Any:
        if self.error is not None:
            if not isinstance(self.error, NearpolicyError):
                self.error.add_note(f"raised in another process:\n{self.trace}")
            raise self.error
        return self.value


def answered(call: Callable[..., Any], *arguments: Any) -> Answer:
    """What comes of it, an exception too."""
    try:
        return Answer(value=call(*arguments))
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> Answer:
    """An exception that can travel: one of foreign code may hold what cannot."""
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Answer(error=error, trace=text)


_BECAUSE = re.compile(r"\bbecause (it.+?)(?:\.(?:\s|$)|\n|$)")
_UNREACHED = re.compile(r"^The actor \w+ is unavailable: ")


def why_lost(error: BaseException, limit: int = 120) -> str:
    """On one line. Of what Ray says of a dead actor the cause alone: around it stand the actor's names and advice."""
    with contextlib.suppress(Exception):
        if found := _BECAUSE.search(str(error)):
            return found[1]
        if _UNREACHED.match(str(error)):
            return "it cannot be reached"
    return described(error, limit)


@contextlib.contextmanager
def deaths_as(lost: Callable[[str], Exception], limit: int = 120) -> Iterator[None]:
    """Where Ray says that an actor is no more, or out of reach, this error, made of why. What a call itself raised
    there, and that it takes too long, stay as they are."""
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        yield
    except (RayTaskError, GetTimeoutError):
        raise
    except RayError as error:
        raise lost(why_lost(error, limit)) from error


class Diary:
    """Events of a host until somebody collects them. From any thread."""

    def __init__(self) -> None:
        self._told: list[tuple[float, str, dict[str, Any]]] = []

    def tell(self, kind: str, **fields: Any) -> None:
        self._told.append((time.monotonic(), kind, fields))

    def take(self) -> Events:
        told, self._told = self._told, []
        now = time.monotonic()
        return [(kind, fields | {"ago": now - at}) for at, kind, fields in told]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host has come to life."""

    node: str
    node_id: str
    """Ray's name of it."""
    pid: int
    versions: dict[str, str]
    actor_id: str | None = None
    """Ray's name of the actor; None in a driver."""
    free_mb: float | None = None
    """Main memory that the node could give."""
    gpus: tuple[str, ...] = ()
    """Of the node, as Ray numbers them: those of this actor."""
    free_gpu_mb: float | None = None
    """Memory that the first of them could give."""
    device: str | None = None
    """Which one that is, wherever it is asked for; None for the CPU."""


def here() -> Place:
    import os

    import ray

    from nearpolicy.launch.sizes import available_memory_mb

    installed = {name: metadata.version(name) for name in SAME_EVERYWHERE}
    versions = {"python": ".".join(map(str, sys.version_info[:3])), **installed}
    node_id = ray.get_runtime_context().get_node_id()
    gpus = tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
    free_gpu_mb, device = _gpu() if gpus else (None, None)
    return Place(
        node=platform.node(),
        node_id=node_id,
        pid=os.getpid(),
        versions=versions,
        actor_id=ray.get_runtime_context().get_actor_id(),
        free_mb=available_memory_mb(),
        gpus=gpus,
        free_gpu_mb=free_gpu_mb,
        device=device,
    )


def _gpu() -> tuple[float | None, str | None]:
    """Free memory and identity of the device that roles here will compute on; None if torch finds none. This has never
    run on one."""
    import torch

    from nearpolicy.models.device import identity, pick_device

    device = pick_device()
    if device.type == "cpu":
        return None, None
    return torch.accelerator.get_memory_info(device)[0] / 2**20, identity(device)


def require_same_versions(places: Sequence[Place]) -> None:
    """`ConfigError` that names what differs, and where: other versions give other bits, and other meanings."""
    ours = here()
    found = {
        f"{name} is {place.versions.get(name, 'absent')} on {place.node} and {ours.versions[name]} on {ours.node}"
        for place in places
        for name in ours.versions
        if place.versions.get(name) != ours.versions[name]
    }
    if found:
        raise ConfigError(f"nodes differ: {'; '.join(sorted(found))}. Install the same versions on all of them")
