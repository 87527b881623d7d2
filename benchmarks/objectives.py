"""What objectives cost: nanoseconds a token, and memory and time of the vocabulary head in chunks.

    python -m benchmarks.objectives [--quick]

- Elementwise losses, corrections and regularisers, forward and backward, on 16,384 tokens of random sequences. The
  limit is 2 microseconds a token.
- The full-vocabulary KL and the entropy with gradient, against the head products that they cannot do without (the KL
  needs the reference's twice: nothing of the size of the vocabulary is kept between forward and backward), at SmolLM2's
  head (576 x 49,152); pairs alternate. The limit is 1.3.
- Log-probability and entropy from hidden states with the head in chunks: extra peak memory for 16,384 tokens x 49,152
  words (in a process of its own), and the gradient against the head in one piece. The limits are 1 GB, 1e-5 in float32
  and 1e-10 in float64.

Results are checked first. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

TOKENS, HIDDEN, WORDS = 16_384, 576, 49_152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        return print(json.dumps(_memory(arguments.memory)))
    import torch

    torch.set_num_threads(1)
    repeats = 2 if arguments.quick else 5
    result = {
        "elementwise_us_per_token": elementwise(repeats),
        "full_vocabulary": full_vocabulary(repeats),
        "head_in_chunks": {**gradient_gaps(), **memory()},
    }
    print(json.dumps(result))


def elementwise(repeats: int) -> dict[str, float]:
    """Median microseconds a token of one forward and backward pass."""
    import torch

    from nearpolicy.objectives import corrections, losses, regularisers
    from nearpolicy.objectives.catalogue import CORRECTIONS, LOSSES
    from nearpolicy.objectives.config import ObjectiveConfig
    from nearpolicy.objectives.objective import Objective, Tokens
    from nearpolicy.objectives.sequences import Sequences

    generator = torch.Generator().manual_seed(0)

    def normal(scale: float, shift: float = 0.0) -> torch.Tensor:
        return torch.randn(TOKENS, generator=generator) * scale + shift

    now, advantages = normal(0.5, -2.0).clamp(max=-1e-3), normal(1.0)
    proximal, behavior = now + normal(0.05), now + normal(0.1)
    sequences = Sequences.of_lengths([64] * (TOKENS // 64))
    chosen = torch.rand(TOKENS, generator=generator) < 2e-3
    times = {}

    def timed(name: str, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        seconds = []
        for _ in range(repeats + 1):
            leaf = now.clone().requires_grad_()
            begin = time.perf_counter()
            loss(leaf).sum().backward()
            seconds.append(time.perf_counter() - begin)
            assert torch.isfinite(leaf.grad).all()
        times[name] = statistics.median(seconds[1:]) / TOKENS * 1e6
        print(f"{name:32} {times[name]:.3f} us a token", flush=True)

    def objective_loss(config: ObjectiveConfig) -> Callable[[torch.Tensor], torch.Tensor]:
        objective = Objective(config, 64)

        def loss(leaf: torch.Tensor) -> torch.Tensor:
            tokens = Tokens(
                logprobs=leaf,
                entropies=-leaf.detach(),
                proximal_logprobs=proximal,
                behavior_logprobs=behavior,
                advantages=advantages,
                sequences=sequences,
                staleness=torch.ones(TOKENS),
                reference_logprobs=behavior,
                chosen=chosen,
            )
            found = objective.token_losses(tokens)
            return found.losses * objective.shares(found.kept, sequences)

        return loss

    for name in LOSSES:
        reference = {"reference": "elsewhere"} if name == "opd" else {}
        timed(f"loss {name}", objective_loss(ObjectiveConfig(loss=name, **reference)))
    for name in CORRECTIONS:
        timed(f"correction {name}", objective_loss(ObjectiveConfig(loss="pg", correction=name)))
    for name in ("k1", "k2", "k3"):
        timed(f"kl {name}", lambda leaf, name=name: getattr(regularisers, name)(leaf, behavior))
    timed("value loss", lambda leaf: losses.clipped_value_loss(leaf, proximal, behavior, clip=0.2))
    assert corrections.none(proximal, behavior).kept.all()
    return {name: round(value, 4) for name, value in times.items()}


class Head:
    """A vocabulary head with SmolLM2's shape, of random weights, behind what `PolicyModel` asks of a model."""

    def __new__(cls, hidden: int = HIDDEN, words: int = WORDS, dtype: str = "float32"):
        import torch

        from nearpolicy.models.policy import PolicyModel

        generator = torch.Generator().manual_seed(1)

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = torch.nn.Linear(hidden, words, bias=False, dtype=getattr(torch, dtype))
                with torch.no_grad():
                    self.head.weight.copy_(torch.randn(words, hidden, generator=generator) * 0.1)
                self.config = SimpleNamespace(get_text_config=SimpleNamespace)

            def get_output_embeddings(self) -> torch.nn.Module:
                return self.head

        class OnlyHead(PolicyModel):
            """The hidden states are given instead of computed."""

            def hidden(self, input_ids, positions, context):
                return input_ids

        return OnlyHead(Model())


def full_vocabulary(repeats: int) -> dict[str, dict[str, float]]:
    """Ratio of time with the extra quantity over time without it, the extra products counted as they are."""
    import torch

    policy, reference = Head(), Head()
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(1024, HIDDEN, generator=generator)
    theirs = torch.randn(1024, HIDDEN, generator=generator)
    rows, targets = torch.arange(1024), torch.randint(WORDS, (1024,), generator=generator)

    def run(**options) -> float:
        leaf = states.clone().requires_grad_()
        begin = time.perf_counter()
        scores = policy(leaf, None, None, rows, targets, 1.0, **options)
        total = scores.logprobs.sum() + scores.entropies.sum()
        if scores.reference_kl is not None:
            total = total + scores.reference_kl.sum()
        total.backward()
        policy.zero_grad(set_to_none=True)
        return time.perf_counter() - begin

    def extra_product() -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            reference.head(theirs)
        return time.perf_counter() - begin

    found = {}
    for name, options, products in (
        ("kl full", {"reference": (reference, theirs)}, 2),  # forward, and again in backward like the policy's own
        ("entropy with gradient", {"entropy_has_gradient": True}, 0),
    ):
        ratios = []
        for pair in range(repeats + 1):
            sides = {}
            for side in ("plain", "with") if pair % 2 else ("with", "plain"):
                sides[side] = run(**(options if side == "with" else {}))
            sides["plain"] += sum(extra_product() for _ in range(products))
            ratios.append(sides["with"] / sides["plain"])
        ratios = ratios[1:]
        found[name] = {
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            "pairs": len(ratios),
        }
        print(f"{name:32} {found[name]['ratio_median']:.2f} x the head products it needs", flush=True)
    return found


def gradient_gaps() -> dict[str, float]:
    """Relative distance of the gradients from the head in one piece, with respect to states and weights."""
    import torch

    from nearpolicy.models import policy as module

    gaps = {}
    for dtype in ("float32", "float64"):
        gradients = []
        for chunk in (1 << 30, module.HEAD_CHUNK):
            policy = Head(64, 1024, dtype)
            generator = torch.Generator().manual_seed(3)
            states = torch.randn(5000, 64, generator=generator, dtype=getattr(torch, dtype)).requires_grad_()
            targets = torch.randint(1024, (5000,), generator=generator)
            before, module.HEAD_CHUNK = module.HEAD_CHUNK, chunk
            try:
                scores = policy(states, None, None, torch.arange(5000), targets, 0.7, entropy_has_gradient=True)
            finally:
                module.HEAD_CHUNK = before
            (scores.logprobs.sum() + 0.1 * scores.entropies.sum()).backward()
            gradients.append(torch.cat([states.grad.flatten(), policy.model.head.weight.grad.flatten()]).double())
        gap = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
        gaps[f"gradient_gap_{dtype}"] = float(gap)
        print(f"gradient of chunks, {dtype:12} {float(gap):.1e} from the head in one piece", flush=True)
    return gaps


def memory() -> dict[str, float]:
    """Extra peak memory in MB, in processes of their own."""
    found = {}
    for what in ("states", "scores"):
        command = [sys.executable, "-m", "benchmarks.objectives", "--memory", what]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
        found[what] = json.loads(done.stdout.splitlines()[-1])
    extra = found["scores"] - found["states"]
    print(f"head in chunks                   {extra:.0f} MB more at its peak for {TOKENS:,} tokens", flush=True)
    return {"extra_peak_mb": round(extra, 1)}


def _memory(what: str) -> float:
    """Peak memory in MB of a process that holds states, head and their gradients, and maybe computes scores."""
    import torch

    torch.set_num_threads(1)
    policy = Head()
    states = torch.zeros(TOKENS, HIDDEN).requires_grad_()
    states.grad, policy.model.head.weight.grad = torch.zeros_like(states), torch.zeros_like(policy.model.head.weight)
    if what == "scores":
        targets = torch.zeros(TOKENS, dtype=torch.int64)
        scores = policy(states, None, None, torch.arange(TOKENS), targets, 1.0, entropy_has_gradient=True)
        (scores.logprobs.sum() + scores.entropies.sum()).backward()
    # Not `ru_maxrss`: a child inherits its parent's.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024


if __name__ == "__main__":
    main()
