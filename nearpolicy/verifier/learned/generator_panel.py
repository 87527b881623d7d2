"""A judge behind the `Generator` protocol: the embedded engine, or any other, asked by what it would say next.

    question -> at every place with a choice between labels: n draws of one token -> their log-probabilities -> Answer

A generator gives with each token the log-probability that it was drawn with, so one draw of a token tells its
probability exactly, and further draws only find further tokens. A label of which no draw was found has less than about
3 / n of the probability and counts as 0. The draws depend on the seed alone: equal questions get equal answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from nearpolicy.errors import NearpolicyError
from nearpolicy.models.label_tree import LabelTree
from nearpolicy.records import Finish
from nearpolicy.roles import Generator, Request, Sampling
from nearpolicy.verifier.learned import asking
from nearpolicy.verifier.learned.asking import Answer, Choice, Question
from nearpolicy.verifier.learned.judge import NoAnswer, all_of

PURPOSE = "judge"


class GeneratorPanel:
    """A `judge.Panel` of one: the weights that the generator holds."""

    def __init__(
        self,
        generator: Generator,
        *,
        render: Callable[[Sequence[Mapping[str, str]]], Sequence[int]],
        tokenize: Callable[[str], Sequence[int]],
        end: int,
        specials: Iterable[str] = (),
        draws: int = 64,
        seed: int = 0,
    ) -> None:
        """``render``: messages -> tokens up to the assistant's turn. ``tokenize``: a label -> its tokens. ``end``: the
        token that ends a turn. ``specials``: tokens of the tokenizer that stand for no text."""
        self._generator = generator
        self._render = render
        self._tokenize = tokenize
        self._end = end
        self._specials = tuple(specials)
        self._draws = draws
        self._seed = seed
        self._numbers = itertools.count()

    async def ask(self, question: Question) -> list[Answer]:
        found = await all_of([self._decided(question, choice) for choice in question.choices])
        return [{choice.name: answer for choice, answer in zip(question.choices, found, strict=True)}]

    async def _decided(self, question: Question, choice: Choice) -> Mapping[str, float]:
        chat = asking.choice_messages(question, choice, self._specials, asking.nonce_from(question))
        tree = LabelTree({label: self._tokenize(label) for label in choice.labels}, self._end)
        prompt = list(self._render(chat))
        places = list(tree.choices)
        drawn = await all_of([self._drawn([*prompt, *place]) for place in places])
        if not any(token in drawn[0] for token in tree.choices[places[0]]):
            raise NoAnswer(f"none of {self._draws} draws began with one of the answers {', '.join(choice.labels)}")
        return tree.probabilities(dict(zip(places, drawn, strict=True)))

    async def _drawn(self, tokens: Sequence[int]) -> dict[int, float]:
        """Token -> log-probability, of the tokens that were drawn after these."""
        request = Request(
            id=f"{PURPOSE}-{next(self._numbers)}",
            token_ids=np.asarray(tokens, dtype=np.int32),
            sampling=Sampling(temperature=1.0, max_tokens=1),
            n=self._draws,
            seed=self._seed,
            admission=0,
            purpose=PURPOSE,
        )
        found: dict[int, float] = {}
        try:
            async for completion in self._generator.submit(request):
                if completion.finish in (Finish.FAILED, Finish.ABORTED):
                    raise NoAnswer(f"the generator gave no token: {completion.reason or completion.finish.value}")
                found[int(completion.token_ids[0])] = float(completion.logprobs[0])
        except NearpolicyError as error:
            raise NoAnswer(f"the generator gave no token: {error}") from error
        return found
