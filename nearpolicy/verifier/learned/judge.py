"""A judge's verdict: questions to a panel of judges, their answers as numbers.

    Panel.ask(question) -> an Answer of each member -> value of each -> mean - penalty * deviation

A panel is complete or there is no verdict: the mean of those who happened to answer would be another measure than the
one of the neighbouring completions. An answer that cannot be read is asked for once more, then the verdict is failed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from nearpolicy.errors import first_error
from nearpolicy.records import Outcome, Verdict
from nearpolicy.verifier.config import JudgeReward
from nearpolicy.verifier.learned import asking
from nearpolicy.verifier.learned.asking import Answer, Choice, Material, Question, UnreadableAnswer
from nearpolicy.verifier.learned.config import JudgingConfig
from nearpolicy.verifier.learned.endpoint import Endpoint, EndpointFault
from nearpolicy.verifier.learned.model_server import ModelFault, ModelServer
from nearpolicy.verifier.rewards import RowError, Sample, column_of

T = TypeVar("T")
READINGS = 2
"""Answers asked for until one can be read."""
PROBE_TOKENS = 16
"""Enough for an answer to the question at the start; nobody reads it."""


class NoAnswer(Exception):
    """A judge that gave none; the message says why."""


class Panel(Protocol):
    """Whoever judges."""

    async def ask(self, question: Question) -> list[Answer]:
        """One answer of each member; `NoAnswer` if one of them has none."""
        ...


class RemotePanel:
    """Models behind an endpoint."""

    def __init__(self, config: JudgingConfig, endpoint: Endpoint) -> None:
        self._config = config
        self._endpoint = endpoint

    async def probe(self) -> None:
        """`ConfigError` if a model cannot be asked."""
        question = Question(
            instructions="Say yes.", material=(), choices=(Choice(name="ok", labels=("true", "false"), kind="boolean"),)
        )
        for model in self._config.models:
            body = self._body(model, question)
            bound = {"max_tokens": min(PROBE_TOKENS, body["max_tokens"])} if "max_tokens" in body else {}
            await self._endpoint.probe(body | bound)

    async def ask(self, question: Question) -> list[Answer]:
        within_limit(question, self._config)
        members = [model for model in self._config.models for _ in range(self._config.samples)]
        return await all_of([self._answer(model, question) for model in members])

    async def _answer(self, model: str, question: Question) -> Answer:
        problem = ""
        for _ in range(READINGS):
            try:
                found = await self._endpoint.complete(self._body(model, question))
                return asking.read(question, asking.message_of(found))
            except EndpointFault as fault:
                raise NoAnswer(f"judge {model!r}: {fault}") from fault
            except UnreadableAnswer as error:
                problem = str(error)
        raise NoAnswer(f"judge {model!r} gave no readable verdict in {READINGS} attempts: {problem}")

    def _body(self, model: str, question: Question) -> dict[str, Any]:
        """A request; every one has a delimiter of its own."""
        config = self._config
        body: dict[str, Any] = {
            "model": model,
            "messages": asking.messages(question),
            "temperature": config.temperature,
            "max_tokens": config.max_answer_tokens,
        }
        if config.response_format == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif config.response_format == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": question.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {key: value for key, value in (body | config.extra).items() if value is not None}


class LocalPanel:
    """Models in processes of our own, which say how likely each allowed answer is."""

    def __init__(self, config: JudgingConfig, servers: Mapping[str, ModelServer]) -> None:
        self._config = config
        self._servers = servers

    async def ask(self, question: Question) -> list[Answer]:
        within_limit(question, self._config)
        return await all_of([self._answer(server, question) for server in self._servers.values()])

    async def _answer(self, server: ModelServer, question: Question) -> Answer:
        try:
            found = await all_of([self._decided(server, question, choice) for choice in question.choices])
        except ModelFault as fault:
            raise NoAnswer(str(fault)) from fault
        return {choice.name: answer for choice, answer in zip(question.choices, found, strict=True)}

    async def _decided(self, server: ModelServer, question: Question, choice: Choice) -> Mapping[str, float]:
        # The delimiter follows from the question, so that the verdict is the same in the next run.
        chat = asking.choice_messages(question, choice, server.specials, asking.nonce_from(question))
        values = await server.ask({"messages": chat, "labels": list(choice.labels)})
        return dict(zip(choice.labels, values, strict=True))


def within_limit(question: Question, config: JudgingConfig) -> None:
    """`NoAnswer` for more material than a request may hold."""
    if question.characters > config.max_characters:
        raise NoAnswer(f"{question.characters} characters to judge, more than max_characters")


class Judge:
    """Scores completions by what a panel says of them."""

    def __init__(self, reward: JudgeReward, panel: Panel) -> None:
        self._reward = reward
        self._panel = panel
        self._values = values_of(reward)
        self._choice = choice_of(reward)

    async def score(self, sample: Sample) -> Verdict:
        try:
            if self._reward.against_column is not None:
                return await self._compared(sample)
            answers = await self._panel.ask(self._question(self._material(sample)))
        except (NoAnswer, RowError) as problem:
            return Verdict.failed(str(problem))
        return summed_up([self._value(answer) for answer in answers], self._reward.penalty)

    async def _compared(self, sample: Sample) -> Verdict:
        """Both orders: what is shown first is often liked better, whatever it is."""
        given = self._material(sample)
        other = Material("B", column_text(sample.columns, str(self._reward.against_column)))
        ours = Material("A", sample.text)
        as_first, as_second = await all_of(
            [
                self._panel.ask(self._question((*given, ours, other))),
                self._panel.ask(self._question((*given, Material("A", other.text), Material("B", ours.text)))),
            ]
        )
        first = [self._value(answer) for answer in as_first]
        second = [1.0 - self._value(answer) for answer in as_second]
        orders = {"shown_first": statistics.fmean(first), "shown_second": statistics.fmean(second)}
        both = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        return summed_up(both, self._reward.penalty, orders)

    def _value(self, answer: Answer) -> float:
        return sum(self._values[label] * probability for label, probability in answer["verdict"].items())

    def _question(self, material: Sequence[Material]) -> Question:
        return Question(
            instructions=self._reward.instructions,
            material=tuple(material),
            choices=(self._choice,),
            reasoning=self._reward.reasoning,
        )

    def _material(self, sample: Sample) -> tuple[Material, ...]:
        reward = self._reward
        found = [*shown(sample, reward.show)]
        if reward.reference_column is not None:
            found.append(Material("REFERENCE ANSWER", column_text(sample.columns, reward.reference_column)))
        if reward.against_column is None:
            found.append(Material("ANSWER", sample.text))
        return tuple(found)


def choice_of(reward: JudgeReward) -> Choice:
    """What a judge may answer."""
    if reward.against_column is not None:
        asks = "Which answer is better? tie: neither is."
        return Choice(name="verdict", labels=("A", "B", "tie"), asks=asks)
    if reward.labels:
        return Choice(name="verdict", labels=tuple(reward.labels), asks="Which of these is the answer?")
    low, high = reward.scale
    asks = f"How good is the answer, from {low}, worst, to {high}, best?"
    return Choice(name="verdict", labels=tuple(map(str, range(low, high + 1))), kind="integer", asks=asks)


def values_of(reward: JudgeReward) -> Mapping[str, float]:
    """Label -> value of the completion (of answer A, where two are compared)."""
    if reward.against_column is not None:
        return {"A": 1.0, "B": 0.0, "tie": 0.5}
    if reward.labels:
        return reward.labels
    low, high = reward.scale
    return {str(score): (score - low) / (high - low) for score in range(low, high + 1)}


def summed_up(values: Sequence[float], penalty: float, parts: Mapping[str, float] | None = None) -> Verdict:
    """Parts: `mean` and `deviation` (of the population: two who say 0 and 1 deviate by 0.5), where several judged."""
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    found = dict(parts or {}) | ({"mean": mean, "deviation": deviation} if len(values) > 1 else {})
    return Verdict(outcome=Outcome.SCORED, value=mean - penalty * deviation, parts=found)


# What is shown


def shown(sample: Sample, columns: Sequence[str]) -> list[Material]:
    """The question, and columns of the row."""
    question = sample.prompt if isinstance(sample.prompt, str) else as_transcript(sample.prompt)
    return [
        Material("QUESTION", question),
        *(Material(f"COLUMN {name.upper()}", column_text(sample.columns, name)) for name in columns),
    ]


def as_transcript(chat: Sequence[Mapping[str, Any]]) -> str:
    """A chat as text; a part of a message that is no text is written as JSON."""
    lines = []
    for message in chat:
        content = message.get("content")
        content = content if isinstance(content, str) else json.dumps(content, default=str, ensure_ascii=False)
        lines.append(f"{message.get('role', 'unknown')}: {content}")
    return "\n\n".join(lines)


def column_text(columns: Mapping[str, Any], name: str) -> str:
    """What a column holds, as text; `RowError` if nothing."""
    value = column_of(name, columns)
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results in order; with the first error the others are ended, and it is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]
