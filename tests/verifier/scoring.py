"""A service for as long as a test needs it, and what it says of one completion."""

from __future__ import annotations

import contextlib

from nearpolicy.records import Prompt, Rollout
from nearpolicy.verifier.config import VerifierConfig
from nearpolicy.verifier.service import VerifierService


@contextlib.asynccontextmanager
async def verifying(*rewards, functions=None, on_event=lambda *a, **k: None, **config):
    service = VerifierService({"t": rewards}, VerifierConfig(**config), at_hand=functions, on_event=on_event)
    try:
        await service.start()
        yield service
    finally:
        await service.close()


async def score(service, text, sample=0, prompt="What is 2 + 2?", **columns):
    """Source -> verdict. ``prompt``: text or messages."""
    asked = {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}
    given = Prompt(id="p", task="t", columns=columns, **asked)
    return await service.score(given, Rollout(sample=sample, segments=(), text=text, numerics="exact"))
