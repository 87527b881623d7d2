"""Reward functions written by users, in the shapes that TRL and verl made common.

    TRL   def reward(prompts, completions, completion_ids, **columns) -> list[float | None]
    verl  def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": float, ...}

Both may be ``async``; the names of the parameters tell them apart. A function receives only the parameters it names,
unless it takes ``**kwargs``. ``None`` means that it abstains. What a function may get wrong is of two kinds:

- *One sample goes wrong*: it raises, calls ``sys.exit``, or gives NaN, infinity or text instead of a number. The
  verdict is failed, and the reason names the cause. Nothing of this is ever scored 0.
- *The function is not what it claims to be*: no list, or a list of the wrong length, so that nobody knows which score
  belongs to which sample. That is a `RewardFunctionError`, which names the source and ends the run.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import cloudpickle

from nearpolicy.errors import UserError, described
from nearpolicy.records import Verdict
from nearpolicy.verifier.config import FunctionReward, RewardConfig
from nearpolicy.verifier.rewards import Sample

_TRL_OURS = ("prompts", "completions", "completion_ids")
_VERL_OURS = ("data_source", "solution_str", "ground_truth", "extra_info")
LARGEST_SCORE = 1e20
"""Scores are weighted, added and squared, and advantages are held in single precision."""
_NONE_AT_HAND: Mapping[str, Callable[..., Any]] = MappingProxyType({})


class RewardFunctionError(UserError):
    """A reward function that cannot be used, or that breaks its contract; the message names it."""


class Shape(enum.Enum):
    """How a reward function is called."""

    TRL = "trl"
    """Once for a list of samples, with a list per parameter."""
    VERL = "verl"
    """Once per sample."""


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A reward function whose signature has been understood."""

    source: str
    function: Callable[..., Any]
    shape: Shape
    accepts: frozenset[str] | None
    """Names it may be called with; None if it takes any."""
    columns: tuple[str, ...]
    """Columns that no row may lack."""
    kwargs: Mapping[str, Any]
    answer_column: str
    """Column passed as ``ground_truth`` (verl)."""

    def begin(self, samples: Sequence[Sample]) -> list[Any]:
        """Call the function: one result for all samples (TRL) or one per sample (verl), each perhaps awaitable."""
        if self.shape is Shape.TRL:
            return [self._call(_trl_arguments(samples))]
        return [self._call(_verl_arguments(sample, self.answer_column)) for sample in samples]

    def verdicts(self, results: Sequence[Any], count: int) -> list[Verdict]:
        """One verdict per sample from what `begin` returned, awaited where necessary."""
        if self.shape is Shape.VERL:
            return [_verl_verdict(result) for result in results]
        [scores] = results
        # Arrays and tensors are lists in disguise; text, mappings and sets are not, and a generator cannot be counted.
        if hasattr(scores, "tolist"):
            scores = scores.tolist()
        if not isinstance(scores, list | tuple):
            raise RewardFunctionError(
                f"the reward function {self.source!r} returned {_shown(scores)} for {count} samples; "
                f"return a list with one number or None per sample"
            )
        if len(scores) != count:
            raise RewardFunctionError(
                f"the reward function {self.source!r} returned {len(scores)} scores for {count} samples; "
                f"return one number or None per sample, in their order"
            )
        return [number_verdict(score) for score in scores]

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        arguments = {**arguments, **self.kwargs}
        if self.accepts is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.accepts}
        return self.function(**arguments)


def _trl_arguments(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Columns as lists; prompts and completions as chat messages where the row's prompt is a chat, as TRL passes them.

    Text that a task put into a message for the chat template stays text here.
    """
    names = {name for sample in samples for name in sample.columns}
    columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
    return columns | {
        "prompts": [sample.prompt for sample in samples],
        "completions": [
            sample.text if isinstance(sample.prompt, str) else [{"role": "assistant", "content": sample.text}]
            for sample in samples
        ],
        "completion_ids": [sample.completion_ids for sample in samples],
    }


def _verl_arguments(sample: Sample, answer_column: str) -> dict[str, Any]:
    return {
        "data_source": sample.columns.get("data_source", sample.task),
        "solution_str": sample.text,
        "ground_truth": sample.columns.get(answer_column),
        "extra_info": sample.columns.get("extra_info"),
    }


def _verl_verdict(result: Any) -> Verdict:
    """A mapping's ``score`` is the value; its other finite numbers are the parts."""
    if not isinstance(result, Mapping):
        return number_verdict(result)
    if "score" not in result:
        return Verdict.failed(f"the function returned a mapping without 'score': {_shown(result)}")
    others = {str(name): number_verdict(part).value for name, part in result.items() if name != "score"}
    parts = {name: value for name, value in others.items() if value is not None}
    return number_verdict(result["score"], **parts)


def number_verdict(value: Any, /, **parts: float) -> Verdict:
    """Numbers and truth values are scores, None abstains, all else has failed. A zero-dimensional array is a number."""
    if value is None:
        return Verdict.abstained("the function returned None")
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        value = value.item() if not getattr(value, "ndim", 0) else value
    if not isinstance(value, int | float):
        return Verdict.failed(f"the function returned {_shown(value)}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return Verdict.failed(f"the function returned {_shown(value)}, which is not a finite number")
    if abs(number) > LARGEST_SCORE:
        return Verdict.failed(f"the function returned {number:g}; beyond {LARGEST_SCORE:g} sums lose their meaning")
    return Verdict.scored(number, **parts)


def failure(error: BaseException, what: str = "the function") -> Verdict:
    """The verdict when scoring code raised: what, and where."""
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(where[-1].filename).name}:{where[-1].lineno}, in {where[-1].name})" if where else ""
    return Verdict.failed(f"{what} raised {described(error, 400)}{place}")


def _shown(value: Any) -> str:
    """A value for an error message; its ``repr`` is the user's code too, and may raise or be endless."""
    try:
        text = repr(value)
    except Exception:
        text = "an object whose repr raises"
    return f"{text[:80]} ({type(value).__name__})"


# Loading and understanding


def prepare(reward: FunctionReward, at_hand: Mapping[str, Callable[..., Any]] = _NONE_AT_HAND) -> UserFunction:
    """Load the function of a reward and read its signature; `RewardFunctionError` if it fits neither shape.

    ``at_hand``: functions that need no loading, by the path under which the reward names them.
    """
    function = at_hand.get(reward.path) or _load(reward)
    title = f"the reward function {reward.source!r} ({reward.path})"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise RewardFunctionError(f"{title} is not a function with a readable signature") from None

    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    shape = _shape(named, takes_any)
    if shape is None or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise RewardFunctionError(
            f"{title} takes ({', '.join(map(str, parameters))}), which fits neither shape: "
            f"(completions, **columns) as in TRL, "
            f"or (data_source, solution_str, ground_truth, extra_info=None) as in verl"
        )
    unknown = sorted(set(reward.kwargs) - set(named)) if not takes_any else []
    if unknown:
        raise RewardFunctionError(f"{title} does not take {', '.join(unknown)}, which `kwargs` sets")

    ours = _TRL_OURS if shape is Shape.TRL else _VERL_OURS
    required = [n for n, p in named.items() if p.default is p.empty and n not in ours and n not in reward.kwargs]
    if shape is Shape.TRL:
        if reward.answer_column is not None:
            raise RewardFunctionError(
                f"{title} has the TRL shape, which receives every column by its own name: remove `answer_column`"
            )
        columns = tuple(required)
    elif required:
        raise RewardFunctionError(
            f"{title} has the verl shape but also requires {', '.join(required)}; "
            f"give them a default or set them in `kwargs`"
        )
    else:
        columns = (reward.answer_column or "answer",) if takes_any or "ground_truth" in named else ()
    return UserFunction(
        source=reward.source,
        function=function,
        shape=shape,
        accepts=None if takes_any else frozenset(named),
        columns=columns,
        kwargs=reward.kwargs,
        answer_column=reward.answer_column or "answer",
    )


def _shape(named: Mapping[str, inspect.Parameter], takes_any: bool) -> Shape | None:
    """verl if it names ``solution_str``; TRL if it names one of TRL's lists, or nothing but ``**kwargs``."""
    if "solution_str" in named:
        return Shape.VERL
    if any(name in named for name in _TRL_OURS) or (takes_any and not named):
        return Shape.TRL
    return None


def required_columns(
    reward: RewardConfig, at_hand: Mapping[str, Callable[..., Any]] = _NONE_AT_HAND
) -> tuple[str, ...]:
    """Columns that every row must hold, not null, for this reward. Loads a user function to read its signature."""
    return prepare(reward, at_hand).columns if isinstance(reward, FunctionReward) else reward.columns


def _load(reward: FunctionReward) -> Callable[..., Any]:
    place, _, name = reward.path.partition(":")
    title = f"the reward function {reward.source!r} ({reward.path})"
    try:
        found: Any = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise RewardFunctionError(f"{title} cannot be loaded: {described(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise RewardFunctionError(f"{title} cannot be loaded: {place} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise RewardFunctionError(f"{title} is {_shown(found)}, not a function")
    return found


def _module_of_file(path: Path) -> ModuleType:
    """A file as a module of its own, which travels to worker processes by value since they cannot import it by name."""
    path = path.resolve()
    name = f"nearpolicy_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module


def packed(function: UserFunction) -> bytes:
    """The function as bytes for a worker process; `RewardFunctionError` if it holds something that cannot travel."""
    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        raise RewardFunctionError(
            f"the reward function {function.source!r} cannot travel to a worker process: "
            f"{described(error)}. "
            f"Create what it holds inside the function, or set `verifier.in_process: true` to call it in this process"
        ) from error
