"""The rewards of a task, and the section ``verifier`` of a recipe.

A reward is told by its ``kind``, so a wrong key is reported against the keys of that kind alone. What a reward reads
from the rows of the data is declared here (``answer_column`` and so on), so that a missing column is refused before the
first completion is sampled.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from nearpolicy.errors import nearest
from nearpolicy.settings import ConfigModel, RegularExpression, Seconds
from nearpolicy.verifier.learned.config import JudgeSettings, RewardModelSettings, RubricSettings, changed_keys

AS_WRITTEN = "as_written"
"""The attachment of a prompt whose row holds text that went into a chat message: that text."""


def _with_thresholds(requires: Any) -> Any:
    if isinstance(requires, list | tuple) and all(isinstance(name, str) for name in requires):
        return dict.fromkeys(requires, 1.0)
    if not isinstance(requires, dict):
        raise ValueError("write the names of sources as a list, or each with its smallest value: {format: 1.0}")
    return requires


Requirements = Annotated[dict[str, float], BeforeValidator(_with_thresholds)]


class _Reward(ConfigModel):
    """What every reward source has."""

    kind: str
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of this source in verdicts and metrics (default: the kind); no two sources of a task share one."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of this source in the reward; negative for a penalty."""
    requires: Requirements = Field(default_factory=dict)
    """A gate: other sources of the task, each with the smallest value (before its weight) at which this one counts;
    `[format]` is short for `{format: 1.0}`. Below it, or where the requirement itself does not count, this source adds
    nothing to the reward; its own value is logged as ever."""

    @property
    def source(self) -> str:
        """The name in use."""
        return self.name or self.kind

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that no row may lack. A user function says so by its signature: `functions.required_columns`."""
        return ()


class _AnswerReward(_Reward):
    answer_column: str = "answer"
    """Column with the right answer."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer_column,)


class ExactMatchReward(_AnswerReward):
    """1 if the completion is the answer, character by character; 0 otherwise."""

    kind: Literal["exact_match"] = "exact_match"
    """Selects this reward."""
    strip: bool = True
    """Ignore white space around completion and answer."""
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""


class RegexReward(_Reward):
    """1 if the pattern matches the completion, 0 otherwise."""

    kind: Literal["regex"] = "regex"
    """Selects this reward."""
    pattern: RegularExpression
    """Python regular expression; flags are written inside it, as in ``(?is)``."""
    match: Literal["search", "full"] = "search"
    """Whether the pattern may match anywhere, or must match the whole completion."""


class NumberReward(_AnswerReward):
    """1 if the last number in the completion equals the answer (conventions: `rewards.find_numbers`). Its part
    `correct` is 1 for the right number whatever stands around it, and its part `form` if nothing else stands there;
    held-out accuracy goes by `correct`."""

    kind: Literal["number"] = "number"
    """Selects this reward."""
    partial: float = Field(default=1.0, ge=0, le=1)
    """Value of the right number inside other text; below 1 it teaches the model to write nothing but the number."""


ExtractionForm = Literal["auto", "boxed", "tag", "final_answer", "hash", "last_number", "whole"]
"""Where a math answer stands in a completion; `MathVerifyReward.extract` says which is which."""


class MathVerifyReward(_AnswerReward):
    """1 if the answer in the completion equals the right one as mathematics, 0 otherwise; `docs/verify-math.md` lists
    the conventions. Its part `found` is 1 where the completion holds an answer in the form that counts."""

    kind: Literal["math_verify"] = "math_verify"
    """Selects this reward."""
    extract: ExtractionForm = "auto"
    r"""Where the answer stands. `boxed`: in the last complete ``\boxed{}`` or ``\fbox{}``. `tag`: in the last
    ``<answer></answer>``. `final_answer`: after the last ``####``, ``A:``, ``Answer:`` or ``the answer is``. `hash`:
    the number right after the last ``####``, as GSM8K's own grader reads it. `last_number`: the last number or
    formula. `whole`: the completion is the answer. `auto`: the first of `boxed`, `tag`, `final_answer`, `whole` (if it
    is nothing but an answer) and `last_number` that is there."""
    tolerance: float = Field(default=0.0, ge=0, le=0.5)
    """Relative difference up to which two real numbers are equal. 0: values are exact, and 0.333 is not a third."""


class ReasoningGymReward(_AnswerReward):
    """The score that the reasoning-gym data set itself gives the completion, often with partial credit. In held-out
    accuracy only the full score, 1, is right."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Selects this reward."""
    metadata_column: str = "metadata"
    """Column with the entry's metadata (a mapping or JSON text), which names the data set in ``source_dataset``."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the generator the questions came from; some score by them."""
    answer_tag: str | None = Field(default=None, pattern=r"^\w+$")
    """Score what the last ``<tag>...</tag>`` holds, nothing if there is none (default: the whole completion)."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer_column, self.metadata_column)


class CodeLimits(ConfigModel):
    """Limits of one run of a program; each test is a run."""

    cpu_s: float = Field(default=5.0, gt=0, le=3600)
    """Processor time; what a verdict rests on."""
    wall_s: float | None = Field(default=None, gt=0, le=7200)
    """Time on the clock, a backstop (default: twice ``cpu_s`` and 2)."""
    memory_mib: int = Field(default=512, ge=16, le=1 << 20)
    """Address space beyond what the interpreter holds."""
    output_kib: int = Field(default=1024, ge=1, le=1 << 20)
    """Of what it prints, and of a result."""
    processes: int = Field(default=1, ge=1, le=512)
    """More than 1: the program may start others; each has ``cpu_s`` and ``memory_mib`` for itself."""


class CodeReward(_Reward):
    """1 if the program in the completion passes all tests of its row, in the sandbox (`docs/verifiers.md`). Tests are
    inputs and outputs, calls of a function, or test code; expected values never enter the sandbox of the program."""

    kind: Literal["code"] = "code"
    """Selects this reward."""
    tests_column: str = "tests"
    """Column with the tests: a list of ``{stdin, stdout}``, of ``{args, result}`` or of test code, or JSON of one."""
    entry: str | None = None
    """Function that is tested (``Class.method`` for a method)."""
    entry_column: str | None = None
    """Column with its name, where rows differ."""
    setup_column: str | None = None
    """Column with test code that runs before the tests."""
    prefix_column: str | None = None
    """Column with the beginning of the program, for completions that go on from it."""
    audit_column: str | None = None
    """Column with a second set of tests, for those that pass the first: the part `audit`, never a reward."""
    extract: Literal["auto", "whole"] = "auto"
    """auto: the program is the last fenced block of Python, or the whole completion if there is none."""
    score: Literal["all", "share"] = "all"
    """Reward 1 for a program that passes every test, or the share of tests that it passes."""
    trust: Literal["split", "together"] = "split"
    """together: test code runs in one process with the program, which can then cheat it; needs
    ``verifier.allow_weak_trust``. For test code that hands over functions or asks for the inside of classes."""
    command: tuple[str, ...] = ()
    """For another language: what runs ``file``, for example ``[bash, main.sh]``; set ``limits.processes`` above 1."""
    file: str = Field(default="program", pattern=r"^[\w.-]+$")
    """Name the program is written to for ``command``."""
    limits: CodeLimits = CodeLimits()
    """Limits of one run."""

    @property
    def columns(self) -> tuple[str, ...]:
        named = (self.tests_column, self.entry_column, self.prefix_column, self.audit_column)
        return tuple(name for name in named if name is not None)

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.entry is not None and self.entry_column is not None:
            raise ValueError("set one of entry and entry_column")
        if self.command and self.limits.processes == 1:
            raise ValueError("command starts a process: set limits.processes to 2 or more")
        if not self.command and changed_keys(self, ("file",)):
            raise ValueError("file names what the program is written to for `command`, which is not set; leave it out")
        if self.command and (self.entry or self.entry_column or self.setup_column):
            raise ValueError("command goes with tests of the form {stdin, stdout}; entry and setup_column do not")
        return self


class IfevalReward(_Reward):
    """1 if the completion follows every instruction of its row, as IFEval has them (`docs/verify-ifeval.md`). Parts:
    `all`, the `share` followed, and each kind of instruction by its name."""

    kind: Literal["ifeval"] = "ifeval"
    """Selects this reward."""
    instructions_column: str = "instruction_id_list"
    """Column with the list of instructions, for example `punctuation:no_comma` (or its JSON text)."""
    kwargs_column: str = "kwargs"
    """Column with the list of their arguments, a mapping for each (or its JSON text)."""
    form: Literal["strict", "loose"] = "strict"
    """Whether the completion itself must follow, or may do so without its first or last line or its asterisks."""
    credit: Literal["all", "share"] = "all"
    """1 only if all instructions are followed, or the share of them that is."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.instructions_column, self.kwargs_column)


class JudgeReward(JudgeSettings, _Reward):
    """What a language model says of the completion, as a value from 0 to 1 (or that of a label). `docs/verify-judge.md`
    says what it withstands."""

    kind: Literal["judge"] = "judge"
    """Selects this reward."""


class RubricReward(RubricSettings, _Reward):
    """The weighted share of items that the completion fulfils, from 0 to 1; each item is a part of the verdict."""

    kind: Literal["rubric"] = "rubric"
    """Selects this reward."""


class RewardModelReward(RewardModelSettings, _Reward):
    """The score of a reward model, or of a process reward model over the steps of the completion."""

    kind: Literal["reward_model"] = "reward_model"
    """Selects this reward."""


LearnedReward = JudgeReward | RubricReward | RewardModelReward


class FunctionReward(_Reward):
    """A function of yours, in the shape TRL or verl expects (`docs/getting-started.md` describes both). It is called
    with one sample at a time: the lists of the TRL shape hold one entry each. Where it is a task's first reward,
    held-out accuracy calls values of 1 or more right: give 1 to what you call right, or return a part `correct` (verl
    shape)."""

    kind: Literal["function"] = "function"
    """Selects this reward."""
    path: str
    """Where it is: ``path/to/file.py:function``, relative to the working folder, or ``package.module:function``."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments; they take precedence over columns of the same name."""
    answer_column: str | None = None
    """Column passed as ``ground_truth``, for functions of the verl shape only (default: ``answer``)."""

    @field_validator("path")
    @classmethod
    def _names_a_function(cls, path: str) -> str:
        if not re.fullmatch(r"[^:]+:[A-Za-z_][\w.]*", path):
            raise ValueError(f"path is {path!r}; write it as file.py:function or package.module:function")
        return path


RewardConfig = Annotated[
    ExactMatchReward
    | RegexReward
    | NumberReward
    | MathVerifyReward
    | ReasoningGymReward
    | IfevalReward
    | CodeReward
    | JudgeReward
    | RubricReward
    | RewardModelReward
    | FunctionReward,
    Field(discriminator="kind"),
]


def reads_tokens(rewards: Sequence[RewardConfig]) -> bool:
    """Whether any of them judges a completion by more than its text."""
    return any(isinstance(reward, FunctionReward) for reward in rewards)


def check_together(rewards: Sequence[RewardConfig]) -> None:
    """Raise ValueError if the rewards of a task contradict each other.

    Two sources of one name would overwrite each other's verdicts; a gate that waits for itself never opens.
    """
    sources: dict[str, RewardConfig] = {}
    for reward in rewards:
        if reward.source in sources:
            raise ValueError(f"two reward sources are named {reward.source!r}; set `name` on one of them")
        sources[reward.source] = reward
    for reward in rewards:
        for name, threshold in reward.requires.items():
            if name not in sources:
                close = nearest(name, list(sources))
                hint = f"did you mean {close!r}?" if close else f"there are {', '.join(map(repr, sources))}"
                raise ValueError(
                    f"the reward {reward.source!r} requires {name!r}, which is no source of this task; {hint}"
                )
            known = sources[name].kind not in ("function", "reward_model") and not getattr(sources[name], "labels", {})
            if known and not 0 < threshold <= 1:
                raise ValueError(
                    f"the reward {reward.source!r} requires {name!r} to be {threshold:g} or more, but that source "
                    "gives values from 0 to 1: the gate would never open or never close; use a threshold in between"
                )
    try:
        graphlib.TopologicalSorter({reward.source: reward.requires for reward in rewards}).prepare()
    except graphlib.CycleError as error:
        cycle = " requires ".join(map(repr, reversed(error.args[1])))
        raise ValueError(f"rewards wait for each other: {cycle}; take one `requires` away") from None


def _fit_together(rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
    check_together(rewards)
    return rewards


Rewards = Annotated[tuple[RewardConfig, ...], AfterValidator(_fit_together)]
"""The rewards of one task, as a field of a config."""


class VerifierConfig(ConfigModel):
    """Section `verifier`: how completions are judged."""

    workers: int = Field(default=1, ge=1, le=1000)
    """Processes for rewards that can block or crash: math_verify, reasoning_gym, ifeval, regex and user
    functions."""
    timeout_s: Seconds = 10.0
    """Limit of one call of one reward source; a worker that exceeds it is killed and replaced."""
    retries: int = Field(default=1, ge=0, le=100)
    """Further attempts after a worker died under a call; a wrong answer or a raising function is never tried again."""
    deadline_s: Seconds = 600.0
    """Limit of judging one completion by one reward source, waiting for a worker included; then it has failed."""
    cache: int = Field(default=10_000, ge=0, le=10_000_000)
    """Verdicts remembered: the same completion of the same row is judged once, unless by a user function."""
    recheck: float = Field(default=0.01, ge=0, le=1)
    """Share of completions that worker processes and the sandbox judge a second time, past the cache, to see whether
    verdicts are steady (``verifier/<source>/flip_rate``); the first verdict counts. Not for user functions."""
    isolation: Literal["auto", "namespaces", "landlock", "bubblewrap", "remote", "none"] = "auto"
    """How programs are kept in, for rewards of kind `code`; auto is the strongest of namespaces and landlock that
    withstands an attack at the start. bubblewrap is a slower reference; remote is a service at ``sandbox_url``."""
    sandbox_url: str | None = Field(default=None, pattern=r"^https?://.+")
    """Where a service with the interface of SandboxFusion runs programs, for ``isolation: remote``."""
    allow_unisolated: bool = False
    """Let ``isolation: none`` run programs with nothing but limits: for programs that you trust as your own."""
    allow_weak_trust: bool = False
    """Let rewards run test code together with the program it tests (``trust: together``)."""
    packages: tuple[str, ...] = ("numpy",)
    """What programs may import beyond the standard library; a program that names none of them starts faster."""
    in_process: bool = False
    """Call user functions in this process, for a debugger: without time limit and without protection from crashes."""

    @model_validator(mode="after")
    def _unsafe_is_said_twice(self) -> Self:
        if self.isolation == "none" and not self.allow_unisolated:
            raise ValueError(
                "isolation is none, which runs programs of the policy with the rights of this process; "
                "use auto, or set allow_unisolated: true as well"
            )
        if (self.isolation == "remote") != (self.sandbox_url is not None):
            raise ValueError("isolation: remote and sandbox_url go together; set both or neither")
        if self.isolation == "remote" and changed_keys(self, ("packages",)):
            raise ValueError("packages has no effect with isolation: remote, where the service decides; leave it out")
        return self
