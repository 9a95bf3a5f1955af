"""The client of a foreign engine: sends a workload's requests over HTTP and receives their tokens as they come.

One stream a request, greedy, token ids in and out. Arrivals go by the clock, since a foreign engine's steps cannot
be waited for. The client's own ledger says that it waits for tokens, or that nothing is in flight, so that a server
that stopped answering is a silence which the watchdog sees, probe or no probe.

Not here: an engine's request and answer formats (the dialects), what follows a trial (``engine_host.py``).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

import httpx

from harness.ledger import LedgerWriter
from harness.target import EngineSpec
from serving.journal import Journal
from serving.targets.dialect import Dialect, Piece
from serving.workload import Arrival, RequestSpec

_CONNECT_S = 30.0
_WRITE_S = 60.0
_END_S = 5.0
_BODY_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The scenario's ``client`` table, and where requests go."""

    base_url: str
    parallelism: int | None = None
    step_s: float = 0.05
    deadline_s: float = 180.0


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are monotonic seconds; ``rank``: its data-parallel group."""

    id: str
    rank: int
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    """As the engine said it; ``aborted: <why>`` where the engine gave it up; None: it did not end."""
    failure: str | None = None
    """Why it did not end, where that is known."""
    retractions: int | None = None
    preemptions: int | None = None
    cached_tokens: int = 0
    sent_s: float = 0.0
    token_s: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many at once."""
    ended_s: float = 0.0

    def latency_us(self) -> dict[str, list[float]]:
        """``ttft``: to the first token; ``itl``: between two tokens, of several at once each their share; ``e2e``:
        to the end. Microseconds."""
        if not self.token_s:
            return {}
        pauses = [
            (now - before) / count * 1e6
            for (before, _), (now, count) in zip(self.token_s, self.token_s[1:], strict=False)
        ]
        found = {"ttft": [(self.token_s[0][0] - self.sent_s) * 1e6], "itl": pauses}
        return found | ({"e2e": [(self.ended_s - self.sent_s) * 1e6]} if self.finish else {})


@dataclass(frozen=True, slots=True)
class ClientView:
    """How far it is. ``over``: no request is in flight and none will be sent; ``gave_up`` says why not all of them
    ended."""

    sent: int = 0
    finished: int = 0
    failed: int = 0
    in_flight: int = 0
    tokens: int = 0
    over: bool = False
    gave_up: str = ""


class ServerLost(Exception):
    """No request can end any more."""


class EngineClient:
    """Sends one workload. ``each_token`` is called with the tokens so far, in the thread that runs it."""

    def __init__(
        self,
        dialect: Dialect,
        spec: EngineSpec,
        options: ClientOptions,
        ledger: LedgerWriter,
        journal: Journal | None = None,
        each_token: Callable[[int], None] | None = None,
    ) -> None:
        self._dialect = dialect
        self._spec = spec
        self._options = options
        self._ledger = ledger
        self._journal = journal
        self._each_token = each_token
        self._groups = dialect.data_parallel(spec)
        self._lock = Lock()
        self._outcomes: list[Outcome] = []
        self._in_flight = 0
        self._tokens = 0
        self._over = False
        self._gave_up = ""
        self._ended = Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Returns when it is over; then ``view().gave_up`` says whether all requests ended. Once a client."""
        try:
            asyncio.run(self._serve(arrivals))
        except* (asyncio.CancelledError, ServerLost):
            pass  # both have said why in ``gave_up``
        except* Exception as errors:  # ours; a trial that waits for ever would hide it
            error = errors.exceptions[0]
            self._give_up(f"the client failed: {type(error).__name__}: {error}")
        finally:
            self._ledger.phase("parked", self._tokens)
            self._end()

    def view(self) -> ClientView:
        with self._lock:
            finished = sum(outcome.finish is not None for outcome in self._outcomes)
            failed = sum(outcome.failure is not None for outcome in self._outcomes)
            return ClientView(
                sent=len(self._outcomes),
                finished=finished,
                failed=failed,
                in_flight=self._in_flight,
                tokens=self._tokens,
                over=self._over,
                gave_up=self._gave_up,
            )

    def outcomes(self) -> list[Outcome]:
        """In the order in which they were sent. Those in flight still change."""
        with self._lock:
            return list(self._outcomes)

    def stop(self, reason: str) -> None:
        """Gives all requests up. Returns when ``run`` has, or after a few seconds. Any thread."""
        with self._lock:
            loop, main = self._loop, self._main
            if self._over:
                return
            self._gave_up = self._gave_up or reason
        if loop is not None and main is not None and not loop.is_closed():
            loop.call_soon_threadsafe(main.cancel)
            self._ended.wait(_END_S)

    # The thread that runs it -----------------------------------------------------------------------------

    def _end(self) -> None:
        with self._lock:
            self._over = True
            left = [outcome for outcome in self._outcomes if outcome.failure]
            if left and not self._gave_up:
                self._gave_up = (
                    f"{len(left)} of {len(self._outcomes)} requests did not end: {left[0].failure}"
                )
        self._ended.set()

    async def _serve(self, arrivals: Sequence[Arrival]) -> None:
        with self._lock:
            self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
            if self._gave_up:  # stopped before it began
                return
        options = self._options
        self._ledger.phase("parked", 0)
        free = asyncio.Semaphore(options.parallelism or max(1, len(arrivals)))
        timeout = httpx.Timeout(connect=_CONNECT_S, write=_WRITE_S, read=None, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        began = time.monotonic()
        # trust_env: a proxy of the machine is not for its own server.
        async with (
            httpx.AsyncClient(
                base_url=options.base_url, timeout=timeout, limits=limits, trust_env=False
            ) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for index, arrival in enumerate(arrivals):
                await _until(began + arrival.step * options.step_s)
                await free.acquire()
                tasks.create_task(self._one(http, index, arrival.request, free))

    async def _one(
        self, http: httpx.AsyncClient, index: int, request: RequestSpec, free: asyncio.Semaphore
    ) -> None:
        group = (index if request.rank is None else request.rank) % self._groups
        outcome = Outcome(request.id, group)
        with self._lock:
            self._outcomes.append(outcome)
            self._in_flight += 1
        self._ledger.phase("serve", self._tokens)
        try:
            await self._stream(http, request, group if self._groups > 1 else None, outcome)
        except ServerLost as lost:
            outcome.failure = str(lost)
            self._give_up(str(lost))
            raise
        except asyncio.CancelledError:
            outcome.failure = "given up with the others"
            raise
        finally:
            free.release()
            with self._lock:
                self._in_flight -= 1
            outcome.ended_s = time.monotonic()
            self._ledger.phase("serve" if self._in_flight else "parked", self._tokens)

    async def _stream(
        self, http: httpx.AsyncClient, request: RequestSpec, dp_rank: int | None, outcome: Outcome
    ) -> None:
        """Fills ``outcome``. Raises ServerLost."""
        call = self._dialect.call(request, dp_rank, self._spec)
        deadline_s = self._options.deadline_s
        outcome.sent_s = time.monotonic()
        try:
            async with (
                asyncio.timeout(deadline_s) as patience,
                http.stream(call.method, call.path, json=call.body, headers=dict(call.headers)) as response,
            ):
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")[:_BODY_CHARACTERS]
                    _refused(request, response.status_code, text, outcome)
                    return
                async for event in _events(response):
                    if self._take(self._dialect.piece(event), outcome):
                        patience.reschedule(asyncio.get_running_loop().time() + deadline_s)
        except (TimeoutError, httpx.HTTPError, ValueError) as error:
            if outcome.finish is None:
                self._broken(request, outcome, error)
        else:
            if outcome.finish is None:
                raise ServerLost(_lost(request, outcome, "the stream ended without a word of why"))

    def _broken(self, request: RequestSpec, outcome: Outcome, error: Exception) -> None:
        """A stream that broke off. Raises ServerLost unless it is only late."""
        if isinstance(error, TimeoutError):
            outcome.failure = (
                f"request {request.id} got no token for {self._options.deadline_s:g} s, "
                f"after {len(outcome.tokens)} tokens of it"
            )
        elif isinstance(error, httpx.HTTPError):
            raise ServerLost(_lost(request, outcome, f"{type(error).__name__}: {error}")) from error
        else:
            raise ServerLost(_lost(request, outcome, f"an answer that cannot be read: {error}")) from error

    def _take(self, piece: Piece, outcome: Outcome) -> bool:
        """Whether it brought a token. Raises ServerLost."""
        if piece.dp_rank is not None:
            outcome.rank = piece.dp_rank
        for name in ("retractions", "preemptions", "cached_tokens"):
            if getattr(piece, name) is not None:
                setattr(outcome, name, getattr(piece, name))
        if piece.error is not None:
            if piece.lost:
                raise ServerLost(f"request {outcome.id}, after {len(outcome.tokens)} tokens: {piece.error}")
            outcome.finish = f"aborted: {piece.error}"
            return False
        new = piece.tokens[len(outcome.tokens) :] if piece.whole else piece.tokens
        if new:
            outcome.tokens.extend(new)
            outcome.token_s.append((time.monotonic(), len(new)))
            self._received(outcome.id, new)
        outcome.finish = piece.finish
        return bool(new)

    def _received(self, request: str, tokens: Sequence[int]) -> None:
        with self._lock:
            self._tokens += len(tokens)
        if self._journal is not None:
            for token in tokens:
                self._journal.append(self._tokens, {request: token})
        self._ledger.phase("serve", self._tokens)
        if self._each_token is not None:
            self._each_token(self._tokens)

    def _give_up(self, reason: str) -> None:
        with self._lock:
            self._gave_up = self._gave_up or reason


async def _until(at_s: float) -> None:
    """``at_s``: monotonic seconds."""
    while (left_s := at_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s)  # the clock of the arrivals, which is what is waited for


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON of a stream's ``data:`` lines. Raises ValueError for what is none."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        text = line[len("data:") :].strip()
        if text == "[DONE]":
            return
        event = json.loads(text)
        if not isinstance(event, dict):
            raise ValueError(f"{text[:_BODY_CHARACTERS]} is no JSON object")
        yield event


def _refused(request: RequestSpec, status: int, text: str, outcome: Outcome) -> None:
    """A request that the engine does not want ends; an engine that is broken is lost."""
    said = f"HTTP {status}: {' '.join(text.split())}"
    if status >= 500:
        raise ServerLost(_lost(request, outcome, said))
    outcome.finish = f"aborted: {said}"


def _lost(request: RequestSpec, outcome: Outcome, why: str) -> str:
    return f"the server was lost at request {request.id}, after {len(outcome.tokens)} tokens of it: {why}"


def generate_once(
    dialect: Dialect,
    spec: EngineSpec,
    base_url: str,
    request: RequestSpec,
    dp_rank: int | None,
    deadline_s: float,
) -> str | None:
    """Sends one request and reads its answer to the end; why it failed, None when it did not."""
    call = dialect.call(request, dp_rank, spec)
    tokens: list[int] = []
    deadline = time.monotonic() + deadline_s
    try:
        with (
            httpx.Client(base_url=base_url, timeout=deadline_s, trust_env=False) as http,
            http.stream(call.method, call.path, json=call.body, headers=dict(call.headers)) as response,
        ):
            if response.status_code != 200:
                return f"HTTP {response.status_code}: {response.read().decode(errors='replace')[:_BODY_CHARACTERS]}"
            for line in response.iter_lines():
                text = line.removeprefix("data:").strip()
                if time.monotonic() > deadline:
                    return f"no whole answer within {deadline_s:g} s"
                if not line.startswith("data:") or text == "[DONE]":
                    continue
                piece = dialect.piece(json.loads(text))
                if piece.error is not None:
                    return piece.error
                tokens = list(piece.tokens) if piece.whole else [*tokens, *piece.tokens]
    except (httpx.HTTPError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None if tokens else "the answer held no token"
