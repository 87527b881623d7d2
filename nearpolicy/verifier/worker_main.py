"""A worker process of the verifier: ``python -m nearpolicy.verifier.worker_main DESCRIPTOR PARENT``.

    socket DESCRIPTOR: setup -> ready; then one call -> one answer, until the other side is gone

It lives no longer than its parent, is deaf to Ctrl-C (the parent decides), gives way to generator and learner on the
processor, and writes what user code prints to stderr: the conversation has a descriptor of its own. It holds no time
limit: the parent kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nearpolicy.errors import described
from nearpolicy.machine import adopt_orphans
from nearpolicy.records import Verdict
from nearpolicy.verifier import functions, rewards
from nearpolicy.verifier.functions import RewardFunctionError, UserFunction
from nearpolicy.verifier.messages import Setup, serve, verdict_answer
from nearpolicy.verifier.rewards import BuiltIn, Sample

BUILT_IN_MEMORY = 768 * 2**20
"""Bytes a built-in score may take beyond what the process holds: with it, a worker stays below 1 GB."""


def main(descriptor: int, parent: int) -> None:
    adopt_orphans()
    serve(descriptor, parent, _prepared)


def _prepared(packed: bytes) -> tuple[dict[str, Any], Callable[[bytes], Any] | None]:
    """What answers requests, with all scorers loaded; or a refusal."""
    setup: Setup = pickle.loads(packed)
    sys.path[:] = setup.sys_path
    scorers: dict[str, UserFunction | BuiltIn] = {}
    for key, blob in setup.scorers.items():
        try:
            scorers[key] = scorer = pickle.loads(blob)
            if not isinstance(scorer, UserFunction):
                rewards.preload(scorer)
        except BaseException as error:
            return {"status": "refused", "message": f"{key} cannot be loaded: {described(error)}"}, None

    def answer(request: bytes) -> dict[str, Any]:
        key, sample = pickle.loads(request)
        return _answer(scorers[key], sample)

    return {"status": "ready"}, answer


def _answer(scorer: UserFunction | BuiltIn, sample: Sample) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        judge = _user_verdict if isinstance(scorer, UserFunction) else _built_in_verdict
        verdict = judge(scorer, sample)
    except RewardFunctionError as error:
        return {"status": "contract", "message": str(error)}
    except _Limit as limit:
        return {"status": "limit", "limit": str(limit), "seconds": time.perf_counter() - started}
    return verdict_answer(verdict, time.perf_counter() - started)


def _user_verdict(function: UserFunction, sample: Sample) -> Verdict:
    try:
        results = function.begin([sample])
        results = [asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result for result in results]
        [verdict] = function.verdicts(results, 1)
    except RewardFunctionError:
        raise
    except BaseException as error:  # SystemExit and all that user code may invent
        return functions.failure(error)
    return verdict


async def _awaited(result: Any) -> Any:
    return await result


class _Limit(Exception):
    """A built-in score ran into the limit it names; only a control run tells who is to blame."""


def _built_in_verdict(reward: BuiltIn, sample: Sample) -> Verdict:
    try:
        with _memory_limit(BUILT_IN_MEMORY):
            return rewards.score(reward, sample)
    except MemoryError:
        raise _Limit("memory_limit") from None
    except RecursionError:
        raise _Limit("recursion_limit") from None
    except Exception as error:
        return functions.failure(error, reward.kind)


@contextlib.contextmanager
def _memory_limit(extra: int) -> Iterator[None]:
    """A lower soft limit while a built-in score runs; user functions may load what they like."""
    if sys.platform != "linux":  # elsewhere the kernel ignores RLIMIT_AS, and there is no /proc to measure by
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = held + extra if soft == resource.RLIM_INFINITY else min(soft, held + extra)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
