"""What a foreign engine itself said of a trial, and how the probe in it fared, from ``evidence/engine.json``.

Here: reading, and sentences for every sink. Not here: who wrote it (a target) and any judgement: what an engine
says of its own hang is shown beside the diagnosis, for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

from reports import fields
from reports.fields import Document
from reports.words import count, listing, seconds

PROBLEMS_SHOWN = 12
_WELL = "answered 200"


@dataclass(frozen=True, slots=True)
class Said:
    """One word of the engine. ``at_s``: since the workload began. ``source``: log, health or watchdog."""

    at_s: float | None
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class EngineVoice:
    """``probe_problems``: hooks that failed or were not there. ``bypass``: places that pin or copy without asking
    the platform, so that the toggle ``pinned`` does not reach them."""

    engine: str
    command: str
    said: tuple[Said, ...]
    deaths: tuple[str, ...]
    faults: tuple[str, ...]
    probe_on: bool
    probe_problems: tuple[str, ...]
    bypass: tuple[str, ...]
    pin_callers: tuple[str, ...]

    def first_after(self, moment_s: float | None) -> Said | None:
        """Its first word of trouble after the last progress, or at all where that is not known."""
        words = (one for one in self.said if not (one.source == "health" and _WELL in one.text))
        return next((one for one in words if (one.at_s or 0.0) >= (moment_s or 0.0)), None)

    def sentence(self, last_progress_s: float | None, captured_s: float | None) -> str:
        """When the engine noticed, against when hangrig had its evidence."""
        first = self.first_after(last_progress_s)
        ours = ""
        if captured_s is not None and last_progress_s is not None:
            ours = f"; hangrig had its evidence after {seconds(captured_s - last_progress_s)}"
        if first is None or first.at_s is None:
            return f"{self.engine} itself said nothing of it until it was ended{ours}"
        after = seconds(max(0.0, first.at_s - (last_progress_s or 0.0)))
        since = "after the last progress" if last_progress_s is not None else "after the start"
        return f"{self.engine} itself first said, {after} {since} ({first.source}): {first.text}{ours}"


def read_engine(document: Document) -> EngineVoice:
    probe = fields.table(document, "probe")
    processes = fields.rows(probe, "processes")
    sites = dict.fromkeys(site for process in processes for site in fields.texts(process, "bypass"))
    return EngineVoice(
        engine=fields.text(document, "engine", "the engine"),
        command=fields.text(document, "command"),
        said=tuple(
            Said(fields.number(row, "at_s"), fields.text(row, "source", "log"), fields.text(row, "text"))
            for row in fields.rows(document, "said")
        ),
        deaths=tuple(
            f"{_seat(row)} ended at {seconds(fields.number(row, 'at_s'))}"
            for row in fields.rows(document, "deaths")
        ),
        faults=tuple(
            f"{fields.text(row, 'name', '?')} in {_seat(row)} at {seconds(fields.number(row, 'at_s'))}"
            + (f": {fields.text(row, 'what')}" if fields.text(row, "what") else "")
            for row in fields.rows(document, "faults")
        ),
        probe_on=fields.flag(probe, "on"),
        probe_problems=tuple(line for process in processes for line in _problems(process)),
        bypass=tuple(sites),
        pin_callers=tuple(
            dict.fromkeys(
                site
                for process in processes
                for site in fields.table(fields.table(process, "pinned"), "answers")
            )
        ),
    )


def _seat(row: Document) -> str:
    seat = row.get("seat")
    return f"rank {seat}" if isinstance(seat, int) and not isinstance(seat, bool) else str(seat or "?")


def _problems(process: Document) -> list[str]:
    where = _seat(process)
    hooks = fields.table(process, "hooks")
    lacking = [f"{where}: hook {name} is {state}" for name, state in hooks.items() if _off(state)]
    return [*lacking, *(f"{where}: {text}" for text in fields.texts(process, "errors"))]


def _off(state: object) -> bool:
    return isinstance(state, str) and state.startswith(("missing", "off", "failed"))


def notes(voices: list[EngineVoice]) -> list[str]:
    """What a reader must know of the probe over all trials: where it failed, and what it does not reach."""
    lines = []
    problems = list(dict.fromkeys(line for voice in voices for line in voice.probe_problems))
    if problems:
        more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        lines.append(f"the probe failed in part: {'; '.join(problems[:PROBLEMS_SHOWN])}{more}")
    sites = bypassing(voices)
    if sites:
        lines.append(
            f"{count(len(sites), 'place')} in the engine may pin or copy without asking the platform, so that the "
            f"toggle pinned does not reach them: {listing(sites)}"
        )
    return lines


def bypassing(voices: list[EngineVoice]) -> list[str]:
    """The places that do not ask whether memory may be pinned, over all trials."""
    return list(dict.fromkeys(site for voice in voices for site in voice.bypass))
