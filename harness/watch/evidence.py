"""The evidence of a watch on disk, and the diagnosis that is made of it.

    <out>/<UTC time>-watch/
        watch.json                what was found, as ``--json`` prints it
        diagnosis.json            unless the engine is healthy
        evidence/manifest.json
        evidence/sample-<i>/      processes.json  stacks/<seat>.json  metrics.json  activity.json

Two samples a moment apart, laid out as those of a trial. When they are taken is ``watch.py``'s business, what they
mean ``diagnosis_stacks.py``'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from harness.capture import CaptureRank, CaptureReport, CaptureRequest, capture
from harness.diagnosis_model import Culprit, Diagnosis, Fact, Missing, Times
from harness.diagnosis_stacks import Condition, SeatStacks, stack_cause
from harness.process_tree import Tree
from harness.processes import ProcessEntry, read_process
from harness.seats import Seat, seat_stem
from harness.store import StoreError, write_json
from harness.watch.activity import Activity, busy_share, wakes_per_s
from harness.watch.looks import Look, Opinion
from harness.watch.sources import Sources, watched_role

CAPTURE_S = 10.0
_BY_PROCESSES = frozenset({"dead", "stopped", "missing"})
_BY_METRICS = frozenset({"tokens", "health", "slow"})


def make_folder(out: Path) -> Path:
    """``<out>/<UTC time>-watch``. Raises StoreError."""
    base = out.absolute() / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-watch"
    for number in range(1, 100):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise StoreError(path, f"cannot write: {error.strerror}; choose another --out") from error
        return path
    raise StoreError(base, "a hundred watches of this second exist; choose another --out")


@dataclass(frozen=True, slots=True)
class Sample:
    """``activities``: read beside the dumps; after those of the first sample and before those of the second, so
    that being dumped does not count."""

    report: CaptureReport
    activities: Mapping[Seat, Activity]
    look: Look


@dataclass(slots=True)
class Evidence:
    """Takes and stores samples of one tree."""

    folder: Path
    sources: Sources
    samples: list[Sample] = field(default_factory=list)

    def take(self, *, native: bool = False) -> Sample:
        """One sample, on disk. Never raises for a sick process; a disk that refuses is among what is missing."""
        before = self.sources.activities() if self.samples else {}
        report = capture(
            CaptureRequest(
                ranks=capture_ranks(self.sources.tree),
                out=self.folder / "evidence",
                sample=len(self.samples),
                native=native,
                deadline_s=CAPTURE_S,
            )
        )
        activities = before or self.sources.activities()
        look = self.sources.look(report.stacks, activities)
        sample = Sample(report, activities, look)
        self._write(sample)
        self.samples.append(sample)
        return sample

    def forget(self) -> None:
        """The suspicion fell: its samples go."""
        shutil.rmtree(self.folder / "evidence", ignore_errors=True)
        self.samples = []

    def write_manifest(self, opinion: Opinion, times: Times) -> None:
        """Raises StoreError."""
        write_json(
            self.folder / "evidence" / "manifest.json",
            {
                "reason": opinion.reason,
                "road": "watch",
                "proof": list(opinion.facts),
                "times": asdict(times),
                "samples": [
                    {"index": index, "taken_s": sample.look.taken_s}
                    for index, sample in enumerate(self.samples)
                ],
                "missing": [lack.to_json() for sample in self.samples for lack in sample.report.missing],
            },
        )

    def seats(self, died_s: Mapping[Seat, float]) -> tuple[SeatStacks, ...]:
        """Both samples by process. ``died_s``: since the watch began."""
        first, last = self.samples[0], self.samples[-1]
        tree = self.sources.tree
        states = [{entry.rank: entry for entry in one.report.processes} for one in (first, last)]
        found = []
        for member in tree.members:
            seat = member.seat
            before, after = (entries.get(seat) for entries in states)
            earlier, later = first.activities.get(seat), last.activities.get(seat)
            apart = earlier is not None and later is not None and first is not last
            found.append(
                SeatStacks(
                    seat=seat,
                    role=watched_role(member, tree),
                    condition=_condition(after),
                    pid=member.process.pid,
                    before=first.report.stacks.get(seat) if first is not last else None,
                    after=last.report.stacks.get(seat),
                    native=last.report.native.get(seat),
                    kernel=later.call if apart and later is not None else None,
                    busy_share=busy_share(earlier, later) if apart and earlier and later else None,
                    turns_per_s=wakes_per_s(earlier, later) if apart and earlier and later else None,
                    stopped_twice=_condition(before) == _condition(after) == "stopped",
                    died_s=died_s.get(seat),
                    exit=read_process(member.process.pid, member.process.start_time_ticks).exit,
                    stacks_path=f"{self._sample(last)}/stacks/{seat_stem(seat)}.json",
                    processes_path=f"{self._sample(last)}/processes.json",
                )
            )
        gone = (SeatStacks(rank, "rank", "dead", 0) for rank in tree.missing_ranks())
        return (*found, *gone)

    def _sample(self, sample: Sample) -> str:
        return f"evidence/sample-{sample.report.sample}"

    def _write(self, sample: Sample) -> None:
        folder = self.folder / self._sample(sample)
        traffic = sample.look.traffic
        metrics = {
            "url": self.sources.metrics_url,
            "status": self.sources.metrics.status,
            "why": self.sources.metrics.why,
            "running": traffic.running if traffic is not None else None,
            "waiting": traffic.waiting if traffic is not None else None,
            "tokens": traffic.tokens if traffic is not None else None,
            "marks": dict(traffic.marks) if traffic is not None else {},
            "health": sample.look.health,
            "health_asked_s": sample.look.asked_s,
        }
        activity = {seat_stem(seat): asdict(one) for seat, one in sample.activities.items()}
        write_json(folder / "metrics.json", metrics)
        write_json(folder / "activity.json", {"seats": activity})


def capture_ranks(tree: Tree) -> tuple[CaptureRank, ...]:
    return tuple(
        CaptureRank(member.seat, member.process.pid, member.process.start_time_ticks)
        for member in tree.members
    )


def diagnose_watch(
    evidence: Evidence, opinion: Opinion, died_s: Mapping[Seat, float], times: Times, node: str
) -> Diagnosis:
    """What two samples say of a stall, or of an engine about which nothing could be told."""
    shown = opinion.standing == "stalled" and opinion.reason not in _BY_PROCESSES
    stalled = tuple(Fact(fact, _path(opinion.reason)) for fact in opinion.facts) if shown else None
    tree = evidence.sources.tree
    complete = tree.engine == "other" or tree.expected_ranks is not None
    cause = stack_cause(evidence.seats(died_s), stalled=stalled, complete=complete)
    members = {member.seat: member for member in tree.members}
    culprits = []
    for seat in cause.ranks:
        member = members.get(seat)
        culprits.append(
            Culprit(
                rank=seat if isinstance(seat, int) else None,
                role="rank" if member is None else member.role,
                node=node,
                pid=0 if member is None else member.process.pid,
                device=None if member is None else member.device,
            )
        )
    lacks = {(lack.what, lack.why) for sample in evidence.samples for lack in sample.report.missing}
    missing = [Missing(what, why) for what, why in sorted(lacks)]
    missing += [Missing(what, "not known") for what in opinion.missing]
    if not complete:
        missing.append(
            Missing("all ranks", "the engine may have some on other nodes, or in processes of Ray")
        )
    missing.append(Missing("ledgers", "hangrig did not start this engine: no probe is in its processes"))
    return Diagnosis(
        kind=cause.kind,
        mechanism=cause.mechanism,
        culprits=tuple(culprits),
        stream=cause.stream,
        operation=None,
        collective=cause.collective,
        proof=cause.facts,
        confidence=cause.confidence,
        signature=cause.signature,
        times=times,
        missing_evidence=tuple(missing),
        simulation=False,
    )


def _path(reason: str) -> str:
    return f"evidence/sample-1/{'metrics.json' if reason in _BY_METRICS else 'processes.json'}"


def _condition(entry: ProcessEntry | None) -> Condition:
    if entry is None:
        return "unknown"
    if not entry.alive:
        return "dead"
    return "stopped" if entry.state == "T" else "alive"
