"""The forward pass of the embedded engine: plan, compute, draw, finish. Single-threaded; `runner` gives it a thread.

plan      Scheduler: one token of every running sequence, then chunks of prompts and interrupted prefixes
compute   PolicyModel.logits over the packed tokens, keys and values in pages
draw      sampled_logprobs, draw: the log-probability kept is the one the token was drawn from
finish    stop token, stop string, length
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearpolicy.generator.adapted import AdaptedModel
from nearpolicy.generator.kv import DecodeLayout, KeyValueStore, PagedContext
from nearpolicy.generator.packed import packed_weights
from nearpolicy.generator.pages import pages_for
from nearpolicy.generator.sampling import draw, sampled_logprobs, uniforms
from nearpolicy.generator.scheduler import Plan, Scheduler, Sequence, begin
from nearpolicy.models.numerics import Numerics
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.shapes import attention_shapes
from nearpolicy.models.weights import digests, load_and_digest, named_weights, require_held
from nearpolicy.records import Finish
from nearpolicy.roles import Completion, Request, Weights

EventSink = Callable[..., None]
SERVED_POLICY = "policy"
"""The one policy an engine without adapters has."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much the engine holds at once."""

    max_running: int
    num_pages: int
    prefill_chunk: int
    max_length: int | None = None
    """Of a prompt and its completion; None for what all pages hold."""

    @classmethod
    def sized(
        cls, policy: PolicyModel, *, max_running: int, prefill_chunk: int, max_length: int, kv_memory_mb: float | None
    ) -> EngineLimits:
        """Pages for ``max_running`` sequences of ``max_length`` tokens and their prompts, or what the memory allows."""
        if kv_memory_mb is None:
            num_pages = (max_running + max(1, max_running // 4)) * pages_for(max_length)
        else:
            dtype = next(policy.parameters()).dtype  # what `KeyValueStore` keeps
            page_bytes = sum(shape.page_bytes(dtype) for shape in attention_shapes(policy).values())
            num_pages = int(kv_memory_mb * 2**20 // page_bytes)
        return cls(max_running, num_pages, prefill_chunk, max_length)


class Engine:
    """Completes requests under one version of the weights at a time."""

    def __init__(
        self,
        policy: PolicyModel,
        limits: EngineLimits,
        numerics: Numerics,
        *,
        weights: str = "same",
        threads: int = 1,
        version: int = 0,
        decode: Callable[[list[int]], str] | None = None,
        on_event: EventSink | None = None,
    ) -> None:
        """``weights``: the form of the policy's weights that products are computed from (`GeneratorConfig.weights`).
        ``decode`` turns token ids into text; only requests with stop strings need it."""
        self.policy = policy
        self.scheduler = Scheduler(limits.num_pages, limits.max_running, limits.prefill_chunk, limits.max_length)
        self.scheduler.version = version
        parameter, numbers = next(policy.parameters()), self.scheduler.rows.num_pages
        self._store = KeyValueStore(attention_shapes(policy), numbers, parameter.dtype, parameter.device)
        self._layout = DecodeLayout(self.scheduler, parameter.device)
        self._vocabulary: int = policy.config.get_text_config().vocab_size
        self._numerics = numerics
        self._adapted = AdaptedModel(policy.model)
        self.threads = threads
        self.sampled = 0
        """Tokens so far."""
        self.packed = packed_weights(weights, policy.model)
        self._decode = decode
        self._emit = on_event or (lambda *_, **__: None)

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def kv_bytes(self) -> int:
        """Of all pages that may be in use at once."""
        return self.scheduler.budget.num_pages * self._store.page_bytes

    @property
    def base_bytes(self) -> int:
        """Of the second copy of matrices that adapters change, once one has arrived alone."""
        return self._adapted.nbytes

    def submit(self, request: Request) -> list[Completion]:
        """Queue a request. Completions that can never be made come back at once as failed, and those that had ended
        before as they are."""
        reason = self._refusal(request)
        if reason is not None:
            return [_ended(request, i, Finish.FAILED, reason) for i in range(request.n)]
        begun = [begin(request, sample) for sample in sorted(request.begun)]
        ended = [_completion(s, finish) for s in begun if s.tokens and (finish := self._finish(s)) is not None]
        self.scheduler.add(request, without={completion.sample for completion in ended})
        return ended

    def _refusal(self, request: Request) -> str | None:
        if request.policy != SERVED_POLICY:
            return f"policy {request.policy!r} was asked for, this engine serves {SERVED_POLICY!r}"
        if not len(request.token_ids):
            return "the prompt has no token"
        low, high = int(request.token_ids.min()), int(request.token_ids.max())
        if low < 0 or high >= self._vocabulary:
            wrong = low if low < 0 else high
            return f"the prompt holds token id {wrong}, the model has 0 .. {self._vocabulary - 1}"
        if not self.scheduler.fits(request):
            return (
                f"a sequence of {len(request.token_ids)} + {request.sampling.max_tokens} tokens does not fit into "
                f"{self.scheduler.max_pages} pages of keys and values; raise generator.kv_memory_mb"
            )
        if request.version is not None and request.version < self.version:
            return self._outdated(request)
        if request.sampling.stop and self._decode is None:
            return "stop strings need an engine with a tokenizer"
        return self._wrongly_begun(request)

    def _wrongly_begun(self, request: Request) -> str | None:
        for sample, begun in request.begun.items():
            if not 0 <= sample < request.n:
                return f"sample {sample} has begun before, and {request.n} samples are asked for"
            ids, newest = begun.token_ids, int(begun.versions.max(initial=0))
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
                return f"sample {sample} has begun with a token id outside the model's 0 .. {self._vocabulary - 1}"
            if newest > self.version:
                return f"sample {sample} has begun under version {newest}, but the engine holds {self.version}"
            if request.sampling.record_support and len(begun.extras.get("support_sizes", ())) != len(ids):
                return f"sample {sample} has begun without a record of the tokens that could be drawn"
        return None

    def _outdated(self, request: Request) -> str:
        return f"version {request.version} was asked for, but the engine holds {self.version}"

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """End requests now; what they have sampled so far is kept in their completions."""
        return [_completion(s, Finish.ABORTED) for s in self.scheduler.remove(set(request_ids))]

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One forward pass and one drawn token for every sequence that has logits; returns what ended."""
        begin = time.perf_counter()
        ended = [_completion(s, Finish.FAILED, self._outdated(s.request)) for s in self.scheduler.remove_outdated()]
        plan = self.scheduler.plan()
        self._store.copy_pages(self.scheduler.rows.take_copies())
        drawing: list[Sequence] = list(plan.decoding)
        logits: list[Tensor] = []
        if plan.decoding or plan.chunks:
            found, of_chunks = self._forward(plan)
            if plan.decoding:
                logits.append(found)
            for sequence in plan.decoding:
                sequence.stored += 1
            for chunk, of_chunk in zip(plan.chunks, of_chunks, strict=True):
                self.scheduler.computed(chunk, of_chunk)
            if self._store.touched.sum() > self.scheduler.budget.num_pages:  # free pages hold memory too
                self._store.give_memory_back(self.scheduler.pages_in_use())
        for start in self.scheduler.start_ready():
            drawing += start.samples
            logits.append(start.logits.expand(len(start.samples), -1))
        if drawing:
            ended += self._draw(drawing, logits[0] if len(logits) == 1 else torch.cat(logits))
        if drawing or plan.chunks:
            self._report(plan, len(drawing), time.perf_counter() - begin)
        return ended

    def _forward(self, plan: Plan) -> tuple[Tensor, list[Tensor | None]]:
        """[n, V] logits after the last token of the n decoding sequences, and [1, V] for each chunk that completes."""
        ids = [sequence.tokens[-1] for sequence in plan.decoding]
        n, wanted = len(ids), list(range(len(ids)))
        for chunk in plan.chunks:
            ids += chunk.prefix.tokens[chunk.start : chunk.start + chunk.length]
            if chunk.completes:
                wanted.append(len(ids) - 1)
        num_rows = self._numerics.rows(len(ids), self.threads)
        context = PagedContext(self._store, plan, self._layout.update() if plan.decoding else None, num_rows)
        input_ids = torch.tensor(ids + [ids[0]] * (num_rows - len(ids)), device=self._store.device)
        hidden = self.policy.hidden(input_ids, context.positions, context)
        if not wanted:
            return hidden.new_empty(0, 0), [None] * len(plan.chunks)
        num_wanted = len(wanted)
        wanted += [wanted[0]] * (self._numerics.rows(num_wanted, self.threads) - num_wanted)
        logits = self.policy.head(hidden if wanted == list(range(num_rows)) else hidden[wanted])
        ends = iter(logits[n:num_wanted].clone().split(1))
        return logits[:n], [next(ends) if chunk.completes else None for chunk in plan.chunks]

    def _draw(self, sequences: list[Sequence], logits: Tensor) -> list[Completion]:
        self.sampled += len(sequences)
        by_law: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, sequence in enumerate(sequences):
            by_law[sequence.law].append(i)
        ended = []
        for places in by_law.values():
            chosen, sampling = [sequences[i] for i in places], sequences[places[0]].request.sampling
            logprobs = sampled_logprobs(logits if len(places) == len(sequences) else logits[places], sampling)
            numbers = uniforms([s.key for s in chosen], [len(s.tokens) for s in chosen])
            tokens = draw(logprobs, numbers)
            values = logprobs.gather(1, tokens[:, None].to(logprobs.device))[:, 0]
            if sampling.record_support:
                for sequence, row in zip(chosen, logprobs.isfinite().cpu().numpy(), strict=True):
                    sequence.support.append(np.flatnonzero(row).astype(np.int32))
            ended += self._append(chosen, tokens.tolist(), values.tolist())
        return ended

    def _append(self, sequences: list[Sequence], tokens: list[int], logprobs: list[float]) -> list[Completion]:
        """Add the drawn tokens; completions of the sequences that end with them."""
        ended, version, lowest = [], self.version, float("-inf")
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            reason = ""
            if lowest < logprob <= 0.0:  # NaN compares false
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.versions.append(version)
                if (finish := self._finish(sequence)) is None:
                    continue
            else:
                finish, reason = Finish.FAILED, f"the model gave no finite log-probability ({logprob})"
            ended.append(_completion(sequence, finish, reason))
            self.scheduler.finish(sequence)
        return ended

    def _finish(self, sequence: Sequence) -> Finish | None:
        """How a sequence has ended with its last token; None if it goes on."""
        sampling = sequence.request.sampling
        if sequence.tokens[-1] in sampling.stop_token_ids or (sampling.stop and self._has_stop_string(sequence)):
            return Finish.STOP
        return Finish.LENGTH if len(sequence.tokens) >= sequence.max_tokens else None

    def _has_stop_string(self, sequence: Sequence) -> bool:
        stops = sequence.request.sampling.stop
        # A token is at least a byte of text, or no text at all (special tokens): a generous tail is enough.
        tail = sequence.tokens[-(4 * max(map(len, stops)) + 16) :]
        text = self._decode(tail)
        return any(stop in text for stop in stops)

    def _report(self, plan: Plan, sampled: int, seconds: float) -> None:
        prefill = sum(chunk.length for chunk in plan.chunks)
        if prefill:
            self._emit("prefill", seconds=seconds, tokens=prefill, sampled=sampled, version=self.version)
        else:
            self._emit(
                "decode_step",
                seconds=seconds,
                batch=len(plan.decoding),
                context_sum=int(self._layout.positions.sum()) + len(plan.decoding),
                ms=seconds * 1e3,
                sampled=sampled,
                running=len(self.scheduler.running),
                version=self.version,
            )

    def interrupt(self) -> None:
        """Forget all keys and values; running sequences are computed again from their tokens and go on."""
        self.scheduler.interrupt_all()

    def sleep(self) -> None:
        """`interrupt`, and take no memory for keys and values until `wake`, which must come before the next `step`."""
        self.interrupt()
        self._store.release()

    def wake(self) -> None:
        self._store.restore()

    def load(self, weights: Weights, *, keep_running: bool = False) -> Mapping[str, str]:
        """Compute under these weights from now on. What runs is computed again from its tokens and goes on; with
        ``keep_running`` it goes on at once, on the keys and values of its past tokens as the older weights made them.
        Nothing else computed under older weights is used again.

        The version changes only after the memory computed from has the digests that were sent. If this raises, no
        token may be sampled until another load succeeds: nobody knows which weights these are.
        """
        version = weights.record.version
        if keep_running:
            self.scheduler.forget_prefixes()
        else:
            self.interrupt()
        if weights.adapter is not None and not weights.tensors:
            self._adapted.apply(weights.adapter, version)
            shown = digests(named_weights(self.policy.model))
        else:
            shown = load_and_digest(self.policy.model, weights.tensors)
        require_held("the engine", version, weights.digests, shown)
        if self.packed is not None:
            self.packed.pack()
        self.scheduler.version = version
        return shown


def _completion(sequence: Sequence, finish: Finish, reason: str = "") -> Completion:
    count = len(sequence.tokens)
    extras = support_arrays(sequence.support[:count]) if sequence.request.sampling.record_support else {}
    known = sequence.tokens, sequence.logprobs, sequence.versions
    return _ended(sequence.request, sequence.sample, finish, reason, *known, extras)


def _ended(
    request: Request,
    sample: int,
    finish: Finish,
    reason: str = "",
    tokens: Iterable[int] = (),
    logprobs: Iterable[float] = (),
    versions: Iterable[int] = (),
    extras: Mapping[str, np.ndarray] | None = None,
) -> Completion:
    return Completion(
        request=request.id,
        sample=sample,
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        finish=finish,
        reason=reason,
        extras=extras or {},
    )


def support_arrays(support: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """``support_sizes`` [T] and ``support_ids`` of the ids that could be drawn at each position."""
    support = list(support)
    return {
        "support_sizes": np.array([len(ids) for ids in support], dtype=np.int32),
        "support_ids": np.concatenate([np.zeros(0, np.int32), *support]),
    }
