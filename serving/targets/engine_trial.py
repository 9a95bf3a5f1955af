"""One trial on one node of a foreign engine: on the first node the workload from the first request to the account
of it, on the others only how far the ranks' ledgers moved.

Not here: sending (``engine_client.py``), counting (``engine_results.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import httpx

from harness.ledger import LedgerWriter
from serving.journal import Journal
from serving.targets import engine_results
from serving.targets.dialect import Dialect
from serving.targets.engine_client import ClientOptions, ClientView, EngineClient
from serving.targets.engine_faults import Faults
from serving.targets.engine_metrics import Metrics, read_metrics
from serving.targets.engine_results import Mark, Trial
from serving.targets.engine_start import EngineStart
from serving.workload import generate, workload

_log = logging.getLogger("hangrig.engine")

_SETTLE_S = 5.0
"""After the last answer, for the engine's metrics to say that nothing runs any more."""
_LOOK_S = 0.25
_FLUSH_S = 10.0


class EngineTrial:
    """``table``: the trial's seed, workload, client table and journal. ``ledger``: the client's; None on the nodes
    that have no client."""

    def __init__(
        self,
        dialect: Dialect,
        start: EngineStart,
        faults: Faults,
        table: Mapping[str, Any],
        ledger: LedgerWriter | None,
    ) -> None:
        self._dialect = dialect
        self._start = start
        self._table = table
        self._began_s = time.monotonic()
        self._marks = _marks(start)
        self._before = Metrics()
        self._stopped = Event()
        self.logged = 0
        """Requests that lost their place, as the log says."""
        self.results: list[dict[str, Any]] | None = None
        """The fields of `harness.target.RankResult`, one a rank, once the trial has come to its end."""
        self._journal = None
        self._client = None
        if ledger is not None:
            self._journal = _journal(table.get("journal"))
            options = {name: table["client"][name] for name in ("parallelism", "step_s", "deadline_s")}
            self._client = EngineClient(
                dialect,
                start.spec,
                ClientOptions(base_url=start.base_url, **options),
                ledger,
                self._journal,
                faults.due,
            )

    def run(self) -> None:
        """The whole of it; returns when it is over. Does nothing where there is no client."""
        client = self._client
        if client is None:
            return
        self._flush()
        self._before = read_metrics(self._start.base_url, self._dialect)
        client.run(
            generate(
                workload(self._table["workload"]), seed=self._table["seed"], vocab_size=self._start.vocab_size
            )
        )
        if self._journal is not None:
            self._journal.close()
        if not client.view().gave_up:
            self.results = [asdict(result) for result in self._settled().results()]

    def view(self) -> ClientView:
        return self._client.view() if self._client is not None else ClientView()

    def stop(self, reason: str) -> None:
        self._stopped.set()
        if self._client is not None:
            self._client.stop(reason)

    def steps(self) -> dict[int, tuple[int, int]]:
        """Batches so far of the ranks on this node, and those of them that only decoded."""
        marks = _marks(self._start)
        files = self._start.rank_files()
        return {
            rank: (
                marks[rank].steps - self._marks.get(rank, Mark()).steps,
                engine_results.decode_steps(files[rank][1], self._marks.get(rank, Mark())),
            )
            for rank in files
        }

    def account(self, after: Metrics | None = None, ended_s: float | None = None) -> Trial:
        """As it stands. ``after``: the engine's metrics, when they have been asked for already."""
        if after is None:
            after = read_metrics(self._start.base_url, self._dialect) if self._client else Metrics()
        steps = self.steps()
        return Trial(
            world=self._start.spec.world,
            groups=self._dialect.data_parallel(self._start.spec),
            outcomes=self._client.outcomes() if self._client is not None else (),
            before=self._before,
            after=after,
            logged=self.logged,
            duration_s=(ended_s or time.monotonic()) - self._began_s,
            steps={rank: both[0] for rank, both in steps.items()},
            decode_steps={rank: both[1] for rank, both in steps.items()},
        )

    def _settled(self) -> Trial:
        """Once the engine says that nothing is left, or will not say so."""
        ended_s = time.monotonic()
        after = read_metrics(self._start.base_url, self._dialect)
        while not engine_results.is_idle(after) and time.monotonic() - ended_s < _SETTLE_S:
            if self._stopped.wait(_LOOK_S):
                break
            after = read_metrics(self._start.base_url, self._dialect)
        return self.account(after, ended_s)

    def _flush(self) -> None:
        """An engine that will not forget its prefixes serves all the same; its cache makes the trial faster."""
        call = self._dialect.flush
        if call is None:
            return
        url = self._start.base_url + call.path
        try:
            answer = httpx.request(call.method, url, json=call.body, timeout=_FLUSH_S, trust_env=False)
        except httpx.HTTPError as error:
            _log.warning("%s: %s", call.path, error)
            return
        if answer.status_code != 200:
            _log.warning("%s: HTTP %d: %s", call.path, answer.status_code, answer.text[:200])


def _marks(start: EngineStart) -> dict[int, Mark]:
    return {rank: engine_results.mark(*files) for rank, files in start.rank_files().items()}


def _journal(path: str | None) -> Journal | None:
    """None where the run's directory is not on this node, or the disk refuses: the trial goes on without."""
    if path is None or not Path(path).parent.is_dir():
        return None
    try:
        return Journal(Path(path))
    except OSError as error:
        _log.warning("%s: %s", path, error)
        return None
