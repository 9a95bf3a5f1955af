"""From what a trial left on disk to trial.json and diagnosis.json; the same for a fresh trial and a recheck.

The run writes a trial's history first (``history.json``, tokens, latencies), the agents its evidence; then
this judges. It only reads what is stored, so a stored run can be judged again with newer checkers, and a trial
whose driver was killed can be judged at all. Checks and diagnosis themselves are pure and live in
``checkers.py`` and ``diagnose.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.checkers import Facts, check, compare_tokens, differing, verdict
from harness.device_reading import read_library_evidence
from harness.diagnose import Diagnosis, Evidence, EvidenceSample, Missing, RankEvidence, Times, diagnose
from harness.diagnosis_model import LibraryEvidence, nothing_stopped
from harness.garbage import uncollected
from harness.ledger_snapshot import Snapshot
from harness.seats import Seat
from harness.stacks import ProcessStacks
from harness.stacks_tree import merge, tree_to_json
from harness.store import StoredSample, StoredTrial, StoreError, TrialStore, read_trial, write_json
from harness.wait_graph import WaitGraph, wait_graph
from harness.wrong_tokens import explained

HISTORY = "history.json"
_EXPECTED = ("kind", "mechanism", "culprits", "stream", "group")
"""What a scenario may expect of a diagnosis."""
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrialContext:
    """What the run knows about a trial from its plan."""

    planned: Document
    """``TrialPlan.to_json()``."""
    target: str
    world: int
    simulation: bool
    retractions_required: int
    rerun: str
    tokens_exact: bool = True
    """Its model works in float32."""
    aborts_required: int = 0
    """Requests that the engine must give up: the scenario has some that can never fit."""
    faults: Sequence[Document] = ()
    """The faults of its arm, as the ranks had them."""


@uncollected()
def judge(store: TrialStore, context: TrialContext, reference: Path) -> dict[str, Any]:
    """Writes diagnosis.json (unless the trial was healthy), evidence/merged.json (when it was captured) and
    trial.json; returns the last. Raises StoreError when the disk refuses."""
    stored = read_trial(store.path)
    history = _with_decisions(read_history(store.path), stored)
    diagnosis = diagnose_stored(stored, history, context)
    outcome, why = _outcome(history, diagnosis)
    tokens = stored.tokens or journal_tokens(store.path)
    wanted, reference_why, of = _reference(reference)
    facts = Facts(
        outcome=outcome,
        why_unknown=why,
        expected=context.planned["expected"]["hang"],
        mechanism_expected=context.planned["expected"]["mechanism"],
        mechanism=diagnosis.mechanism if diagnosis is not None else None,
        tokens_expected=context.planned["expected"]["tokens"],
        tokens_exact=context.tokens_exact,
        finished=bool(history.get("finished")),
        leaks=history.get("leaks", []),
        retractions=history.get("retractions", 0),
        retractions_required=context.retractions_required,
        aborts_required=context.aborts_required,
        aborted=[
            f"{request} ({how})"
            for request, how in history.get("finish", {}).items()
            if how.startswith("aborted")
        ],
        tokens=tokens,
        reference=wanted,
        reference_why=reference_why,
        slow_s=_slow_s(diagnosis) if outcome == "slow" else None,
        reference_is_itself=of == context.planned["id"],
    )
    compared = compare_tokens(tokens, wanted or {}, whole=facts.finished)
    store.forget_diagnosis()  # of an earlier judgement
    captured = diagnosis is not None
    if outcome == "healthy" and compared.differ:
        outcome = "corrupt"
        places = differing(tokens, wanted or {}, whole=facts.finished)
        diagnosis = explained(stored, history, places, simulation=context.simulation)
    elif diagnosis is None and outcome != "healthy":
        lack = Missing("a capture", why)
        diagnosis = nothing_stopped((), (lack,), simulation=context.simulation)
    checks = check(replace(facts, **_explained(diagnosis, context, store.path)))
    if diagnosis is not None:
        store.write_diagnosis(diagnosis.to_json())
    if captured:
        merged = merge(
            *(
                [
                    ProcessStacks.from_json(document)
                    for document in (*sample.stacks.values(), *sample.children.values())
                ]
                for sample in stored.samples
            )
        )
        write_json(store.evidence / "merged.json", tree_to_json(merged))
        write_json(store.evidence / "waits.json", _wait_graph(stored).to_json())
    planned = context.planned
    document = {
        "schema": 1,
        "id": planned["id"],
        "scenario": planned["scenario"],
        "arm": planned["arm"],
        "resolved": planned["resolved"],
        "seed": planned["seed"],
        "device": planned["device"],
        "target": context.target,
        "expected": planned["expected"]["hang"],
        "min_rate": planned["expected"]["min_rate"],
        "mechanism_expected": planned["expected"]["mechanism"],
        "tokens_expected": planned["expected"]["tokens"],
        "diagnosis_expected": {name: planned["expected"].get(name) for name in _EXPECTED},
        "outcome": outcome,
        "verdict": verdict(checks),
        "checks": [one.to_json() for one in checks],
        "steps": history.get("steps", 0),
        "tokens": sum(len(ids) for ids in tokens.values()),
        "retractions": history.get("retractions", 0),
        "duration_s": history.get("duration_s", 0.0),
        "tokens_differ": compared.differ,
        "tokens_exact": context.tokens_exact,
        "tokens_compared": compared.compared,
        "ranks": history.get("ranks", []),
        "others": history.get("others", []),
        "counters": history.get("counters", {}),
        "notes": history.get("notes", []),
        "rerun": context.rerun,
    }
    store.write_trial(document)
    return document


def _explained(diagnosis: Diagnosis | None, context: TrialContext, trial: Path) -> dict[str, Any]:
    """What the checks of the diagnosis and of the faults look at."""
    planned = context.planned["expected"]
    names = [name for name in _EXPECTED if name != "mechanism" or planned.get("kind")]
    said: dict[str, Any] = {}
    if diagnosis is not None:
        collective = diagnosis.collective
        said = {
            "kind": diagnosis.kind,
            "mechanism": diagnosis.mechanism,
            "culprits": sorted(one.rank for one in diagnosis.culprits if one.rank is not None),
            "stream": diagnosis.stream,
            "group": None if collective is None else collective.group,
        }
    acted = _acted(trial)
    due = {index: one for index, one in enumerate(context.faults) if one["probability"] > 0}
    silent = [_fault_words(one) for index, one in due.items() if index not in acted]
    return {
        "diagnosis_expected": {name: planned[name] for name in names if planned.get(name) is not None},
        "diagnosis": said,
        "faults": len(due),
        "silent_faults": silent,
    }


def _fault_words(fault: Document) -> str:
    return f"{fault['name']} at {fault['site']}" if fault["site"] else str(fault["name"])


def _acted(trial: Path) -> set[int]:
    """Indices of the faults that acted on some rank, as the ranks wrote it."""
    return {
        int(json.loads(line)["index"])
        for path in sorted((trial / "faults").glob("rank*.jsonl"))
        for line in path.read_bytes().split(b"\n")[:-1]
    }


def journal_tokens(trial: Path) -> dict[str, list[int]]:
    """Output tokens by request as the ranks' journals have them; a line cut by a crash is left out."""
    tokens: dict[str, list[int]] = {}
    for path in sorted((trial / "tokens").glob("rank*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            for request, token in json.loads(line)["tokens"].items():
                tokens.setdefault(request, []).append(token)
    return tokens


def read_history(trial: Path) -> dict[str, Any]:
    """Empty when the driver did not live to write it."""
    try:
        document: dict[str, Any] = json.loads((trial / HISTORY).read_bytes())
    except (OSError, ValueError):
        return {}
    return document


def _with_decisions(history: dict[str, Any], stored: StoredTrial) -> dict[str, Any]:
    """Of a trial that brought no result home: steps and retractions as the ranks' decision files have them."""
    if history.get("finished"):
        return history
    files = [*stored.all_decisions().values()]
    retracted = sum(len(record.get("retracted", ())) for file in _one_a_group(files) for record in file)
    steps = max((record.get("step", 0) for file in files for record in file), default=0)
    return {**history, "steps": steps, "retractions": retracted}


def _one_a_group(files: Sequence[Sequence[Mapping[str, Any]]]) -> list[Sequence[Mapping[str, Any]]]:
    """Of the ranks of one attention group, which decide alike and name their group, the first one's records."""
    groups = [file[0].get("dp") if file else None for file in files]
    return [file for at, file in enumerate(files) if groups[at] is None or groups[at] not in groups[:at]]


def _reference(path: Path) -> tuple[dict[str, list[int]] | None, str, str | None]:
    """Tokens by request, why there are none, and the trial that they are of, if it was one of the run's own."""
    try:
        document = json.loads(path.read_bytes())
    except OSError:
        return None, f"{path.name} was not written", None
    except ValueError as error:
        return None, f"{path.name} is damaged: {error}", None
    if "requests" not in document:
        return None, document["why"], None
    return document["requests"], "", document.get("of")


def _outcome(history: Document, diagnosis: Diagnosis | None) -> tuple[str, str]:
    """The outcome before tokens are compared, and why it is unknown where it is."""
    for outcome in ("skipped", "unknown"):
        if history.get(outcome):
            return outcome, history[outcome]
    if history.get("finished"):
        return ("healthy", "") if diagnosis is None else ("slow", "")
    if diagnosis is None:
        return "unknown", "the trial did not finish and left no evidence"
    if diagnosis.kind == "none":
        return "unknown", "the evidence shows ranks that move, yet the trial did not finish"
    return diagnosis.kind, ""


def _wait_graph(stored: StoredTrial) -> WaitGraph:
    """Of the last sample of each rank."""
    ledgers = {seat: document for sample in stored.samples for seat, document in sample.ledgers.items()}
    return wait_graph({seat: Snapshot.from_json(ledgers[seat]) for seat in ledgers if isinstance(seat, int)})


def diagnose_stored(stored: StoredTrial, history: Document, context: TrialContext) -> Diagnosis | None:
    """None for a trial that finished without a suspicion of which there are two samples."""
    if history.get("finished"):
        return diagnose(evidence_of(stored, history, context)) if _was_slow(stored) else None
    if not (stored.samples or history.get("failed")):
        return None
    return diagnose(evidence_of(stored, history, context))


def _was_slow(stored: StoredTrial) -> bool:
    """The watchdog suspected, and what it suspected went on. A capture that was asked for shows no more than that
    somebody asked."""
    return len(stored.samples) > 1 and (stored.manifest or {}).get("road", "asked") != "asked"


def _slow_s(diagnosis: Diagnosis | None) -> float | None:
    if diagnosis is None or diagnosis.times.went_on_s is None:
        return None
    return diagnosis.times.went_on_s - diagnosis.times.last_progress_s


def evidence_of(stored: StoredTrial, history: Document, context: TrialContext) -> Evidence:
    """A stored capture as the diagnosis takes it. What is missing or damaged is left out, and said."""
    manifest = stored.manifest or {}
    said = stored.engine or {}
    # What the launcher says of a dead rank is not what the rank raised; the process table has it dead.
    died = {int(rank) for rank in history.get("died", [])}
    raised: dict[Seat, str] = {int(rank): str(text) for rank, text in history.get("failed", {}).items()}
    failed: dict[Seat, str] = {rank: text for rank, text in raised.items() if rank not in died}
    failed |= {_seat(name): str(text) for name, text in said.get("exceptions", {}).items()}
    # Of a trial that finished it is not known who had already answered when the samples were taken.
    finished = bool(history.get("finished"))
    done = set() if finished else {int(rank) for rank in history.get("done", [])}
    taken = {entry["index"]: entry["taken_s"] for entry in manifest.get("samples", [])}
    missing = [
        Missing(entry["what"], entry["why"], bool(entry.get("impossible")))
        for entry in manifest.get("missing", [])
    ]
    # trial.json is what this is about to make.
    damaged = [problem for problem in stored.problems if not problem.startswith("trial.json")]
    missing += [Missing("stored files", problem) for problem in damaged]
    known: dict[Seat, Document] = {entry["rank"]: entry for entry in history.get("ranks", [])}
    known |= {entry["name"]: entry for entry in history.get("others", [])}
    samples = []
    for sample in stored.samples:
        table = (sample.processes or {}).get("ranks", [])
        processes = {
            _seat(entry["name"] if entry["rank"] is None else entry["rank"]): entry for entry in table
        }
        seats = {*range(context.world), *known, *processes}
        found = {
            seat: _rank_evidence(sample, seat, processes.get(seat, {}), known.get(seat, {})) for seat in seats
        }
        for seat, piece in found.items():
            answered = seat in done or (seat in failed and seat in raised)
            found[seat] = replace(piece, exception=failed.get(seat), task_done=answered)
        samples.append(
            EvidenceSample(
                taken.get(sample.index) or 0.0,
                {seat: piece for seat, piece in found.items() if isinstance(seat, int)},
                sample.index,
                {seat: piece for seat, piece in found.items() if isinstance(seat, str)},
            )
        )
    if said and not said.get("probe", {}).get("on", True):
        missing += [
            Missing(f"evidence/sample-{sample.index}/ledger/rank{rank}.json", "the probe was off in this arm")
            for sample in samples
            for rank, piece in sample.ranks.items()
            if piece.snapshot is None
        ]
    times = {key: value for key, value in (manifest.get("times") or {}).items() if value is not None}
    return Evidence(
        world=context.world,
        samples=tuple(samples),
        times=Times(**{key: times[key] for key in Times.__dataclass_fields__ if key in times}),
        missing=tuple(missing),
        reason=str(manifest.get("reason") or history.get("reason") or ""),
        exceptions=failed,
        deaths={_seat(entry["seat"]): float(entry["at_s"]) for entry in said.get("deaths", [])},
        decisions=stored.all_decisions(),
        device_is_simulation=context.simulation,
        went_on=tuple(manifest.get("ranks", ())) if finished else None,
        library=_library(stored, history, context, {**raised, **failed}),
    )


def _library(
    stored: StoredTrial, history: Document, context: TrialContext, raised: Mapping[Seat, str]
) -> LibraryEvidence | None:
    if context.planned.get("device") not in ("cuda", "npu"):
        return None
    rows = [*history.get("ranks", []), *history.get("others", [])]
    pids: dict[int, Seat] = {int(row["pid"]): row.get("rank", row.get("name")) for row in rows}
    return read_library_evidence(stored.path, pids, raised)


def _rank_evidence(sample: StoredSample, seat: Seat, process: Document, known: Document) -> RankEvidence:
    """One process in one sample, without what it raised. ``process`` is its row of the process table."""
    snapshot = _snapshot(sample.ledgers.get(seat))
    header = snapshot.header if snapshot is not None else None
    return RankEvidence(
        snapshot=snapshot,
        stacks=_process_stacks(sample.stacks.get(seat)),
        native=_process_stacks(sample.native.get(seat)),
        state=process.get("state"),
        pid=process.get("pid") or known.get("pid"),
        node=known.get("node", header.node if header is not None else ""),
        device=known.get("device") or (header.device if header is not None else None),
        exit=process.get("exit"),
        role=known.get("role", "rank" if isinstance(seat, int) else seat),
    )


def _seat(name: Seat) -> Seat:
    """A seat as JSON has it: object keys are text, also those of ranks."""
    return int(name) if isinstance(name, str) and name.isdecimal() else name


def _snapshot(document: Document | None) -> Snapshot | None:
    return None if document is None else Snapshot.from_json(document)


def _process_stacks(document: Document | None) -> ProcessStacks | None:
    return None if document is None else ProcessStacks.from_json(document)


__all__ = [
    "HISTORY", "StoreError", "TrialContext", "diagnose_stored", "evidence_of", "journal_tokens", "judge",
    "read_history",
]  # fmt: skip
