"""The training state of a checkpoint as files, for any number of processes.

    training_state.pt     everything; where ranks hold tensors in pieces, their names and shapes, and the digests of
    training_state/       torch.distributed.checkpoint: those tensors, each rank's pieces in a file of its own
    training_state.xxh3   digest of training_state.pt

Any number of ranks reads what any number has written: a rank reads its own pieces alone, one process without ranks
whole tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from nearpolicy.errors import RunFolderError
from nearpolicy.learner.ranks import ALONE, Together
from nearpolicy.learner.sharding import Sharding
from nearpolicy.models.pieces import in_pieces

STATE, DIGEST, PIECES = "training_state.pt", "training_state.xxh3", "training_state"
_MARK = "in pieces"


Stage = Callable[[], AbstractContextManager[None]]
"""Around what can fail on one rank: an error there is the same error on all of them behind it."""


def write_state(state: Mapping[str, Any], folder: Path, ranks: Together, stage: Stage) -> None:
    """All ranks together; rank 0 writes what is not in pieces."""
    pieces: dict[str, Any] = {}
    tree = _changed(state, lambda value: _noted(value, pieces))
    files = _write_pieces(pieces, folder / PIECES, ranks, stage) if pieces else {}
    with stage():
        if ranks.rank == 0:
            torch.save(tree if ranks is ALONE else {"state": tree, "files": files}, folder / STATE)
            (folder / DIGEST).write_text(digest_of(folder / STATE))


def _write_pieces(pieces: dict[str, Any], folder: Path, ranks: Together, stage: Stage) -> dict[str, str]:
    """Digest by name of file."""
    import torch.distributed.checkpoint as dcp

    with stage():
        try:
            dcp.save(pieces, storage_writer=dcp.FileSystemWriter(folder))
        except dcp.api.CheckpointException as error:  # on every rank, if one cannot write
            raise _in_words(error) from None
    own = [*folder.glob(f"__{ranks.rank}_*"), *([folder / ".metadata"] if ranks.rank == 0 else [])]
    told = ranks.exchange("digests of the training state", {file.name: digest_of(file) for file in own})
    return {name: digest for of_rank in told for name, digest in of_rank.items()}


def read_state(folder: Path, ranks: Together) -> dict[str, Any]:
    """What `write_state` has written, but for what lies in pieces; `RunFolderError` if that is not what is there. Ranks
    look at different files."""
    if (folder / DIGEST).exists() and digest_of(folder / STATE) != (folder / DIGEST).read_text():
        raise RunFolderError(f"{STATE} is not what was written")
    found = torch.load(folder / STATE, weights_only=True, mmap=ranks is not ALONE)
    if "files" not in found:
        return found
    for name, digest in sorted(found["files"].items())[ranks.rank :: ranks.size]:
        if digest_of(folder / PIECES / name) != digest:
            raise RunFolderError(f"{PIECES}/{name} is not what was written")
    return found


def with_pieces(
    found: Mapping[str, Any], folder: Path, ranks: Together, sharding: Sharding, stage: Stage
) -> dict[str, Any]:
    """The state itself, from what `read_state` has found; all ranks together."""
    if "files" not in found:
        return dict(found)
    pieces: dict[str, Any] = {}
    tree = _changed(found["state"], lambda value: _made(value, pieces, sharding))
    if pieces:
        import torch.distributed.checkpoint as dcp

        with stage(), warnings.catch_warnings():
            try:
                if ranks is ALONE:
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
                dcp.load(pieces, storage_reader=dcp.FileSystemReader(folder / PIECES), no_dist=ranks is ALONE)
            except dcp.api.CheckpointException as error:
                raise _in_words(error) from None
    return tree


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of dictionaries and lists with other leaves."""
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, Mapping):
        return {key: _changed(each, change) for key, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list) else value


def _noted(value: Any, pieces: dict[str, Any]) -> Any:
    if not in_pieces(value):
        return value
    name = f"{len(pieces):06}"
    pieces[name] = value.detach()
    return {_MARK: name, "shape": list(value.shape), "dtype": value.dtype}


def _made(value: Any, pieces: dict[str, Any], sharding: Sharding) -> Any:
    if not isinstance(value, Mapping) or _MARK not in value:
        return value
    pieces[value[_MARK]] = sharding.empty(value["shape"], value["dtype"])
    return pieces[value[_MARK]]


def _in_words(error: BaseException) -> OSError:
    """Torch's error holds every rank's traceback, and is no `Exception`."""
    failures = sorted(getattr(error, "failures", {}).items())
    told = [f"rank {rank}: {each[0] if isinstance(each, tuple) else each}" for rank, each in failures]
    return OSError("; ".join(told) or str(error))


def digest_of(file: Path) -> str:
    """xxh3-128 of a file."""
    import xxhash

    with file.open("rb") as opened:
        hasher = xxhash.xxh3_128()
        while part := opened.read(1 << 24):
            hasher.update(part)
    return hasher.hexdigest()
