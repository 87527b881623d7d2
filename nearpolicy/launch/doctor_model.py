"""Whether a model can be trained here as it is: its text, its end tokens, its weights, and engine against learner.

folder -> tokenizer, template, stops        without weights
       -> weights: fit, tied                one copy, saved and loaded again
       -> engine and learner                tokens sampled at several temperatures and scored under the same weights
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearpolicy.errors import ModelError
from nearpolicy.generator.engine import Engine, EngineLimits
from nearpolicy.generator.runner import EngineRunner
from nearpolicy.launch.diagnosis import EXACT, bound_of, diagnose
from nearpolicy.launch.findings import Finding, info, note, ok, wrong
from nearpolicy.launch.inline import RoleThread
from nearpolicy.launch.probe import Holder, Probe, Scoring
from nearpolicy.learner.passes import Passes
from nearpolicy.machine import num_cores
from nearpolicy.models.device import pick_device
from nearpolicy.models.fitness import check_fitness
from nearpolicy.models.loading import load_policy
from nearpolicy.models.numerics import FAST, Numerics, probe_model
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.tokenizer import Renderer, generation_stop_ids, load_tokenizer, vocabulary_size
from nearpolicy.models.weights import digests, named_weights
from nearpolicy.roles import Sampling

TEMPERATURES = (0.5, 1.0, 2.0)
USER, ANSWER, NEXT = "What is 17 + 25?", "It is 42.", "And 42 + 1?"
TURN = [{"role": "user", "content": USER}]
PROMPTS, SAMPLES, TOKENS = 4, 4, 16


def renderer_of(folder: Path) -> Renderer:
    """`ModelError` for a folder without a tokenizer that can be read."""
    return Renderer(
        load_tokenizer(str(folder)), stop_token_ids=generation_stop_ids(folder), vocabulary=vocabulary_size(folder)
    )


# Text


def text(renderer: Renderer) -> Iterator[Finding]:
    """Chat template, begin, end and padding tokens."""
    yield from vocabulary(renderer)
    yield from ends(renderer)
    if not renderer.has_chat_template:
        yield note(
            "chat template", "none: only text prompts (chat: false in a task), or model.tokenizer of a chat model"
        )
        return
    try:
        _rendered(renderer, TURN, opens=True)
    except Exception as error:
        yield wrong("chat template", f"cannot render one user message: {type(error).__name__}: {error}")
        return
    yield round_trip(renderer)
    yield begin_tokens(renderer)
    yield opening(renderer)
    yield end_of_turn(renderer)
    yield history(renderer)


def vocabulary(renderer: Renderer) -> Iterator[Finding]:
    size, known = len(renderer.tokenizer), renderer._vocabulary
    if known is not None and size > known:
        yield wrong("vocabulary", f"the tokenizer has {size:,} tokens and the model {known:,}: text with the others is "
                    "refused; set model.tokenizer to the one it was trained with")  # fmt: skip
    beyond = [id for id in renderer.stop_token_ids if known is not None and id >= known]
    if beyond:
        yield wrong("end tokens", f"{beyond} are no tokens of the model ({known:,}); mend generation_config.json")


def ends(renderer: Renderer) -> Iterator[Finding]:
    tokenizer = renderer.tokenizer
    if not renderer.stop_token_ids:
        yield wrong("end tokens", "neither tokenizer nor model names one: completions end at the length limit only, "
                    "and learn nothing about ending. Set eos_token_id in generation_config.json")  # fmt: skip
    else:
        yield ok("end tokens", ", ".join(_token(renderer, id) for id in renderer.stop_token_ids))
        if tokenizer.eos_token_id is None:
            yield note("end token of text", "the tokenizer has no eos_token; supervised answers end with "
                       f"{_token(renderer, renderer.stop_token_ids[0])}")  # fmt: skip
    pad = tokenizer.pad_token_id
    if pad is None:
        yield ok("padding token", "none, and none is needed: rows are packed, not padded")
    elif pad in renderer.stop_token_ids:
        yield note("padding token", f"{_token(renderer, pad)} is an end token too. Harmless here (masks come from "
                   "lengths); a tool that masks by it never trains the end")  # fmt: skip
    else:
        yield ok("padding token", _token(renderer, pad))


def round_trip(renderer: Renderer) -> Finding:
    rendered = _rendered(renderer, TURN, opens=True)
    direct = renderer.tokenizer.apply_chat_template(TURN, add_generation_prompt=True, tokenize=True, return_dict=False)
    again = renderer.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    if list(direct) != list(again):
        return wrong("chat template", f"its text gives {len(again)} tokens and it gives {len(direct)} itself: prompts "
                     "would not be the ids that other tools use. Mend the template or the tokenizer")  # fmt: skip
    back = renderer.tokenizer.decode(direct, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if back != rendered:
        return note("chat template", f"its {len(direct)} tokens decode to another text than they came from; ids are "
                    "what counts here, text is for people and verifiers")  # fmt: skip
    return ok("chat template", f"text and ids give one another ({len(direct)} tokens for a question)")


def begin_tokens(renderer: Renderer) -> Finding:
    tokenizer, label = renderer.tokenizer, "begin token"
    begin = tokenizer.bos_token_id
    if begin is None:
        return ok(label, "none")
    rendered = _rendered(renderer, TURN, opens=True)
    direct = list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    doubled = list(tokenizer(rendered)["input_ids"])[:2] == [begin, begin]
    if direct[:2] == [begin, begin]:
        return note(label, f"the template writes {_token(renderer, begin)} twice; runs keep one, other tools do not")
    if doubled:
        return ok(label, f"{_token(renderer, begin)} once; template and tokenizer both write it, and runs keep one "
                  "(other tools may not)")  # fmt: skip
    count = direct.count(begin)
    where = {0: "only before plain text", 1: "once"}.get(count, f"{count} times in one question: it opens turns")
    return ok(label, f"{_token(renderer, begin)} {where}")


def opening(renderer: Renderer) -> Finding:
    """Whether a prompt ends where the template puts an answer."""
    label = "answer's place"
    prompt, without = (_rendered(renderer, TURN, opens=opens) for opens in (True, False))
    whole = _rendered(renderer, [*TURN, {"role": "assistant", "content": ANSWER}])
    if whole.startswith(prompt + ANSWER):
        return ok(label, f"a prompt ends with {prompt[len(without) :]!r}" if prompt != without else "behind the prompt")
    if prompt == without:
        return wrong(label, "a prompt does not open the assistant's turn (add_generation_prompt changes nothing), and "
                     "answers of a dialogue stand elsewhere: the policy would have to write what opens it. Mend "
                     "the template")  # fmt: skip
    behind = whole[whole.find(USER) + len(USER) : whole.find(ANSWER)]
    return note(label, f"a prompt ends with {prompt[len(without):]!r}, and the template writes {behind!r} between "
                "question and answer: answers in a history look unlike sampled ones")  # fmt: skip


def end_of_turn(renderer: Renderer) -> Finding:
    """Whether the token that ends an answer in the template ends a completion."""
    label = "end of turn"
    dialogue = [*TURN, {"role": "assistant", "content": ANSWER}]
    whole = _rendered(renderer, dialogue)
    after = renderer.tokenizer(whole[whole.rfind(ANSWER) + len(ANSWER) :], add_special_tokens=False)["input_ids"]
    special = [id for id in after if id in _special(renderer)]
    if not special:
        return note(
            label, "the template ends an answer with no token of its own: only other end tokens end completions"
        )
    if special[0] in renderer.stop_token_ids:
        return ok(label, f"{_token(renderer, special[0])}, which ends completions")
    return wrong(label, f"the template ends an answer with {_token(renderer, special[0])}, which is no end token: "
                 "completions would go on into turns of their own. Add it to eos_token_id in generation_config.json, "
                 "or make it the tokenizer's eos_token")  # fmt: skip


_HISTORIES = {
    "an answer": ANSWER,
    "thoughts (<think>)": f"<think>\n17 + 25 = 42\n</think>\n\n{ANSWER}",
    "white space around an answer": f" {ANSWER}\n",
}


def history(renderer: Renderer) -> Finding:
    """Whether a later prompt begins with what was read and sampled before it."""
    rewritten = []
    for what, answer in _HISTORIES.items():
        prompt = _rendered(renderer, TURN, opens=True)
        turns = [*TURN, {"role": "assistant", "content": answer}, {"role": "user", "content": NEXT}]
        if not _rendered(renderer, turns, opens=True).startswith(prompt + answer):
            rewritten.append(what)
    if not rewritten:
        return ok("history", "kept as it was sampled")
    return note("history", f"the template rewrites {', '.join(rewritten)} in later turns. Runs of one turn are not "
                "touched; over several, a rewritten turn is read otherwise than it was sampled")  # fmt: skip


def _rendered(renderer: Renderer, messages: Sequence[dict[str, str]], *, opens: bool = False) -> str:
    how = {"tokenize": False, "add_generation_prompt": opens}
    return renderer.tokenizer.apply_chat_template(list(messages), **how)


def _special(renderer: Renderer) -> set[int]:
    added = renderer.tokenizer.added_tokens_decoder
    return {id for id, token in added.items() if token.special} | set(renderer.tokenizer.all_special_ids)


def _token(renderer: Renderer, id: int) -> str:
    return f"{renderer.tokenizer.convert_ids_to_tokens(id)!r} ({id})"


# Weights


def fitness(policy: PolicyModel, name: str) -> Finding:
    try:
        gap = check_fitness(policy, name)
    except ModelError as error:
        return wrong("architecture", str(error))
    return ok("architecture", f"{type(policy.model).__name__}: packed rows give its own forward to {gap:.1g} nats")


def tied(policy: PolicyModel, scratch: Path | None = None) -> Iterator[Finding]:
    """Input and output embedding: by the config, in memory, and after saving and loading."""
    label, model = "embeddings", policy.model
    said = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    is_tied = _is_tied(policy)
    if said != is_tied:
        here = "are one" if is_tied else "are two"
        yield wrong(label, f"the config says tie_word_embeddings={str(said).lower()}, and input and output embedding "
                    f"{here} in memory (the files hold both, and they differ?). An engine that goes by the config "
                    "would compute from other weights; set it to what the files hold")  # fmt: skip
        return
    weights = named_weights(model)
    size = sum(tensor.nbytes for tensor in weights.values())
    if shutil.disk_usage(scratch or tempfile.gettempdir()).free < 2 * size:
        yield note(label, f"{'tied' if is_tied else 'not tied'}; too little disk to save the model and load it again")
        return
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        policy.save_pretrained(Path(folder))
        again = load_policy(folder, next(policy.parameters()).dtype, known_to_fit=True)
        same = _is_tied(again) == is_tied and digests(named_weights(again.model)) == digests(weights)
    kind = "tied, one memory" if is_tied else "not tied, two tensors"
    if same:
        yield ok(label, f"{kind}; the same after saving and loading")
    else:
        yield wrong(
            label, f"{kind}, and otherwise after saving and loading: checkpoints of a run would be another model"
        )


def _is_tied(policy: PolicyModel) -> bool:
    ends = policy.model.get_input_embeddings(), policy.model.get_output_embeddings()
    return ends[0].weight.data_ptr() == ends[1].weight.data_ptr()


# Engine and learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """An engine and a learner's policy, loaded from one folder."""

    runner: EngineRunner
    thread: RoleThread
    policy: PolicyModel
    numerics: Numerics
    mode: str

    @classmethod
    def of(cls, folder: Path, policy: PolicyModel, mode: str, numerics: Numerics) -> Sides:
        """``policy``: the learner's."""
        own = load_policy(folder, next(policy.parameters()).dtype, pick_device(), known_to_fit=True)
        threads = min(num_cores(), numerics.max_threads)
        engine = Engine(own, EngineLimits(PROMPTS * SAMPLES, 4 * PROMPTS * SAMPLES, 512), numerics, threads=threads)
        runner = EngineRunner(engine, threads=threads, numerics=mode)
        return cls(runner=runner, thread=RoleThread("learner", threads), policy=policy, numerics=numerics, mode=mode)

    def probe(self, temperature: float, renderer: Renderer) -> Probe:
        threads = min(num_cores(), self.numerics.max_threads)
        # What is sampled greedily is scored at 1: the learner's own first choice is what is compared then.
        passes = Passes(self.numerics, budget=512, temperature=temperature or 1.0, threads=threads)
        scoring = Scoring(HeldInThread(self.thread, self.policy, passes))
        sampling = Sampling(temperature=temperature, max_tokens=TOKENS, stop_token_ids=renderer.stop_token_ids)
        return Probe(generator=self.runner, scoring=scoring, sampling=sampling, seed=0)

    def close(self) -> None:
        self.runner.close()
        self.thread.close()


@dataclass(frozen=True, slots=True)
class HeldInThread:
    """A model on a thread: a `Holder` and its place."""

    thread: RoleThread
    policy: PolicyModel
    passes: Passes
    same_support: bool = False

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self.thread.call(function, self, *arguments)


def numerics_of(policy: PolicyModel, wanted: str | None) -> tuple[str, Numerics, Finding]:
    """Mode, rule, and what to say of it."""
    if wanted == "fast":
        return "fast", FAST, info("numerics", "fast, as asked")
    found = probe_model(policy, num_cores()) if policy.device.type == "cpu" else None
    if found is not None:
        threads = f"{found.max_threads} thread{'s' * (found.max_threads > 1)}"
        said = f"exact: its products are independent from {found.min_rows} rows a thread on, up to {threads}"
        return "exact", found, ok("numerics", said)
    said = f"exact numerics are not to be had with this model on {policy.device.type}"
    finding = wrong if wanted == "exact" else note
    return "fast", FAST, finding("numerics", f"{said}; run.numerics: fast measures the gap and corrects for it")


def agreement(sides: Sides, renderer: Renderer) -> Iterator[Finding]:
    """Tokens that the engine samples, scored by the learner; a fault is named."""
    prompts = _prompts(renderer)
    for temperature in TEMPERATURES:
        yield asyncio.run(_agreement_at(sides, renderer, prompts, temperature))
    yield asyncio.run(_greedy(sides, renderer, prompts))


async def _agreement_at(sides: Sides, renderer: Renderer, prompts: Sequence[np.ndarray], temperature: float) -> Finding:
    label, bound = f"temperature {temperature:g}", bound_of(sides.mode, sides.policy)
    probe = sides.probe(temperature, renderer)
    found = await probe.measure(prompts, 0, n=SAMPLES, tokens=TOKENS, name=label)
    largest, kl = (found.metrics[f"mismatch/probe_{name}"] for name in ("logprob_diff_max", "kl"))
    same = "equal to the bit" if largest == 0.0 else f"at most {largest:.2g} nats apart, KL {kl:.1g}"
    said = f"engine and learner over {len(found.engine)} tokens: {same}"
    if not bound.exceeded_by(found.metrics):
        return ok(label, said)
    fault = await diagnose(probe, sides.runner, prompts, 0, bound)
    return wrong(label, f"{said}. {fault.cause}: {fault.text}")


async def _greedy(sides: Sides, renderer: Renderer, prompts: Sequence[np.ndarray]) -> Finding:
    """The engine's tokens at temperature 0 against the learner's most likely ones."""
    probe = sides.probe(0.0, renderer)
    rows = await probe.rows(prompts, 0, n=1, tokens=TOKENS, name="greedy")
    chosen = await probe.scoring.learner.call(_first_choices, rows)
    tokens = np.concatenate([row.segment.token_ids for row in rows])
    others = int((chosen != tokens).sum())
    said = f"{len(tokens) - others} of {len(tokens)} tokens are the learner's first choice"
    if others and bound_of(sides.mode, sides.policy) is EXACT:
        return wrong("greedy", f"{said}; with exact numerics all are: engine and learner compute different things")
    return ok("greedy", said)


@torch.no_grad()
def _first_choices(holder: Holder, rows: Sequence[Any]) -> np.ndarray:
    states = holder.passes.hidden(holder.policy, rows, range(len(rows)))
    return holder.policy.head(torch.cat(states)).argmax(dim=-1).cpu().numpy()


def _prompts(renderer: Renderer) -> list[np.ndarray]:
    """Questions as a run would ask them, the second half with a beginning in common that fills a page of keys."""
    from nearpolicy.records import Prompt

    questions = [USER, "Name three colors.", f"{'Look closely. ' * 30}{USER}", f"{'Look closely. ' * 30}{NEXT}"]
    if renderer.has_chat_template:
        messages = [({"role": "user", "content": question},) for question in questions]
        return [renderer.prompt_ids(Prompt(id="", task="", messages=each)) for each in messages]
    return [renderer.prompt_ids(Prompt(id="", task="", text=question)) for question in questions]
