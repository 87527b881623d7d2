"""One model in a process of its own, which scores batches: ``python -m ...model_main DESCRIPTOR PARENT``.

    setup as JSON -> {"status": "ready", "specials"} | {"status": "refused", "message"}
    [request, ...] -> [{"values": [...]} | {"error": "..."}, ...]     in order; an error is one request's alone

As a worker process it lives no longer than its parent, is deaf to Ctrl-C, and gives way to generator and learner. It
computes in one thread, so that a score does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nearpolicy.errors import described
from nearpolicy.machine import prepare_environment
from nearpolicy.verifier.learned.asking import without_tokens
from nearpolicy.verifier.messages import serve


class TooLong(Exception):
    """An input that the model cannot take."""


def main(descriptor: int, parent: int) -> None:
    prepare_environment()
    serve(descriptor, parent, _loaded)


def _loaded(text: bytes) -> tuple[dict[str, Any], Callable[[bytes], Any] | None]:
    """What answers a batch, with the model loaded; or a refusal."""
    setup = json.loads(text)
    try:
        scorer = _SCORERS[setup["scorer"]](setup)
    except BaseException as error:  # foreign files; the parent says what it means
        return {"status": "refused", "message": described(error, 600)}, None
    return {"status": "ready", "specials": scorer.specials}, lambda batch: _answers(scorer, json.loads(batch))


def _answers(scorer: Scorer, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One answer per request; those that cannot be prepared, or that give no number, answer for themselves."""
    inputs: list[Any] = []
    answers: list[dict[str, Any]] = [{} for _ in requests]
    for place, request in enumerate(requests):
        try:
            inputs.append((place, scorer.prepared(request)))
        except Exception as error:
            answers[place] = {"error": str(error) if isinstance(error, TooLong) else described(error)}
    if inputs:
        try:
            results = scorer.scores([each for _, each in inputs])
        except Exception as error:
            results = [{"error": described(error)}] * len(inputs)
        for (place, _), result in zip(inputs, results, strict=True):
            answers[place] = result
    return answers


class Scorer:
    """A model with its tokenizer, loaded."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        import torch

        from nearpolicy.models.device import pick_device
        from nearpolicy.models.loading import resolve
        from nearpolicy.models.tokenizer import load_tokenizer

        torch.set_num_threads(1)
        self.setup = setup
        self.folder = resolve(setup["path"])
        self.tokenizer = load_tokenizer(str(self.folder))
        self.dtype = getattr(torch, setup["dtype"])
        self.device = torch.device("cpu") if setup["device"] == "cpu" else pick_device()
        added = self.tokenizer.added_tokens_decoder.values()
        special = [str(token) for token in added if token.special]
        self.specials: list[str] = sorted({*self.tokenizer.all_special_tokens, *special})
        self.max_length: int | None = setup["max_tokens"]

    def prepared(self, request: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def scores(self, inputs: Sequence[Any]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def chat_ids(self, messages: Sequence[Mapping[str, str]], *, opens_turn: bool) -> list[int]:
        """The ids of a chat, with one begin token at most."""
        ids = list(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=opens_turn,
                tokenize=True,
                return_dict=False,
            )
        )
        while len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            ids.pop(0)
        return ids

    def fitting(self, ids: list[int], rule: str = "fail") -> list[int]:
        most = self.max_length
        if most is None or len(ids) <= most:
            return ids
        if rule == "fail":
            raise TooLong(f"the input has {len(ids)} tokens, and the model takes {most}")
        return ids[:most] if rule == "keep_start" else ids[-most:]


class HeadScorer(Scorer):
    """A reward model: requests of {"prompt": text or messages, "completion"} -> {"values": one, or one per step}."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        from nearpolicy.errors import ModelError
        from nearpolicy.models.heads import ScoringHead

        super().__init__(setup)
        self._by_step = setup["form"] == "steps"
        level = "token" if self._by_step else "sequence"
        self._head = ScoringHead.load(self.folder, level, self.dtype, self.device, self.tokenizer.pad_token_id)
        self.max_length = self.max_length or self._head.max_length
        outputs, label = self._head.num_outputs, setup["label"]
        if label >= outputs:
            raise ModelError(f"label is {label}, but the head has the outputs 0 to {outputs - 1}")
        if setup["activation"] == "softmax" and outputs == 1:
            raise ModelError("activation is softmax, which is always 1 for the one output of this head; use sigmoid")
        self._activation = setup["activation"] or ("none" if outputs == 1 else "softmax")
        self._chat = bool(self.tokenizer.chat_template) if setup["chat"] is None else setup["chat"]
        if self._chat and not self.tokenizer.chat_template:
            raise ModelError("chat is true, but the tokenizer has no chat template")
        if self._by_step:
            step = self.tokenizer(setup["step_token"], add_special_tokens=False)["input_ids"]
            if len(step) != 1:
                raise ModelError(
                    f"step_token {setup['step_token']!r} is {len(step)} tokens; name one that is one token"
                )
            [self._step_id] = step

    def prepared(self, request: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Ids, and (by step) the places at which the head is read."""
        completion = without_tokens(request["completion"], self.specials)
        prompt = request["prompt"]
        if not isinstance(prompt, str):
            prompt = [{"role": m["role"], "content": without_tokens(str(m["content"]), self.specials)} for m in prompt]
        else:
            prompt = without_tokens(prompt, self.specials)
        if not self._by_step:
            return self.fitting(self._whole(prompt, completion), self.setup["on_overlong"]), []
        ids = self._before(prompt)
        places = []
        steps = [step for step in completion.split(self.setup["separator"]) if step.strip()]
        for step in steps or [completion]:
            ids += self.tokenizer(step, add_special_tokens=False)["input_ids"] + [self._step_id]
            places.append(len(ids) - 1)
        kept = self.fitting(ids, self.setup["on_overlong"])
        places = [place - (len(ids) - len(kept)) for place in places]
        return kept, [place for place in places if place >= 0]

    def _whole(self, prompt: Any, completion: str) -> list[int]:
        if self._chat:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return self.chat_ids([*chat, {"role": "assistant", "content": completion}], opens_turn=False)
        return list(self.tokenizer(_filled(self.setup["template"], _plain(prompt), completion))["input_ids"])

    def _before(self, prompt: Any) -> list[int]:
        """All that stands before the first step."""
        if self._chat:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return self.chat_ids(chat, opens_turn=True)
        before, _, _ = self.setup["template"].partition("{completion}")
        return list(self.tokenizer(_filled(before, _plain(prompt), ""))["input_ids"])

    def scores(self, inputs: Sequence[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
        rows = [ids for ids, _ in inputs]
        outputs = self._head.outputs(rows, at_once=self.setup["batch_size"], tokens=self.setup["batch_tokens"])
        answers: list[dict[str, Any]] = []
        for output, (_, places) in zip(outputs, inputs, strict=True):
            values = self._activated(output[places] if self._by_step else output[None]).tolist()
            if all(abs(value) < 1e20 for value in values):  # and not NaN
                answers.append({"values": values})
            else:
                answers.append({"error": f"the model scored {values[:3]}, which is no number to learn from"})
        return answers

    def _activated(self, outputs: Any) -> Any:
        """[N, outputs] -> [N]"""
        label = self.setup["label"]
        if self._activation == "softmax":
            return outputs.softmax(dim=-1)[:, label]
        return outputs[:, label].sigmoid() if self._activation == "sigmoid" else outputs[:, label]


class ChoiceScorer(Scorer):
    """A judge: requests of {"messages", "labels"} -> {"values": one probability per label}."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        from nearpolicy.models.choices import ChoiceModel
        from nearpolicy.models.loading import load_policy
        from nearpolicy.models.tokenizer import generation_stop_ids

        super().__init__(setup)
        policy = load_policy(self.folder, self.dtype, self.device)
        self._model = ChoiceModel(policy)
        self.max_length = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
        ends = [self.tokenizer.eos_token_id, *generation_stop_ids(self.folder)]
        self._end: int = next((end for end in ends if end is not None), 0)

    def prepared(self, request: Mapping[str, Any]) -> Any:
        from nearpolicy.models.label_tree import LabelTree

        if self.tokenizer.chat_template:
            ids = self.chat_ids(request["messages"], opens_turn=True)
        else:
            text = "\n\n".join(message["content"] for message in request["messages"])
            ids = list(self.tokenizer(f"{text}\n\nAnswer: ")["input_ids"])
        labels = {label: self.tokenizer(label, add_special_tokens=False)["input_ids"] for label in request["labels"]}
        tree = LabelTree(labels, self._end)
        longest = max(map(len, labels.values())) + 1
        if self.max_length is not None and len(ids) + longest > self.max_length:
            raise TooLong(f"the question has {len(ids)} tokens, and the model takes {self.max_length}")
        return ids, tree, request["labels"]

    def scores(self, inputs: Sequence[Any]) -> list[dict[str, Any]]:
        found = []
        for part in _within(inputs, self.setup["batch_tokens"]):
            decided = self._model.decide([(ids, tree) for ids, tree, _ in part])
            for (_, _, labels), each in zip(part, decided, strict=True):
                found.append({"values": [each[label] for label in labels]})
        return found


def _within(inputs: Sequence[Any], tokens: int) -> list[list[Any]]:
    """Consecutive questions of so many tokens together; a longer one alone."""
    parts: list[list[Any]] = []
    used = tokens
    for each in inputs:
        if not parts or used + len(each[0]) > tokens:
            parts.append([])
            used = 0
        parts[-1].append(each)
        used += len(each[0])
    return parts


def _filled(template: str, prompt: str, completion: str) -> str:
    """Neither text is looked at for further fields."""
    fields = {"{prompt}": prompt, "{completion}": completion}
    return re.sub(r"\{prompt\}|\{completion\}", lambda field: fields[field[0]], template)


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


_SCORERS: Mapping[str, type[Scorer]] = {"head": HeadScorer, "choices": ChoiceScorer}

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
