"""Until a server serves: what must be there before it is started, and when a started one counts as ready.

Ready is healthy, a first generation answered by every data-parallel group, and a process found for every seat that
the dialect expects. A server that ends before that, or loses a process, ends the wait at once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx

from harness import process_control
from harness.seats import in_order, seats_words
from harness.target import EngineSpec
from serving.targets.dialect import Dialect, Place
from serving.targets.engine_client import generate_once
from serving.targets.engine_log import LogTail
from serving.targets.engine_process import EngineServer, StartError
from serving.targets.engine_tree import Seated
from serving.workload import RequestSpec

_LOOK_S = 0.5
_HEALTH_S = 30.0
_VERSION_S = 60.0
_LOG_LINES = 30
_GRACE_S = 10.0
"""After one process died, how long the server may take to say why and end itself."""
_WARM_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
_WARM_TOKENS = 4
_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def engine_version(python: str, dialect: Dialect) -> str:
    """The version of the engine that ``python`` has. Raises StartError when there is none, or no such Python."""
    found = shutil.which(python)
    if found is None:
        raise StartError(
            f"target.python = {python}: no such program; name the interpreter in which {dialect.name} is installed"
        )
    try:
        answer = subprocess.run(
            [found, "-c", _VERSIONS, *dialect.distributions],
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=False,
        )
        versions = json.loads(answer.stdout) if answer.returncode == 0 else None
    except subprocess.TimeoutExpired:
        raise StartError(f"target.python = {python}: no answer within {_VERSION_S:g} s") from None
    except (OSError, ValueError) as error:
        raise StartError(f"target.python = {python}: is no Python that runs ({error})") from None
    if versions is None:
        said = answer.stderr.strip().splitlines()
        raise StartError(
            f"target.python = {python}: does not run: {said[-1] if said else f'status {answer.returncode}'}"
        )
    for name in dialect.distributions:
        if name in versions:
            return str(versions[name])
    raise StartError(
        f"target.python = {python}: {dialect.name} is not installed there (none of "
        f"{', '.join(dialect.distributions)}); install it, or name another interpreter"
    )


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait for a server. ``look``: who sits where now."""

    server: EngineServer
    tail: LogTail
    dialect: Dialect
    spec: EngineSpec
    place: Place
    look: Callable[[], Sequence[Seated]]
    cancelled: Event
    deadline_s: float

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.place.port}"

    def until_ready(self) -> list[Seated]:
        """Who sits where. Raises StartError with the last lines of the log."""
        deadline = time.monotonic() + self.deadline_s
        known: dict[int, Seated] = {}
        lost_since: float | None = None
        stage = "healthy" if self.place.node == 0 else "complete"
        while True:
            self.tail.read()
            ended = self.server.exit_words()
            if ended is not None:
                raise self._failed(f"the server ended during its start ({ended})")
            lost = [seated for seated in known.values() if not process_control.alive(seated.id)]
            if lost:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > _GRACE_S:
                    seats = seats_words(in_order(seated.seat for seated in lost))
                    raise self._failed(f"{seats} ended during the start, and the server waits on")
            seats_now = list(self.look())
            known |= {seated.id.pid: seated for seated in seats_now}
            if stage == "healthy" and self._healthy():
                self._generate(deadline)
                stage = "complete"
                continue
            if stage == "complete":
                missing = self._missing(seats_now)
                if not missing:
                    return seats_now
                stage_words = f"nobody was found for {seats_words(missing)}"
            else:
                stage_words = f"{self.dialect.health.path} was not answered 200"
            if self.cancelled.wait(_LOOK_S):
                raise StartError("the start was given up")
            if time.monotonic() > deadline:
                raise self._failed(f"not ready within {self.deadline_s:g} s (target.start_s): {stage_words}")

    def _healthy(self) -> bool:
        call = self.dialect.health
        try:
            answer = httpx.request(call.method, self.base_url + call.path, timeout=_HEALTH_S, trust_env=False)
        except httpx.HTTPError:  # nobody listens yet
            return False
        return answer.status_code == 200

    def _generate(self, deadline: float) -> None:
        groups = self.dialect.data_parallel(self.spec)
        for group in range(groups):
            request = RequestSpec(f"hangrig-warm-{group}", _WARM_PROMPT, _WARM_TOKENS)
            why = generate_once(
                self.dialect,
                self.spec,
                self.base_url,
                request,
                group if groups > 1 else None,
                max(1.0, deadline - time.monotonic()),
            )
            if why is not None:
                where = f" of data-parallel group {group}" if groups > 1 else ""
                raise self._failed(f"healthy, but the first generation{where} failed: {why}")

    def _missing(self, seats: Sequence[Seated]) -> list[int | str]:
        found = {seated.seat for seated in seats}
        expected = self.dialect.expected(self.spec, self.place.node)
        return [seating.seat for seating in expected if seating.seat not in found]

    def _failed(self, why: str) -> StartError:
        self.tail.read()
        lines = self.tail.last(_LOG_LINES)
        log = "\n  ".join(lines) if lines else "(nothing)"
        return StartError(f"{self.dialect.name}: {why}; the end of its log:\n  {log}")


def write_text(path: Path, text: str) -> None:
    """Raises StartError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise StartError(
            f"{path}: cannot be written ({error.strerror}); free space on that file system"
        ) from error
