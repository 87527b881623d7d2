"""An OpenAI-compatible endpoint: a request gets its answer, or an `EndpointFault` that says why, in bounded time and
for bounded money.

    complete -> purse (what it may cost at most) -> place -> turn -> POST -> 200: paid, answer
                                                                        -> 408, 429, 5xx, no connection, time: again
                                                                        -> anything else: fault

Only the machinery is tried again here. What a model answered is never a reason to ask once more, so nobody can fish for
a better verdict by being hard to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from nearpolicy.errors import ConfigError, NearpolicyError, described
from nearpolicy.verifier.learned.config import EndpointConfig

if TYPE_CHECKING:
    import httpx2

LARGEST_ANSWER = 4 * 2**20
"""Bytes of one answer that are read."""
LONGEST_WAIT_S = 60.0
"""Between two attempts, if the endpoint does not say."""
LONGEST_RETRY_AFTER_S = 300.0
"""An endpoint that wants more is taken to be out of order."""
PROBE_S = 30.0
"""Longest wait for the answer to the first question."""
PROBE_RETRIES = 2
TEMPLATE_TOKENS = 64
"""What a chat template may add to the bytes of the messages."""
_AGAIN = frozenset({408, 425, 429, *range(500, 600)})


class EndpointFault(NearpolicyError):
    """A request that got no answer."""


class BudgetSpent(EndpointFault):
    """The request could exceed the budget and was not sent."""


class _Retry(Exception):
    """An attempt that says nothing about the request. ``after_s``: when the endpoint asked to be asked again."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.after_s = after_s


class Purse:
    """Never lets more be spent than the budget, as far as the endpoint tells the truth about tokens.

    A token has at least one byte, so the bytes of a request bound the tokens that are read.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._reserved = 0.0
        self.spent = 0.0
        self.is_spent = False
        """A request has been refused."""

    @contextlib.contextmanager
    def open(self, input_bound: int, output_bound: int) -> Iterator[Payment]:
        """Money for one attempt. What is sent may be billed whatever becomes of it, so all of it counts as spent unless
        `Payment.amount` is set to less."""
        budget, most = self._config.budget, self.price(input_bound, output_bound)
        if budget is not None and self.spent + self._reserved + most > budget:
            self.is_spent = True
            raise BudgetSpent(
                f"the budget of {budget:g} for {self._config.base_url} is used up: {self.spent:.6g} spent, "
                f"{self._reserved:.6g} under way, and this request may cost {most:.6g}"
            )
        self._reserved += most
        payment = Payment(most, most)
        try:
            yield payment
        finally:
            self._reserved -= most
            self.spent += payment.amount

    def price(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self._config.price_in + tokens_out * self._config.price_out) / 1e6


@dataclass(slots=True)
class Payment:
    """What one attempt costs."""

    most: float
    amount: float


class Pace:
    """Requests begin no faster than the rate, and not before a time the endpoint has named."""

    def __init__(self, requests_per_minute: float | None) -> None:
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next = self._held = 0.0

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        at = max(loop.time(), self._next)
        self._next = at + self._interval
        while (wait := max(at, self._held) - loop.time()) > 0:  # another request may be told to wait meanwhile
            await asyncio.sleep(wait)

    def hold(self, seconds: float) -> None:
        self._held = max(self._held, asyncio.get_running_loop().time() + seconds)


class Endpoint:
    """One endpoint with its connections, rate and money."""

    def __init__(self, config: EndpointConfig, *, key: str | None = None) -> None:
        self.config = config
        self.purse = Purse(config)
        self._key = key
        self._pace = Pace(config.requests_per_minute)
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._client: httpx2.AsyncClient | None = None

    @classmethod
    def of(cls, config: EndpointConfig) -> Endpoint:
        """With the key from the environment; `ConfigError` if it is not there."""
        if (problem := missing_key(config)) is not None:
            raise ConfigError(problem)
        return cls(config, key=None if config.api_key_env is None else os.environ[config.api_key_env].strip())

    def open(self) -> None:
        import httpx2

        limits = httpx2.Limits(max_connections=self.config.max_concurrency)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._client = httpx2.AsyncClient(limits=limits, headers=headers, timeout=self.config.timeout_s)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The endpoint's answer to a request, as JSON; `EndpointFault` if there is none."""
        return await self._complete(body, self.config.retries, self.config.timeout_s)

    async def probe(self, body: Mapping[str, Any]) -> None:
        """`ConfigError` if the endpoint cannot be reached, or does not accept such a request."""
        model = body["model"]
        try:
            await self._complete(body, min(PROBE_RETRIES, self.config.retries), min(PROBE_S, self.config.timeout_s))
        except BudgetSpent as error:
            raise ConfigError(f"{error}; raise the budget of the endpoint") from None
        except EndpointFault as error:
            raise ConfigError(f"judge {model!r}: {error}. {self._advice(str(error))}") from None

    def _advice(self, fault: str) -> str:
        if "answered 401" in fault or "answered 403" in fault:
            where = self.config.api_key_env
            return f"Put the right key into the environment variable {where}" if where else "Set endpoint.api_key_env"
        if "answered 404" in fault:
            return "Correct the name of the model, or endpoint.base_url: it ends where /chat/completions begins"
        if "answered 400" in fault or "answered 422" in fault:
            return "Leave out what it does not know: response_format: none, or fields set to null in `extra`"
        return "Start the endpoint, or correct endpoint.base_url"

    async def _complete(self, body: Mapping[str, Any], retries: int, timeout_s: float) -> Mapping[str, Any]:
        data = json.dumps(body).encode()
        attempt = 0
        while True:
            try:
                return await self._attempt(data, _output_bound(body), timeout_s)
            except _Retry as fault:
                if attempt == retries:
                    tried = f" ({attempt + 1} attempts)" if attempt else ""
                    raise EndpointFault(f"{self.config.base_url} {fault.why}{tried}") from None
                await self._back_off(fault, attempt)
            attempt += 1

    async def _back_off(self, fault: _Retry, attempt: int) -> None:
        if fault.after_s is None:
            # Jitter, so that those who failed together do not come back together.
            wait = min(LONGEST_WAIT_S, self.config.backoff_s * 2.0**attempt) * random.uniform(0.5, 1.0)
        elif fault.after_s > LONGEST_RETRY_AFTER_S:
            raise EndpointFault(
                f"{self.config.base_url} {fault.why} and asks to come back after {fault.after_s:.0f} s"
            ) from None
        else:
            wait = fault.after_s
            self._pace.hold(wait)
        await asyncio.sleep(wait)

    async def _attempt(self, data: bytes, output_bound: int, timeout_s: float) -> Mapping[str, Any]:
        async with self._places:
            await self._pace.turn()
            with self.purse.open(len(data) + TEMPLATE_TOKENS, output_bound) as payment:
                status, headers, answer = await self._post(data, timeout_s, payment)
                if status != 200:
                    payment.amount = 0.0
                    self._refuse(status, headers, answer)
                try:
                    found = json.loads(answer)
                except (ValueError, RecursionError):
                    raise _Retry(f"answered what is no JSON: {self._excerpt(answer)}") from None
                if not isinstance(found, dict):
                    raise EndpointFault(f"{self.config.base_url} answered no object: {self._excerpt(answer)}")
                payment.amount = self._cost(found, payment.most)
                return found

    def _refuse(self, status: int, headers: Mapping[str, str], answer: bytes) -> NoReturn:
        why = f"answered {status}: {self._excerpt(answer)}"
        if status in _AGAIN:
            raise _Retry(why, _retry_after(headers))
        raise EndpointFault(f"{self.config.base_url} {why}")

    async def _post(self, data: bytes, timeout_s: float, payment: Payment) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body."""
        import httpx2

        assert self._client is not None, "the endpoint has not been opened"
        url = f"{self.config.base_url}/chat/completions"
        try:
            async with asyncio.timeout(timeout_s), self._client.stream(
                "POST", url, content=data, headers={"Content-Type": "application/json"}
            ) as response:  # fmt: skip
                return response.status_code, response.headers, await _read(response.aiter_bytes())
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            payment.amount = 0.0
            raise _Retry(f"cannot be reached: {described(error, 120)}") from None
        except (TimeoutError, httpx2.TimeoutException):
            raise _Retry(f"gave no answer within {timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise _Retry(f"broke the connection: {described(error, 120)}") from None
        except httpx2.InvalidURL as error:
            raise EndpointFault(f"{url} is no address: {error}") from None

    def _cost(self, answer: Mapping[str, Any], most: float) -> float:
        usage = answer.get("usage")
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else [-1]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            return most
        return self.purse.price(*counts)

    def _excerpt(self, answer: bytes) -> str:
        """The beginning of what the endpoint said; some repeat the key that they refuse."""
        text = " ".join(answer[:4000].decode(errors="replace").split())
        if self._key:
            text = text.replace(self._key, "(the key)")
        return text[:200] or "(nothing)"


async def _read(parts: AsyncIterator[bytes]) -> bytes:
    found = bytearray()
    async for part in parts:
        found += part
        if len(found) > LARGEST_ANSWER:
            raise _Retry(f"answered more than {LARGEST_ANSWER} bytes")
    return bytes(found)


def missing_key(config: EndpointConfig) -> str | None:
    """What to say of a key that the environment does not hold; None if it does, or none is needed."""
    name = config.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if key.isascii() and key.isprintable() and key:
        return None
    found = "is not set" if name not in os.environ else "is empty" if not key else "holds what cannot be sent as a key"
    where = f"the environment variable {name}, which api_key_env names,"
    return f"endpoint {config.base_url}: {where} {found}; set it to the key"


def _output_bound(body: Mapping[str, Any]) -> int:
    bounds = [body.get(key) for key in ("max_tokens", "max_completion_tokens")]
    return max((bound for bound in bounds if isinstance(bound, int)), default=0)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; the header holds a number of them or a date."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
