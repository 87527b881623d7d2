"""Where the roles of a run live: made, started and closed here; the session knows no more of it than this.

    verifier -> load (the model, probed) -> store -> start (generator, learner, publisher) -> meter

`InlineRuntime` is one process: the engine and the learner each on a thread of its own, verifier workers beside it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from nearpolicy.config import RunConfig
from nearpolicy.roles import Generator, Verifier, WeightSync
from nearpolicy.store.folder import RunFolder
from nearpolicy.store.record import RunRecord
from nearpolicy.store.retention import Retention
from nearpolicy.store.writer import SqliteStore
from nearpolicy.verifier.sandbox.ladder import Opened
from nearpolicy.verifier.service import OnEvent, VerifierService

if TYPE_CHECKING:
    from nearpolicy.launch.build import EngineParts, FitModel, Language
    from nearpolicy.launch.inline import LearnerInThread
    from nearpolicy.launch.meter import Meter
    from nearpolicy.launch.places import LearnerPlace
    from nearpolicy.sync.publisher import Publisher

Functions = Mapping[str, Callable[..., Any]]
Say = Callable[[str], None]


class RunVerifier(Verifier, Protocol):
    """A verifier with a life."""

    @property
    def isolation(self) -> Opened | None:
        """How programs are kept in, once started; None if no reward runs any."""
        ...

    def flip_rates(self) -> dict[str, float]: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Runtime(Protocol):
    """The roles of one run, in the order in which they can be had."""

    generator: Generator
    """From `start` on, as the ones below."""
    learner: LearnerPlace
    publisher: WeightSync

    def verifier(self, tell: OnEvent) -> RunVerifier:
        """Before anything heavy is loaded; the session starts and closes it."""
        ...

    async def load(self, language: Language) -> None:
        """The model, where generators live; one that cannot be trained is refused."""
        ...

    @property
    def numerics(self) -> str:
        """exact or fast, once a model is loaded."""
        ...

    def create_store(self, folder: RunFolder, config: Mapping[str, Any], packages: Mapping[str, str]) -> RunRecord:
        """The record of a new run, once a model is loaded. The session closes it, after all who tell it something."""
        ...

    def open_store(self, folder: RunFolder) -> RunRecord:
        """Likewise, of a run that goes on."""
        ...

    async def start(self, tell: OnEvent) -> None: ...

    def remember(self, bring_back: Callable[[int], Awaitable[None]]) -> None:
        """What brings a learner that was lost, and has the initial weights, back to a version."""
        ...

    def meter(self, language: Language, tell: Callable[..., None]) -> Meter: ...

    def usage(self) -> dict[str, float]:
        """Metrics of single generators since the last call, where there may be several."""
        ...

    async def memory(self) -> dict[str, float]:
        """MiB by owner, of what is held for the whole run."""
        ...

    async def peaks(self) -> dict[str, float]:
        """MiB by role: the most that its process has held so far, where it is another one than this."""
        ...

    async def stop(self) -> None:
        """Ends generator and learner, and changes nothing the second time."""
        ...

    async def close(self) -> None:
        """Ends what else has been started."""
        ...


def runtime_of(config: RunConfig, functions: Functions, say: Say) -> Runtime:
    """As `runtime.kind` says."""
    if config.runtime.kind == "ray":
        from nearpolicy.launch.ray.runtime import RayRuntime

        return RayRuntime(config, functions, say)
    return InlineRuntime(config, functions, say)


class InlineRuntime:
    """Implements `Runtime` in this process."""

    def __init__(self, config: RunConfig, functions: Functions, say: Say) -> None:
        self._config = config
        self._functions = functions
        self._say = say
        self._engine: EngineParts | None = None
        self._learner: LearnerInThread | None = None

    def verifier(self, tell: OnEvent) -> VerifierService:
        rewards = {task.name: task.rewards for task in self._config.tasks}
        return VerifierService(rewards, self._config.verifier, at_hand=self._functions, on_event=tell)

    async def load(self, language: Language) -> None:
        from nearpolicy.launch import build

        self._language = language
        self._model: FitModel = build.load_model(self._config, language, self._say)

    @property
    def numerics(self) -> str:
        return self._model.mode

    def create_store(self, folder: RunFolder, config: Mapping[str, Any], packages: Mapping[str, str]) -> SqliteStore:
        return SqliteStore.create(folder, config=config, packages=packages, **self._of_store())

    def open_store(self, folder: RunFolder) -> SqliteStore:
        return SqliteStore.open(folder, **self._of_store())

    def _of_store(self) -> dict[str, Any]:
        return {"sync": self._config.store.sync, "retention": Retention.of(self._config.store)}

    async def start(self, tell: OnEvent) -> None:
        from nearpolicy.launch import build
        from nearpolicy.sync.publisher import Publisher

        config, made = self._config, (self._config, self._language, self._model)
        self._engine = build.start_engine(*made, partial(tell, "generator"), self._say)
        self._learner = build.start_learner(*made, self._engine, partial(tell, "learner"), self._say)
        self.generator, self.learner = self._engine.runner, self._learner
        if config.runtime.placement == "colocated":
            from nearpolicy.launch.colocated import TakesTurns

            self.learner = TakesTurns(self._learner, self.generator)
        self.publisher: Publisher = Publisher(
            self._learner,
            [self.generator],
            timeout_s=config.sync.timeout_s,
            adapter_only=config.sync.adapters == "adapter_only",
            on_event=partial(tell, "sync"),
        )

    def remember(self, bring_back: Callable[[int], Awaitable[None]]) -> None:
        """One that is lost here takes the run with it."""

    def meter(self, language: Language, tell: Callable[..., None]) -> Meter:
        from nearpolicy.launch import build
        from nearpolicy.launch.diagnosis import bound_of

        config, model = self._config, self._model
        bound = bound_of(model.mode, model.policy, narrow=config.generator.weights != "same")
        return build.make_meter(config, language, self.generator, self.generator, self.learner, bound, tell, self._say)

    def usage(self) -> dict[str, float]:
        return {}

    async def memory(self) -> dict[str, float]:
        from nearpolicy.launch import build

        return build.engine_memory(self._engine.engine) | build.learner_memory(self._learner.inner)

    async def peaks(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self.stop()

    async def stop(self) -> None:
        learner, engine, self._learner, self._engine = self._learner, self._engine, None, None
        if learner is not None:
            learner.close()
        if engine is not None:
            engine.runner.close()
