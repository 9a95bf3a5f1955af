"""A foreign engine as a target of the harness: what SGLang and vLLM have in common on the driver's side.

A launcher on each node (``engine_host.py``) does the work. Everything here asks the launchers and returns soon, or
waits with a deadline: they may be hung, dead, or on a node that is gone.

Not here: an engine's own ways (``sglang.py``, ``vllm.py``), talking to launchers (``engine_launchers.py``).
"""

from __future__ import annotations

import logging
import re
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.target import (
    EngineSpec,
    LaunchSpec,
    Needs,
    OtherProcess,
    Progress,
    RankPool,
    RankProcess,
    RankResult,
    TargetError,
    TrialSpec,
)
from serving import workload as workloads
from serving.model_config import ModelError
from serving.targets.dialect import Dialect, Place
from serving.targets.engine_launchers import Launchers
from serving.targets.engine_model import ModelMissing, find_model
from serving.targets.engine_process import StartError, end_marked, shown
from serving.targets.engine_ready import engine_version

_HOST = "serving.targets.engine_host:EngineHost"
_log = logging.getLogger("hangrig.engine")

_ASK_EVERY_S = 0.1
"""The driver looks far more often than a launcher need be asked."""
_ANSWER_AFTER_S = 0.03
"""Nor is there an answer sooner, and each look for one costs."""
_STATE_EVERY_S = 0.2
_PREPARE_S = 90.0
_ANSWER_S = 60.0
"""For an answer that takes a launcher no time: on a machine that is busy with a start it may. A launcher that died
is known at once."""
_START_SLACK_S = 30.0
"""Over ``target.start_s``, for a launcher to end what did not start and to say why."""
_END_S = 15.0
_LEFT_S = 5.0
_UNKNOWN_VOCABULARY = 1024
_MODEL_FOLDER = Path("$SCRATCH/model")
_PLAIN = re.compile(r"[\w@%+=:,./$-]+")
"""What needs no quotes in a shell; the dollar is our placeholders'."""


class EngineTarget:
    """See `harness.target.Target`. A server lives from ``launch`` to ``stop``, through any number of trials."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._launchers: Launchers | None = None
        self._marks: tuple[str, ...] = ()
        self._since = 0.0
        self._ranks: tuple[RankProcess, ...] = ()
        self._others: tuple[OtherProcess, ...] = ()
        self._progress = Progress()
        self._tokens = 0

    # Before anything starts ------------------------------------------------------------------------------

    def validate(self, spec: EngineSpec, workload: Mapping[str, Any], seeds: Sequence[int]) -> None:
        """Makes the requests and asks the dialect. Whether the engine is installed is seen on its node."""
        try:
            vocab_size = find_model(spec.model, _MODEL_FOLDER).vocab_size
        except ModelMissing:  # perhaps it is on the engine's node; the launcher looks again there
            vocab_size = _UNKNOWN_VOCABULARY
        except ModelError as error:
            raise TargetError(f"model: {error}") from error
        try:
            kind = workloads.workload(workload)
            arrivals = [
                arrival
                for seed in seeds
                for arrival in workloads.generate(kind, seed=seed, vocab_size=vocab_size)
            ]
        except workloads.WorkloadError as error:
            raise TargetError(str(error)) from error
        found = self._dialect.problem(spec, arrivals)
        if found is not None:
            raise TargetError(found)

    def absent(self, spec: EngineSpec) -> str | None:
        """Whether the interpreter of ``target.python`` is one, and the engine is installed there."""
        try:
            engine_version(spec.target["python"] or sys.executable, self._dialect)
        except StartError as error:
            return str(error)
        return None

    def fixed(self, spec: EngineSpec) -> Mapping[str, Any]:
        """A server is told everything by its command, its model and its probe."""
        return {
            "commands": list(self.commands(spec)),
            "model": dict(spec.model),
            "probe": spec.toggles.get("probe", "on"),
            "pinned": spec.toggles.get("pinned"),
            "faults": [dict(fault) for fault in spec.faults],
        }

    def commands(self, spec: EngineSpec) -> Sequence[str]:
        """``$PORT``, ``$HOST`` and ``$SCRATCH`` stand for what is only known at the start."""
        nodes = spec.target["nodes"]
        try:
            model = find_model(spec.model, _MODEL_FOLDER)
            path, dummy = model.path, model.dummy
        except ModelMissing:
            path, dummy = str(spec.model["directory"]), False
        except ModelError as error:
            raise TargetError(f"model: {error}") from error
        lines = []
        for node in range(nodes):
            place = Place(
                node=node,
                nodes=nodes,
                host="127.0.0.1" if nodes == 1 else "$HOST",
                port="$PORT",
                ports=tuple(f"$PORT_{number}" for number in range(1, self._dialect.ports + 1)),
                model=path,
                dummy=dummy,
                folder=_MODEL_FOLDER.parent,
                version=None,
            )
            command = self._dialect.command(spec, place)
            env = [f"{name}={_quoted(value)}" for name, value in shown(command.env).items()]
            lines.append(" ".join([*env, *map(_quoted, command.arguments)]))
        return lines

    def needs(self, spec: EngineSpec) -> Needs:
        nodes = spec.target["nodes"]
        devices = spec.world // nodes if spec.device in ("cuda", "npu") else 0
        return Needs(processes=nodes, devices=devices, role="launcher", spread=nodes > 1)

    # Start -----------------------------------------------------------------------------------------------

    def launch(self, spec: LaunchSpec, pool: RankPool) -> Sequence[RankProcess]:
        """Starts the launchers, has them start the server, and waits until it serves. Raises TargetError or
        ClusterError with nothing of the engine left running."""
        nodes = spec.start.target["nodes"]
        mark = secrets.token_hex(8)
        # One a node: raylets may share a machine, and a launcher is to find its own processes only.
        self._marks, self._since = tuple(f"{mark}-{node}" for node in range(nodes)), time.time()
        dialect = type(self._dialect)
        kwargs = {
            "spec": asdict(spec.start),
            "dialect": f"{dialect.__module__}:{dialect.__qualname__}",
            "nodes": nodes,
            "folder": str(spec.scratch / f"engine-{mark[:8]}"),
        }
        each = [{**kwargs, "node": node, "mark": mark} for node, mark in enumerate(self._marks)]
        launchers = Launchers(pool, pool.start(_HOST, each))
        self._launchers = launchers
        try:
            self._seat(launchers, self._serve(launchers, spec), spec.world)
        except BaseException:
            self.stop(_END_S)
            raise
        return self._ranks

    def _serve(self, launchers: Launchers, spec: LaunchSpec) -> Sequence[Mapping[str, Any]]:
        """What the launchers say of a server that serves. Tries once more where another process took a port."""
        for last in (False, True):
            found = launchers.ask("prepare", (), _PREPARE_S)
            problems = launchers.on_nodes(answer["problem"] for answer in found)
            if problems:
                raise TargetError("; ".join(problems))
            ports, host = found[0]["ports"][1:], found[0]["address"]
            arguments = [
                (own["ports"][0], ports, host, process.node, spec.tracer_pids.get(process.node))
                for own, process in zip(found, launchers.processes, strict=True)
            ]
            launchers.ask_each("launch", arguments, _ANSWER_S)
            states = self._until_ready(launchers, float(spec.start.target["start_s"]) + _START_SLACK_S)
            if all(state["phase"] == "ready" for state in states):
                return states
            if last or not any(state["port_taken"] for state in states):
                break
            launchers.ask("end_server", (), _END_S + _LEFT_S)
        raise TargetError("; ".join(launchers.on_nodes(state["why"] for state in states)))

    def _until_ready(self, launchers: Launchers, deadline_s: float) -> Sequence[Mapping[str, Any]]:
        """The states once all are ready, or one has failed."""
        deadline = time.monotonic() + deadline_s
        while True:
            states = launchers.ask("state", (), _ANSWER_S)
            phases = {state["phase"] for state in states}
            if phases == {"ready"} or "failed" in phases:
                return states
            if time.monotonic() > deadline:
                raise TargetError(f"{self._dialect.name}: no word of its start within {deadline_s:g} s")
            time.sleep(_STATE_EVERY_S)  # the pace of the questions; launchers cannot call back

    def _seat(self, launchers: Launchers, states: Sequence[Mapping[str, Any]], world: int) -> None:
        ranks: dict[int, RankProcess] = {}
        others: dict[str, OtherProcess] = {}
        for launcher, state in zip(launchers.processes, states, strict=True):
            for entry in state["processes"]:
                _place(entry, launcher, ranks, others)
        missing = sorted(set(range(world)) - set(ranks))
        if missing:
            raise TargetError(
                f"{self._dialect.name} serves, but no process was found for ranks {missing}; found: "
                f"{', '.join([*(f'rank {rank}' for rank in sorted(ranks)), *sorted(others)])}"
            )
        self._ranks = tuple(ranks[rank] for rank in sorted(ranks))
        client = launchers.processes[0]
        others["client"] = OtherProcess(
            name="client",
            role="client",
            node=client.node,
            pid=client.pid,
            start_time_ticks=client.start_time_ticks,
            log_path=client.log_path,
            ledger_path=states[0]["ledger"],
            faulthandler_path=client.faulthandler_path,
        )
        self._others = tuple(others.values())

    def processes(self) -> Sequence[RankProcess]:
        return self._ranks

    def others(self) -> Sequence[OtherProcess]:
        return self._others

    # A trial ---------------------------------------------------------------------------------------------

    def drive(self, trial: TrialSpec) -> None:
        self._progress = Progress()
        self._tokens = 0
        table = {
            "seed": trial.seed,
            "workload": dict(trial.workload),
            "client": dict(trial.client),
            "journal": trial.journal_paths.get(0),
        }
        self._running().question("drive", [table])

    def progress(self) -> Progress:
        """What the launchers said last: they are asked ten times a second at most, and not waited for."""
        launchers = self._running()
        waited_s = time.monotonic() - launchers.asked_s
        if launchers.asked and waited_s >= _ANSWER_AFTER_S:
            asked = launchers.asked
            try:
                answers = launchers.answers()
            except TargetError as error:
                self._progress = replace(self._progress, gave_up=self._progress.gave_up or str(error))
                return self._progress
            if answers is not None:
                self._heard(launchers, asked, answers)
        if not launchers.asked and not self._progress.done and waited_s >= _ASK_EVERY_S:
            launchers.question("progress", [self._tokens])
        return self._progress

    def _heard(self, launchers: Launchers, asked: str, answers: Sequence[Mapping[str, Any]]) -> None:
        if asked == "progress" and answers[0]["done"]:
            launchers.question("results", ())
        elif asked == "progress":
            client = answers[0]["client"] or {}
            self._tokens = client.get("tokens", 0)
            failed, died = _failures(answers)
            gave_up = str(client.get("gave_up", ""))
            ended = launchers.on_nodes(answer["server"] for answer in answers)
            if gave_up and ended:
                gave_up += f"; the server ended: {', '.join(ended)}"
            self._progress = Progress(failed=failed, died=died, gave_up=gave_up)
        elif asked == "results":
            self._progress = Progress(done=_results(answers))

    # Afterwards ------------------------------------------------------------------------------------------

    def testimony(self, deadline_s: float) -> Mapping[str, Any]:
        if self._launchers is None:
            return {}
        try:
            return _together(self._launchers.ask("testimony", (), deadline_s))
        except Exception as error:  # evidence is what can be had; whatever it is, it must not cost the trial
            _log.warning("no testimony: %s", error)
            return {}

    def linger(self, deadline_s: float) -> bool:
        """Gone is a server whose first process is gone on every node; launchers that are lost cannot tell."""
        deadline = time.monotonic() + deadline_s
        while self._launchers is not None:
            try:
                if not any(self._launchers.ask("alive", (), _ANSWER_S)):
                    return True
            except TargetError as error:
                _log.warning("%s", error)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_STATE_EVERY_S)  # as in ``_until_ready``
        return True

    def stop(self, deadline_s: float) -> None:
        """Has every launcher end its part of the server; then looks on this machine for what carries the mark, for
        launchers that are hung or dead. What would not die is logged."""
        launchers, self._launchers = self._launchers, None
        self._ranks, self._others, self._progress = (), (), Progress()
        if launchers is None:
            return
        try:
            left = launchers.ask("stop", (deadline_s,), deadline_s + _LEFT_S)
            for words in launchers.on_nodes("; ".join(entry) for entry in left):
                _log.error("would not die: %s", words)
        except TargetError as error:
            _log.warning("%s", error)
        for mark in self._marks:
            for process in end_marked(mark, self._since, time.monotonic() + _LEFT_S):
                _log.error("would not die: %d (%s) %s", process.id.pid, process.state, process.title)

    def _running(self) -> Launchers:
        if self._launchers is None:
            raise TargetError(f"{self._dialect.name} is not running; call launch first")
        return self._launchers


def _place(
    entry: Mapping[str, Any],
    launcher: RankProcess,
    ranks: dict[int, RankProcess],
    others: dict[str, OtherProcess],
) -> None:
    """Puts one process where it belongs; a second one of a name gets its node's number behind it."""
    seat = entry["seat"]
    common = {
        "role": entry["role"],
        "node": launcher.node,
        "pid": entry["pid"],
        "start_time_ticks": entry["start_time_ticks"],
        "log_path": entry.get("log_path"),
        "ledger_path": entry.get("ledger_path"),
        "faulthandler_path": entry.get("faulthandler_path"),
    }
    if isinstance(seat, int):
        decisions = entry.get("decisions_path")
        ranks[seat] = RankProcess(rank=seat, device=entry["device"], decisions_path=decisions, **common)
    else:
        name = seat if seat not in others else f"{seat}-{launcher.rank}"
        others[name] = OtherProcess(name=name, **common)


def _failures(answers: Sequence[Mapping[str, Any]]) -> tuple[dict[int, str], list[int]]:
    """Ranks that raised or died, with what is known of why; and those that died."""
    failed: dict[int, str] = {}
    died: list[int] = []
    for answer in answers:
        failed |= {int(seat): text for seat, text in answer["exceptions"].items() if seat.isdecimal()}
        for death in answer["deaths"]:
            if isinstance(death["seat"], int):
                failed.setdefault(death["seat"], death["words"])
                died.append(death["seat"])
    return failed, died


def _results(answers: Sequence[Mapping[str, Any]]) -> dict[int, RankResult]:
    """One a rank; the steps of each from its own node."""
    steps = {int(rank): both for answer in answers for rank, both in answer["steps"].items()}
    results = {}
    for fields in answers[0]["ranks"]:
        result = RankResult(**fields)
        own, decode = steps.get(result.rank, (result.steps, result.decode_steps))
        results[result.rank] = replace(result, steps=own, decode_steps=decode)
    return results


def _together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One testimony of all nodes'; what only the first node can know is the first node's."""
    whole = dict(parts[0])
    for part in parts[1:]:
        whole["said"] = sorted([*whole["said"], *part["said"]], key=lambda line: line["at_s"])
        whole["deaths"] = sorted([*whole["deaths"], *part["deaths"]], key=lambda death: death["at_s"])
        whole["faults"] = [*whole["faults"], *part["faults"]]
        whole["exceptions"] = {**whole["exceptions"], **part["exceptions"]}
        whole["log"] = [*whole["log"], *part["log"]]
        processes = [*whole["probe"]["processes"], *part["probe"]["processes"]]
        whole["probe"] = {**whole["probe"], "processes": processes}
    whole["faults"] = [_made(fault, whole["probe"]["processes"]) for fault in whole["faults"]]
    return whole


def _made(fault: Mapping[str, Any], statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A fault that the launcher found due, as the probe that made it says: where, and what it did."""
    for status in statuses:
        for made in status.get("faults", ()):
            if fault["seat"] is None and made.get("index") == fault["index"]:
                what = f"{made.get('what')}, in step {made.get('step')}"
                return {**fault, "seat": status.get("seat"), "what": what}
    return dict(fault)


def _quoted(word: str) -> str:
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)
