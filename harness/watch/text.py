"""What a watch found, in words: plain text for people, one document for programs. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from harness.diagnosis_model import Diagnosis
from harness.seats import seat_words
from harness.watch.run import SeatFinding, WatchResult

_VERDICTS = {"healthy": "HEALTHY", "not healthy": "NOT HEALTHY", "cannot tell": "CANNOT TELL"}
_WIDTH = 14
_STANDING_S = 1.0
_PROBE = "run the same load under `hangrig run`: its probe counts collectives on every rank"


def document(result: WatchResult) -> dict[str, Any]:
    """``hangrig watch --json``, and ``watch.json``."""
    traffic = result.traffic
    return {
        "verdict": result.verdict,
        "exit": result.exit,
        "reason": result.opinion.reason,
        "facts": list(result.opinion.facts),
        "directory": str(result.folder),
        "engine": result.tree.engine,
        "node": result.node,
        "watched_s": round(result.watched_s, 3),
        "processes": [_process(seat) for seat in result.seats],
        "metrics": None
        if traffic is None
        else {
            "url": result.metrics_url,
            "running": traffic.running,
            "waiting": traffic.waiting,
            "tokens": traffic.tokens,
        },
        "diagnosis": None if result.diagnosis is None else result.diagnosis.to_json(),
        "missing": [
            *(lack.to_json() for lack in result.missing),
            *({"what": what, "why": "not known"} for what in result.opinion.missing),
        ],
        "notes": list(result.tree.notes),
        "next": list(next_steps(result)),
    }


def text(result: WatchResult) -> str:
    """The verdict first, then who does what, the evidence, and what to do next."""
    lines = [_first_line(result), ""]
    lines.append(f"{result.tree.engine} on {result.node}, watched for {result.watched_s:.1f} s:")
    lines += [_line(seat) for seat in result.seats]
    lines += [f"note: {note}" for note in result.tree.notes]
    if result.traffic is not None:
        lines.append(f"requests: {result.traffic.words()} ({result.metrics_url})")
    if result.opinion.facts:
        lines += ["", "because", *(f"  {fact}" for fact in result.opinion.facts)]
    if result.diagnosis is not None and result.verdict == "not healthy":
        own = set(result.opinion.facts)
        lines += [f"  {fact.fact}" for fact in result.diagnosis.proof if fact.fact not in own][:4]
    lacks = [f"{lack.what}: {lack.why}" for lack in result.missing] + list(result.opinion.missing)
    if lacks:
        lines += ["", "not known", *(f"  {lack}" for lack in lacks)]
    lines += ["", f"evidence: {result.folder}", "next", *(f"  {step}" for step in next_steps(result))]
    return "\n".join(lines)


def next_steps(result: WatchResult) -> tuple[str, ...]:
    """What to do, most useful first."""
    pids = " ".join(str(member.process.pid) for member in result.tree.members if member.role == "server")
    again = f"hangrig watch {pids or result.tree.members[0].process.pid} --timeout 10m"
    diagnosis = result.diagnosis
    if result.verdict == "healthy" or diagnosis is None:
        return ("nothing; to wait for a stall: " + again,)
    if result.verdict == "cannot tell":
        steps = [f"watch for longer: {again}"]
        if result.traffic is None and result.tree.engine == "sglang":
            steps.append("start the server with --enable-metrics, so that requests and tokens can be seen")
        return tuple(steps)
    return steps_for(diagnosis)


def steps_for(diagnosis: Diagnosis) -> tuple[str, ...]:
    """What to do about a cause, most useful first."""
    pids = [culprit.pid for culprit in diagnosis.culprits if culprit.pid]
    named = " ".join(map(str, pids))
    dump = tuple(f"py-spy dump --native --pid {pid}" for pid in pids)
    if diagnosis.mechanism == "rank-stopped":
        return (
            f"who stopped it: a debugger, a job scheduler, a terminal? `kill -CONT {named}` lets it go on",
            "ranks that wait for it may have run into a timeout meanwhile; then restart the server",
        )
    if diagnosis.mechanism == "rank-dead":
        return (
            "read the end of the server's log, and the kernel's (dmesg) for the out-of-memory killer",
            "restart the server: its other ranks wait for a process that will not come back",
        )
    if diagnosis.mechanism == "host-blocked":
        return ("see what holds it up:", *dump, "then restart the server")
    if diagnosis.mechanism == "collective-skipped":
        return (*dump, "which collective it left out is not in a stack", _PROBE)
    if pids:
        return ("see what it does:", *dump)
    return (
        "compare the ranks' stacks in the evidence; native ones are beside them",
        _PROBE,
    )


def _first_line(result: WatchResult) -> str:
    verdict = _VERDICTS[result.verdict]
    diagnosis = result.diagnosis
    if result.verdict == "healthy":
        return f"{verdict}: {'; '.join(result.opinion.facts) or 'the engine goes on'}"
    if result.verdict == "cannot tell" or diagnosis is None:
        said = (*result.opinion.missing, *result.opinion.facts)[:2]
        return f"{verdict}: {'; '.join(said) or 'too little was seen'}"
    how = f"{diagnosis.kind}, {diagnosis.mechanism}, {diagnosis.confidence}"
    return f"{verdict}: {culprits_words(diagnosis)}: {how}"


def culprits_words(diagnosis: Diagnosis, no_pid: str = "gone") -> str:
    """``rank 1 (pid 4711, cuda:1)``. ``no_pid``: what is said where no pid is known."""
    who = []
    for culprit in diagnosis.culprits:
        other = "process" if culprit.role == "other" else culprit.role
        name = other if culprit.rank is None else f"rank {culprit.rank}"
        device = f", {culprit.device}" if culprit.device else ""
        who.append(f"{name} (pid {culprit.pid or no_pid}{device})")
    return ", ".join(who) or "no culprit could be named"


def _line(seat: SeatFinding) -> str:
    doing = seat.doing.words() if seat.doing is not None else "no stacks"
    if seat.state == "dead":
        doing = "gone"
    elif seat.state == "stopped":
        doing = f"STOPPED; {doing}"
    stood = (
        f", for {seat.stood_s:.0f} s or more" if seat.stood_s >= _STANDING_S and seat.state == "alive" else ""
    )
    device = f" {seat.member.device}" if seat.member.device else ""
    return f"  {seat_words(seat.member.seat):{_WIDTH}} {seat.member.process.pid:>7}{device}  {doing}{stood}"


def _process(seat: SeatFinding) -> dict[str, Any]:
    doing = seat.doing
    return {
        "seat": seat.member.seat,
        "role": seat.member.role,
        "rank": seat.member.rank,
        "pid": seat.member.process.pid,
        "start_time_ticks": seat.member.process.start_time_ticks,
        "device": seat.member.device,
        "title": seat.member.title,
        "state": seat.state,
        "stood_s": round(seat.stood_s, 3),
        "doing": None
        if doing is None
        else {
            "kind": doing.kind,
            "words": doing.words(),
            "operation": doing.operation or None,
            "site": None if doing.site is None else asdict(doing.site),
            "layer": None if doing.layer is None else asdict(doing.layer),
            "left": doing.left,
        },
    }
