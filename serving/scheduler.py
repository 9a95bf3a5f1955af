"""Which requests of one rank compute what in the next step, and who gives way when the KV cache is full.

Here: admission, chunked prefill, decode, retraction, and what a finished step changes. Not here: the records
(``requests.py``), the pages (``kv_cache.py``), the agreement with the other ranks, the device, and clocks:
decisions follow from the calls made, nothing else.

The host may run one step ahead of the device: ``schedule()`` for step n+1 is called before ``commit()`` of
step n. So a row's newest token may be unknown to the host (``FUTURE``), a request may end while a later step
with it is under way (that step's token is dropped), and pages are given away while an earlier step still uses
them. The last is safe because a rank's steps run on the device in the order in which they were scheduled.

Rules of retraction and admission are those of SGLang: victims have the fewest output tokens, then the longest
prompt; one request is always kept, and aborted if even alone it cannot fit; the share of a request's
remaining tokens that admission sets aside falls over 600 steps and rises on a retraction. A prefill is never
retracted: it has all its pages from the start, and no decode step comes between its chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from harness import faults
from serving.admission import AdmissionRatio
from serving.kv_cache import IntegrityError, KVPool
from serving.requests import FUTURE, Batch, BatchMode, Request, Row, State
from serving.scheduler_config import Counters, SchedulerConfig

__all__ = [
    "Batch",
    "BatchMode",
    "Counters",
    "Request",
    "Row",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
]


class SchedulerError(RuntimeError):
    """The caller broke the order of calls, or gave a step's tokens incompletely."""


def _victim_order(request: Request) -> tuple[int, int, int]:
    """Least first: the fewest output tokens, then the longest prompt, then the newest."""
    return (len(request.output), -len(request.prompt), -request.arrival)


class Scheduler:
    """One rank's requests. Not thread safe: the host thread calls it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = KVPool(config.kv_tokens, config.page_size, prefix_cache=config.prefix_cache)
        self.forward_count = 0
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        """By id: requests whose prompt is computed, in the order in which that happened."""
        self.chunked: Request | None = None
        """The one request in the middle of its prefill."""
        self._ratio = AdmissionRatio(
            config.admission_ratio, config.admission_floor_factor, config.admission_decay_steps
        )
        self._counters = Counters()
        self._arrivals = 0
        self._uncommitted: deque[Batch] = deque()
        self._aborted: list[Request] = []  # not yet reported by a batch
        self._considered: tuple[tuple[str, int, int, int], ...] = ()  # for retraction, in that order

    # What the engine asks

    @property
    def counters(self) -> Counters:
        self._counters.evicted_pages = self.pool.evicted_pages
        return self._counters

    @property
    def new_token_ratio(self) -> float:
        """Share of the remaining tokens for which admission sets slots aside; see ``AdmissionRatio``."""
        return self._ratio.value

    def has_work(self) -> bool:
        """Whether a request lives, or ended and was not reported yet."""
        return bool(self.waiting or self.running or self.chunked or self._aborted)

    def idle(self) -> bool:
        """Whether nothing is left to schedule or to commit."""
        return not self.has_work() and not self._uncommitted

    def add(self, request: Request) -> None:
        """Takes a new request. One whose prompt exceeds the pool is aborted; the next batch reports it."""
        if request.state is not State.WAITING or request.output or request.in_flight:
            raise SchedulerError(f"request {request.id} was scheduled before; add a new one")
        if self._find(request.id) is not None:
            raise SchedulerError(f"request {request.id} is already known and has not ended")
        request.arrival = self._arrivals = self._arrivals + 1
        if not (self._never_fits(request.length) and self._give_up(request, request.length)):
            self.waiting.append(request)

    def abort(self, request_id: str, reason: str) -> bool:
        """Ends a request from outside; the next batch reports it. False if it is unknown or has ended."""
        request = self._find(request_id)
        if request is not None:
            self._abort(request, reason)
        return request is not None

    def schedule(self) -> Batch:
        """Decides the next step. Call ``commit`` for each batch, in order, at most one step late."""
        if len(self._uncommitted) > 1:
            raise SchedulerError("two steps are not committed; the host may be one step ahead, not more")
        self.forward_count += 1
        forced_before = self._counters.forced_retractions
        retracted: list[str] = []
        if faults.ACTIVE is not None:
            retracted += self._start_again()
        mode, rows = BatchMode.PREFILL, self._prefill()
        if not rows:
            retracted += self._retract_until_decode_fits()
            mode, rows = BatchMode.DECODE, self._decode()
            self._ratio.step(self.running.values(), decoded=bool(rows), retracted=bool(retracted))
        batch = Batch(
            forward_count=self.forward_count,
            mode=mode if rows else BatchMode.IDLE,
            rows=tuple(rows),
            retracted=tuple(retracted),
            forced=self._counters.forced_retractions > forced_before,
            aborted=tuple(request.id for request in self._aborted),
            victims=self._considered if retracted else (),
        )
        self._aborted.clear()
        if rows:
            self._uncommitted.append(batch)
        return batch

    def commit(
        self, batch: Batch, tokens: Mapping[str, int], finished_by_grammar: AbstractSet[str] = frozenset()
    ) -> list[Request]:
        """Takes the tokens that a step sampled, by request id; returns the requests that it finished.

        ``finished_by_grammar``: ids whose grammar accepts nothing after this token. An idle batch needs no
        commit and ignores one. Raises SchedulerError, and changes nothing, for a batch out of order or a
        missing token.
        """
        if batch.mode is BatchMode.IDLE:
            return []
        if not self._uncommitted or batch is not self._uncommitted[0]:
            raise SchedulerError(f"step {batch.forward_count} is not the oldest step without a commit")
        # A request that ended after this step was scheduled drops the step's token.
        live = [row.request for row in batch.rows if row.samples and row.request.state is not State.FINISHED]
        if missing := [request.id for request in live if request.id not in tokens]:
            raise SchedulerError(f"step {batch.forward_count} sampled no token for the requests {missing}")
        self._uncommitted.popleft()
        finished = []
        for request in live:
            token = tokens[request.id]
            request.in_flight -= 1
            request.output.append(token)
            if token in request.eos_ids:
                request.finish_reason = "eos"
            elif request.id in finished_by_grammar:
                request.finish_reason = "grammar"
            elif len(request.output) >= request.max_new_tokens:
                request.finish_reason = "length"
            if request.finish_reason is not None:
                self._share(request, ended=True)
                self._end(request)
                self._counters.finished += 1
                finished.append(request)
        return finished

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page and every lock is accounted for by exactly one holder."""
        holders = self._holders()
        self.pool.check_integrity({f"request {request.id}": request.owned_slots for request in holders})
        if self.pool.locks != len(holders):
            raise IntegrityError({0: f"{self.pool.locks} locks for {len(holders)} requests"}, "prefix cache")
        for request in [*holders, *self.waiting]:
            pages = {slot // self.config.page_size: f"of request {request.id}" for slot in request.slots}
            if request.state is State.WAITING and (request.slots or request.prefix or request.computed):
                raise IntegrityError(pages, "held by a waiting request")
            if request.computed > len(request.slots) or 0 in pages:
                raise IntegrityError(pages, f"a table of {request.computed} tokens without enough pages")
        if not holders and self.pool.available() != self.pool.size:
            raise IntegrityError({0: f"{self.pool.available()} of {self.pool.size} slots back"}, "idle pool")

    # Prefill

    def _prefill(self) -> list[Row]:
        """Rows of a prefill step: the chunked request, then the queue in order. Empty if none can go."""
        rows: list[Row] = []
        budget = self.config.max_prefill_tokens
        if self.chunked is not None:
            rows.append(self._extend(self.chunked, budget))
            budget -= rows[0].q_len
        for request in [request for request in self.waiting if not request.in_flight]:
            if self._never_fits(request.length):  # it grew while it shared its pages, and was retracted
                self._give_up(request, request.length)
                continue
            if not self._admit(request, budget):
                break
            rows.append(self._extend(request, budget))
            budget -= rows[-1].q_len
        for row in rows:
            if row.samples:  # shared from the next step on: inside this one its KV is not there yet
                self._share(row.request)
        return rows

    def _start_again(self) -> list[str]:
        """A fault has the request in its prefill give way to those that wait; it keeps nothing."""
        request, waiting = self.chunked, [one.id for one in self.waiting if not one.in_flight]
        if faults.ACTIVE is None or request is None or not waiting:
            return []
        passing = faults.ACTIVE.visit(
            "scheduler.prefill", request=request.id, computed=request.computed, waiting=len(waiting)
        )
        retracted: list[str] = []
        if passing.skipped:
            self._retract(request, retracted)
            self.waiting.rotate(-1)
        return retracted

    def _admit(self, request: Request, budget: int) -> bool:
        """Moves a waiting request to its prefill if this step, and the future as estimated, have room."""
        holders = self._holders()
        if budget <= 0 or len(holders) >= self.config.max_running:
            return False
        known = request.known
        prefix = self.pool.match_prefix(known[:-1])  # one token at least must give logits
        cut = len(known) - len(prefix) > min(budget, self.config.chunk_tokens)
        set_aside = sum(int(self._ratio.value * r.remaining) for r in [*holders, request])
        needed = self.pool.round_up(len(known)) - len(prefix)
        # A request alone is admitted whatever it may need later: waiting would not make more room.
        fits = not holders or needed + set_aside <= self.pool.available()
        if (cut and self.chunked is not None) or not fits:
            self.pool.release(prefix)
            return False
        self.waiting.remove(request)
        request.state = State.PREFILLING
        request.prefix = prefix
        request.slots = list(prefix.slots)
        request.computed = len(prefix)
        self._reserve(request, len(known))  # all chunks: a prefill that was begun can always go on
        self._counters.cached_tokens += len(prefix)
        return True

    def _chunk(self, request: Request, budget: int) -> int:
        return min(request.length - request.computed, self.config.chunk_tokens, budget)

    def _extend(self, request: Request, budget: int) -> Row:
        start, count = request.computed, self._chunk(request, budget)
        whole = start + count == request.length
        row = self._row(request, tuple(request.known[start : start + count]), samples=whole)
        if whole:
            request.state = State.RUNNING
            self.running[request.id] = request
        if whole == (request is self.chunked):
            self.chunked = None if whole else request
        return row

    # Decode

    def _ready(self) -> list[Request]:
        """Running requests that may get another token. The others end when their last one is committed."""
        return [request for request in self.running.values() if request.remaining > 0]

    def _growth(self, requests: Sequence[Request]) -> int:
        """Slots that one decode step of these requests takes from the pool."""
        return sum(self.config.page_size for r in requests if r.computed == len(r.slots))

    def _retract_until_decode_fits(self) -> list[str]:
        """Takes pages away until every kept request has room for one more token; returns the victims' ids."""
        candidates = sorted(self._ready(), key=_victim_order)
        every = self.config.retract_every
        forced = every > 0 and self.forward_count % every == 0
        if faults.ACTIVE is not None:
            needed = forced or self._growth(candidates) > self.pool.available()
            passing = faults.ACTIVE.visit(
                "scheduler.victims", victims=candidates, forced=forced, needed=needed
            )
            candidates = passing["victims"]
        considered = tuple((request.id, *_victim_order(request)) for request in candidates)
        retracted: list[str] = []
        while len(candidates) > 1:
            fits = self._growth(candidates) <= self.pool.available()
            if fits and (retracted or not forced):
                break
            self._retract(candidates.pop(0), retracted)
            self._counters.forced_retractions += fits
        if candidates and self._growth(candidates) > self.pool.available():
            last = candidates[0]
            too_large = (
                self._never_fits(last.computed + 1) and not last.in_flight
            )  # that token may yet end it
            if too_large and not self._give_up(last, last.computed + 1):
                self._retract(last, retracted)
        self._considered = considered if retracted else ()
        return retracted

    def _retract(self, victim: Request, retracted: list[str]) -> None:
        self._give_back(victim)
        victim.state = State.WAITING
        victim.retractions += 1
        self.waiting.appendleft(victim)
        retracted.append(victim.id)
        self._counters.retractions += 1

    def _decode(self) -> list[Row]:
        ready = self._ready()
        if self._growth(ready) > self.pool.available():
            return []  # a token in flight decides: it ends its request, or the one that outgrew the pool
        rows = []
        for request in ready:
            self._reserve(request, request.computed + 1)
            token = FUTURE if request.in_flight else request.output[-1]
            rows.append(self._row(request, (token,), samples=True))
        return rows

    # What both share

    def _row(self, request: Request, tokens: tuple[int | None, ...], *, samples: bool) -> Row:
        start = request.computed
        request.computed += len(tokens)
        request.in_flight += samples
        return Row(request, tokens, start, tuple(request.slots[: request.computed]), samples)

    def _holders(self) -> list[Request]:
        return [*self.running.values(), *([self.chunked] if self.chunked else [])]

    def _reserve(self, request: Request, length: int) -> None:
        """Extends a request's table to ``length`` tokens. The caller has made sure that there is room."""
        missing = self.pool.round_up(length) - len(request.slots)
        request.slots.extend(self.pool.allocate(max(0, missing)))

    def _share(self, request: Request, *, ended: bool = False) -> None:
        """Puts the full pages of a request, as far as its tokens are known, into the prefix cache."""
        if request.prefix is not None:
            tokens = request.known[: request.computed]
            request.prefix = self.pool.insert(tokens, request.slots, request.prefix, ended=ended)

    def _give_back(self, request: Request) -> None:
        """Frees what the request owns and unlocks what it shares. No-op for one that holds nothing."""
        self.running.pop(request.id, None)
        if self.chunked is request:
            self.chunked = None
        if request.prefix is not None:
            self.pool.free(request.owned_slots)
            self.pool.release(request.prefix)
        request.prefix = None
        request.slots = []
        request.computed = 0

    def _end(self, request: Request) -> None:
        if request.state is State.WAITING and request in self.waiting:
            self.waiting.remove(request)
        self._give_back(request)
        request.state = State.FINISHED

    def _give_up(self, request: Request, tokens: int) -> bool:
        """Aborts a request that needs more than the pool has. False when a fault has it wait on for ever."""
        reason = self._too_large(request, tokens)
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit("scheduler.abort", request=request.id, reason=reason)
            if passing.skipped:
                return False
        self._abort(request, reason)
        return True

    def _abort(self, request: Request, reason: str) -> None:
        request.finish_reason = f"aborted: {reason}"
        self._end(request)
        self._counters.aborted += 1
        self._aborted.append(request)

    def _find(self, request_id: str) -> Request | None:
        if self.chunked is not None and self.chunked.id == request_id:
            return self.chunked
        return self.running.get(request_id) or next((r for r in self.waiting if r.id == request_id), None)

    def _never_fits(self, tokens: int) -> bool:
        return self.pool.round_up(tokens) > self.pool.size

    def _too_large(self, request: Request, tokens: int) -> str:
        output = f"{len(request.output)} of {request.max_new_tokens}"
        return (
            f"request {request.id} alone needs {tokens} tokens of KV cache (prompt {len(request.prompt)}, "
            f"output {output}), the pool has {self.pool.size}; enlarge kv_tokens or shorten the request"
        )
