"""One litmus run: stress tuned for each family, then every program shot, then judged.

Programs come one after the other, those of one rank first. The controls of a program are run with it whether or not
they were asked for: without them its silence says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.device_facts import accelerators
from harness.litmus.bench import Stress
from harness.litmus.catalogue import PROGRAMS
from harness.litmus.crew import COMMAND, Crew, CrewError, Order
from harness.litmus.judge import Counted, Judged, exit_status, judge, watched
from harness.litmus.program import Program
from harness.litmus.request import ChildRequest, LitmusRequest, chosen_names
from harness.litmus.rules import RULES
from harness.litmus.tuning import TABLES, DeviceTable, Tried, chosen

Tell = Callable[[str], None]

TUNED_BY: Mapping[str, str] = {
    "copies": "copy-race",
    "barriers": "barrier-pinned",
    "reuse": "reuse-pinned",
    "readback": "readback-early",
    "graphs": "graph-unfenced",
    "groups": "group-reversed",
}
"""The control whose sightings choose a family's stress."""
_BACKENDS = {"cuda": "nccl", "npu": "hccl"}


@dataclass(frozen=True, slots=True)
class Tuned:
    """The stress of one family, and all that was tried for it."""

    control: str
    choice: Tried
    tried: tuple[Tried, ...]

    @property
    def words(self) -> str:
        choice = self.choice
        return (
            f"stress of {PROGRAMS[self.control].family}: a stream is kept busy for about "
            f"{choice.stress.delay_us:g} µs, copies of {choice.stress.nbytes} bytes; {self.control} was seen "
            f"{choice.seen} of {choice.shots} times"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "control": self.control,
            **self.choice.to_json(),
            "tried": [one.to_json() for one in self.tried],
        }


@dataclass(frozen=True, slots=True)
class Findings:
    """``platform``: what the processes said of the device and its software."""

    request: LitmusRequest
    lines: tuple[Judged, ...]
    tuned: Mapping[str, Tuned]
    platform: Mapping[str, Any]

    @property
    def exit(self) -> int:
        return exit_status(self.lines)


def programs_for(request: LitmusRequest) -> tuple[type[Program], ...]:
    """What ``request`` asks for, with the controls that give it power. Raises LitmusError for unknown names."""
    here = {name: program for name, program in PROGRAMS.items() if request.device in program.devices}
    asked = chosen_names(request.only, list(here))
    needed = {control for name in asked for control in RULES[name].shown_by}
    needed |= {TUNED_BY[here[name].family] for name in asked}
    return tuple(program for name, program in here.items() if name in asked or name in needed)


def run_session(
    request: LitmusRequest,
    logs: Path,
    tell: Tell,
    *,
    command: Sequence[str] = COMMAND,
    table: DeviceTable | None = None,
) -> Findings:
    """``logs``: a folder for what the processes print. Where no process can be started, or no further one, the
    programs that were left are unknown and say why."""
    wanted = programs_for(request)
    table = table or TABLES[request.device]
    counted: dict[str, Counted] = {}
    tuned: dict[str, Tuned] = {}
    platform: dict[str, Any] = {}
    for ranks in sorted({program.ranks for program in wanted}):
        theirs = [program for program in wanted if program.ranks == ranks]
        counted |= {program.name: Counted(asked=request.iterations) for program in theirs}
        child = place(request, ranks, table.deadline_s)
        if isinstance(child, str):
            for program in theirs:
                counted[program.name].skipped = child
            continue
        if ranks > 1:
            platform["backend"] = child.backend
            platform["shared"] = child.shared
        left = list(theirs)
        with Crew(child, logs, table.start_s, command) as crew:
            try:
                for program in theirs:
                    if program.family not in tuned:
                        tuned[program.family] = _tune(crew, program.family, request, table)
                        tell(tuned[program.family].words)
                    stress = tuned[program.family].choice.stress
                    _count(crew, program, stress, counted[program.name], table)
                    tell(f"{program.name}: {_outcomes(counted[program.name])}")
                    left.remove(program)
            except CrewError as error:
                tell(str(error))
                for program in left:
                    counted[program.name].errors.append(str(error))
            platform |= crew.facts
    lines = judge({program.name: program for program in wanted}, counted, request.memory_model)
    return Findings(request, lines, tuned, platform)


def place(request: LitmusRequest, ranks: int, deadline_s: float) -> ChildRequest | str:
    """What each of ``ranks`` processes is asked, or why so many cannot be placed on this machine.

    Two ranks get a device each and the platform's backend. On one GPU they share it over gloo, since NCCL refuses;
    on one NPU there is nothing that would carry device tensors between them.
    """
    child = ChildRequest(
        request.device, request.memory_model, request.defects, request.seed, deadline_s, ranks=ranks
    )
    if request.device == "sim" or ranks == 1:
        return child
    if accelerators(request.device, ranks).count >= ranks:
        return replace(child, backend=_BACKENDS[request.device])
    if request.device == "cuda":
        return replace(child, shared=True)
    return f"{ranks} ranks need a device each, and HCCL refuses to share one"


def _tune(crew: Crew, family: str, request: LitmusRequest, table: DeviceTable) -> Tuned:
    control = TUNED_BY[family]
    program = PROGRAMS[control]
    signs = watched(program, RULES[control].by_model[request.memory_model])
    tried = []
    # Two ranks cross their collectives by the order of their calls, not in a window that a delay could widen.
    candidates = table.candidates() if program.ranks == 1 else table.candidates()[-1:]
    for stress in candidates:
        order = Order(control, "tune", stress, table.shots, table.budget_s)
        shots = list(crew.shoot(order))
        tried.append(Tried(stress, sum(shot.outcome in signs for shot in shots), len(shots)))
    return Tuned(control, chosen(tried), tuple(tried))


def _count(crew: Crew, program: type[Program], stress: Stress, counted: Counted, table: DeviceTable) -> None:
    order = Order(program.name, "run", stress, counted.asked, table.budget_of(counted.asked))
    for shot in crew.shoot(order):
        counted.add(shot.outcome, shot.why)
    done = sum(counted.outcomes.values())
    if done < counted.asked:
        counted.ended = f"{done} of {counted.asked} shots: its time was used up, or it stopped too often"


def _outcomes(counted: Counted) -> str:
    return ", ".join(f"{outcome} {count}" for outcome, count in sorted(counted.outcomes.items())) or "nothing"
