"""Memory of a learner's rank until it has its pieces: read alone, against a whole model that is cut.

    python -m benchmarks.loading [--ranks 4] [--mb 80]

Each way has processes of its own, which meet by gloo. In each a tiny model is loaded first, so that what libraries take
is not counted, and then one of random weights, in files of float32: as float32 and as bfloat16. Peak and end are what
the kernel counts as resident above what was there before (VmHWM, set back by /proc/self/clear_refs, and VmRSS), of the
rank that has most; pages of mapped files are in it. Results are compared first: all ways give the same pieces. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
WAYS, DTYPES = ("whole", "pieces"), ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=int, default=80, help="of the model, as float32; its layers follow")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(_rank(*json.loads(arguments.rank))))
        return
    from nearpolicy.models.loading import resolve

    folder = resolve("random:llama", _options(arguments.mb))
    resolve("random:llama")  # before several want to make it
    size = (folder / "model.safetensors").stat().st_size / MIB
    result: dict[str, Any] = {"model_mb_float32": round(size, 1), "ranks": arguments.ranks}
    shown = {}
    for dtype in DTYPES:
        for way in WAYS:
            found = _processes(arguments.ranks, str(folder), way, dtype)
            shown[way, dtype] = [of_rank.pop("digest") for of_rank in found]
            result[f"{dtype}_{way}"] = {key: max(of_rank[key] for of_rank in found) for key in found[0]}
            print(f"{dtype} {way}: {result[f'{dtype}_{way}']}", flush=True)
        if shown["whole", dtype] != shown["pieces", dtype]:
            raise SystemExit(f"{dtype}: pieces that were read are not those that were cut")
    print(json.dumps(result))


def _options(mb: int) -> dict[str, int]:
    """Two million numbers of the embedding, which is the head too, and 2.36 million in each layer."""
    layers = max(1, round((mb * MIB / 4 - 2**21) / 2.36e6))
    widths = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    return {**widths, "vocab_size": 4096, "num_hidden_layers": layers}


def _processes(ranks: int, folder: str, way: str, dtype: str) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    own = dict(os.environ, OMP_NUM_THREADS="1")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loading", "--rank", json.dumps([i, ranks, address, folder, way, dtype])],
            stdout=subprocess.PIPE,
            text=True,
            env=own,
        )
        for i in range(ranks)
    ]
    told = [process.communicate(timeout=600)[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a rank has failed; its own output says why")
    return [json.loads(text.splitlines()[-1]) for text in told]


def _rank(rank: int, size: int, address: str, folder: str, way: str, dtype: str) -> dict[str, Any]:
    import torch

    from nearpolicy.learner.parallel import join, leave
    from nearpolicy.models.loading import load_policy, outline_policy, resolve
    from nearpolicy.models.pieces import local
    from nearpolicy.models.weights import digests, fingerprint

    def made(folder: str) -> Any:
        if way == "whole":
            policy = load_policy(folder, getattr(torch, dtype), known_to_fit=True)
        else:
            policy = outline_policy(folder, getattr(torch, dtype), known_to_fit=True)
        ranks.shard(policy, replicas=1, offload=False)
        return policy

    ranks = join(rank, size, address, 60.0, torch.device("cpu"))
    made(str(resolve("random:llama")))
    gc.collect()
    ranks.agree("that all are warm")
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    policy = made(folder)
    peak, end = _resident("VmHWM") - before, _resident("VmRSS") - before
    pieces = {name: local(p) for name, p in policy.named_parameters()}
    held = sum(p.nbytes for p in pieces.values()) / MIB
    ranks.agree("that all have measured")
    digest = fingerprint(digests(pieces))
    leave()
    return {"pieces_mb": round(held, 1), "peak_mb": round(peak, 1), "end_mb": round(end, 1), "digest": digest}


def _resident(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
