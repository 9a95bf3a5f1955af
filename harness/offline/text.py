"""What the dumps showed, in words: plain text for people, one document for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.diagnosis_model import Diagnosis
from harness.diagnosis_stacks import SeatStacks
from harness.offline.by_ledgers import Verdict
from harness.offline.verdict import EXITS
from harness.seats import seat_words
from harness.watch.text import culprits_words, steps_for

_VERDICTS: dict[Verdict, str] = {
    "healthy": "HEALTHY",
    "not healthy": "NOT HEALTHY",
    "cannot tell": "CANNOT TELL",
}
_WIDTH = 14
_FACTS = 8
_LACKS = 8
_OTHER_FILES = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """``used``: files and what they are; ``ignored``: files of no known kind; ``samples``: their folders."""

    directory: str
    verdict: Verdict
    diagnosis: Diagnosis
    seats: tuple[SeatStacks, ...]
    engine: str
    used: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]
    samples: tuple[str, ...]

    @property
    def exit(self) -> int:
        return EXITS[self.verdict]


def document(answer: Answer) -> dict[str, Any]:
    """``hangrig diagnose --json``: diagnosis.json, and what it was made of."""
    return {
        **answer.diagnosis.to_json(),
        "verdict": answer.verdict,
        "exit": answer.exit,
        "directory": answer.directory,
        "engine": answer.engine,
        "samples": len(answer.samples),
        "files": [{"path": path, "is": kind} for path, kind in answer.used],
        "ignored": list(answer.ignored),
        "processes": [_process(seat) for seat in answer.seats],
        "next": list(next_steps(answer)),
    }


def text(answer: Answer) -> str:
    """The verdict first, then who does what, the evidence, what is missing, and what to do next."""
    lines = [_first_line(answer), ""]
    count = len(answer.used)
    samples = f", {len(answer.samples)} samples" if len(answer.samples) > 1 else ""
    lines.append(f"{count} file{'s' if count != 1 else ''} of {answer.directory}{samples}:")
    lines += [_line(seat) for seat in answer.seats]
    own = {seat.fact().fact for seat in answer.seats if seat.after is not None}
    own |= (
        {answer.diagnosis.proof[0].fact} if answer.verdict == "healthy" and answer.diagnosis.proof else set()
    )
    facts = [fact for fact in answer.diagnosis.proof if fact.fact not in own]
    if facts:
        lines += ["", "because"]
        lines += [f"  {fact.fact}{f' ({fact.evidence})' if fact.evidence else ''}" for fact in facts[:_FACTS]]
        lines += [f"  and {len(facts) - _FACTS} more facts in --json"] if len(facts) > _FACTS else []
    lacks = _lacks(answer.diagnosis)
    if lacks:
        lines += ["", "not known", *(f"  {lack}" for lack in lacks[:_LACKS])]
        lines += [f"  and {len(lacks) - _LACKS} more in --json"] if len(lacks) > _LACKS else []
    if answer.ignored:
        shown = ", ".join(answer.ignored[:_OTHER_FILES])
        rest = len(answer.ignored) - _OTHER_FILES
        lines += ["", f"not read, of no known kind: {shown}{f' and {rest} more' if rest > 0 else ''}"]
    lines += ["", "next", *(f"  {step}" for step in next_steps(answer))]
    return "\n".join(lines)


def next_steps(answer: Answer) -> tuple[str, ...]:
    """What to do, most useful first."""
    if answer.verdict == "not healthy":
        steps = steps_for(answer.diagnosis)
        known = any(seat.after is not None or seat.pid for seat in answer.seats)
        if answer.seats and not known and answer.diagnosis.mechanism not in ("rank-dead", "rank-stopped"):
            return (
                "take the stacks of every rank (above) into the same directory, and diagnose it again",
                *steps[-1:],
            )
        return steps
    if answer.verdict == "healthy":
        return ("nothing, as far as these dumps go",)
    pids = [str(seat.pid) for seat in answer.seats if seat.pid]
    again = f"hangrig watch {' '.join(pids)} --once" if pids else "hangrig watch PID --once"
    return (
        "take what is not known (above) into the same directory, and diagnose it again",
        f"or, on the machine itself: {again}",
    )


def _first_line(answer: Answer) -> str:
    verdict, diagnosis = _VERDICTS[answer.verdict], answer.diagnosis
    if answer.verdict == "healthy":
        said = diagnosis.proof[0].fact if diagnosis.proof else "nothing stands"
        return f"{verdict}: {said}"
    if answer.verdict == "cannot tell":
        lacks = [lack.what for lack in diagnosis.missing_evidence]
        if lacks or not diagnosis.proof:
            return f"{verdict}: needed: {'; '.join(lacks[:3]) or 'more evidence'}"
        return f"{verdict}: these dumps do not decide who holds it up"
    how = f"{diagnosis.kind}, {diagnosis.mechanism}, {diagnosis.confidence}"
    return f"{verdict}: {culprits_words(diagnosis, 'not known')}: {how}"


def _lacks(diagnosis: Diagnosis) -> list[str]:
    """What is missing for one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for lack in diagnosis.missing_evidence:
        by_reason.setdefault(lack.why, []).append(lack.what)
    return [f"{', '.join(what)}: {why}" for why, what in by_reason.items()]


def _line(seat: SeatStacks) -> str:
    doing = seat.doing.words() if seat.after is not None else "no stacks"
    if seat.condition == "dead":
        doing = "gone"
    elif seat.condition == "stopped":
        doing = f"STOPPED; {doing}"
    elif seat.after is not None and seat.doing.left is False:
        doing = f"{doing}, in both samples"
    pid = str(seat.pid) if seat.pid else "-"
    return f"  {seat_words(seat.seat):{_WIDTH}} {pid:>7}  {doing}"


def _process(seat: SeatStacks) -> dict[str, Any]:
    doing = seat.doing if seat.after is not None else None
    return {
        "seat": seat.seat,
        "role": seat.role,
        "pid": seat.pid,
        "state": seat.condition if seat.state_known else "unknown",
        "doing": None if doing is None else doing.words(),
        "left": None if doing is None else doing.left,
        "stacks": seat.stacks_path or None,
    }


def used_files(kinds: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Those that said something."""
    return tuple(
        (path, kind) for path, kind in kinds if kind not in ("unknown", "damaged", "pickle", "own record")
    )
