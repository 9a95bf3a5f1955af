"""A run in progress: cluster and agents up, one trial after the other, everything down again.

Order within a trial: ranks up, reference (once a scenario and seed), the trial, history onto the disk, hung ranks
ended, judged. The first Ctrl-C ends the trial at hand with a capture, the second one at once; either way what
was started is ended and what is known is stored.

Not here: which trials a run has and its reports (``run.py``), the states of a trial (``controller.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from harness.agent_links import AgentOptions
from harness.agents import Agents
from harness.arms import TrialPlan
from harness.cluster import Cluster, ClusterError, ClusterOptions, ExistingCluster, LocalCluster
from harness.controller import NEVER_BEGAN, Ended, Limits, Planned, State, TrialRun, history, latencies
from harness.device_idle import IdleDevices, look
from harness.device_tools import TOOL
from harness.interrupts import Interrupts
from harness.judge import HISTORY, journal_tokens, judge
from harness.launch_plan import engine_spec
from harness.live import LiveView
from harness.process_control import ProcessId
from harness.rank_environment import Patience, RankEnvironment, environment_record
from harness.ranks import Ranks
from harness.renewal import LostGroundError, renewable
from harness.request import RunRequest
from harness.scenario_model import Scenario
from harness.sequential import Sequential
from harness.store import RunStore, TrialStore, write_json
from harness.target import RankProcess, TargetError
from harness.time_budget import TimeBudget, rounds
from harness.toggles import gather_facts
from harness.trial_spec import (
    context,
    is_foreign,
    one_line,
    output_tokens,
    reference_path,
    title,
    trial_spec,
    watchdog_settings,
)
from harness.watching import AgentWatch

_START_S = 90.0
"""Cluster, agents and couriers up."""
_RANKS_S = 120.0
"""All ranks up, weights made."""
_RANKS_ON_DEVICE_S = 900.0
"""The same on an accelerator, where they may be read: 31 GB of them at 50 MB/s take 10 minutes."""
_AFTER_BUDGET_S = 2 * 3600.0
"""For the last trial of a time budget and for the end: an agent that outlives its time ends everything."""
_END_S = 15.0
_IDLE_S = 30.0
"""Until a device has back what ended ranks held of it: drivers take seconds over 60 GiB."""
_POLL_S = 0.02
_LINGER_S = 0.5
_TESTIMONY_S = 10.0
_CAPTURE_SLACK_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """One scenario's trials of this run."""

    scenario: Scenario
    trials: Sequence[TrialPlan]


@dataclass(slots=True)
class Session:
    """Runs jobs into a store."""

    request: RunRequest
    store: RunStore
    simulation: bool
    interrupts: Interrupts = field(default_factory=Interrupts)
    view: LiveView | None = None
    """Shows the trials; one of the session's own where none is given."""
    stopping: Sequential | None = None
    """Ends the run when its questions are settled."""
    _references: set[Path] = field(default_factory=set)
    _dirty: str | None = None
    idle: IdleDevices | None = None
    """Of this machine's devices; made for a run on accelerators here where none is given."""
    _busy: bool = False
    """The devices were not back to idle when somebody looked last."""
    _devices: int = 0
    """Accelerators that the ranks of any job need."""
    _shared: dict[tuple[str, int], int] = field(default_factory=dict)
    """Ranks that share a device, by target and number of ranks."""
    _environments: dict[str, dict[int, RankEnvironment]] = field(default_factory=dict)
    """Of the newest ranks of each target."""

    def run(self, jobs: Sequence[Job]) -> tuple[str, ...]:
        """Returns the ids of the trials that the time budget or the stopping rule left out. Raises ClusterError
        when nothing could be started."""
        total = sum(len(job.trials) for job in jobs)
        view = self.view or LiveView(total)
        budget = TimeBudget(self.request.time_budget_s)
        world = max(job.scenario.target.ranks for job in jobs)
        compared = [_compared(job) for job in jobs]
        left_out: list[str] = []
        self._devices = max(-(-job.scenario.target.ranks // self._sharing(job.scenario)) for job in jobs)
        self._look_at_devices(view)
        standing = renewable(lambda: self._up(world, view), lambda up: up[1].broken(), view.line)
        with self.interrupts.held(), standing as whole:
            for trials in rounds([job.trials for job in jobs], whole=self.whole_rounds):
                # A later round would give some arms two trials more than others.
                full = bool(left_out) or (self.stopping is not None and self.stopping.over)
                for place, plan in trials:
                    if self.interrupts.count:
                        view.line("stopped early: the remaining trials were not run")
                        return ()
                    if full or not budget.fits(plan):
                        left_out.append(plan.id)
                        continue
                    scenario, started_s = jobs[place].scenario, time.monotonic()
                    outcome, begun = "unknown", False
                    while not begun:
                        agents, ranks = whole()
                        with contextlib.suppress(LostGroundError):  # raised so often, ``whole`` gives up
                            outcome = self._trial(
                                scenario, plan, agents, ranks, view, compared=plan.seed in compared[place]
                            )
                            begun = True
                    if self.stopping is not None:
                        self.stopping.observe(plan, outcome)
                    budget.took(plan, time.monotonic() - started_s)
        if left_out:
            why = "the time budget is used up"
            if self.stopping is not None and self.stopping.over:
                why = "more trials would settle nothing"
            view.line(f"{why}: {len(left_out)} of {total} planned trials were not run")
        return tuple(left_out)

    @property
    def whole_rounds(self) -> bool:
        """A run that may end early gives all arms the same number of trials."""
        return self.request.time_budget_s is not None or self.stopping is not None

    # Up and down -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _up(self, world: int, view: LiveView) -> Iterator[tuple[Agents, Ranks]]:
        address = self.request.ray_address
        cluster: Cluster
        if address is None:
            device = self.request.device
            gpus, npus = self._devices * (device == "cuda"), self._devices * (device == "npu")
            cluster = LocalCluster(ClusterOptions(workers=world, gpus=gpus, npus=npus))
            scratch = cluster.folder / "ranks"  # the agent of a killed driver removes it with the cluster
        else:
            cluster = ExistingCluster(address)
            scratch = Path(tempfile.mkdtemp(prefix="hg-ranks-"))
        start_s = _RANKS_S if self.request.device in ("sim", "cpu") else _RANKS_ON_DEVICE_S
        agents = Agents(self._agent_options())
        self.interrupts.ending = False
        left: list[ProcessId] = []
        # Last in, first out; what one of them raises does not keep the others from being ended. The agents go
        # last but one: should the driver die in here, they end the rest.
        with contextlib.ExitStack() as down:
            down.callback(shutil.rmtree, scratch, ignore_errors=True)
            view.line("starting Ray and the agents")
            agents.start(cluster, _START_S)
            down.callback(lambda: left.extend(cluster.stop(_END_S)))
            down.callback(lambda: left.extend(agents.stop(_END_S)))
            ranks = Ranks(cluster, agents, scratch, start_s=start_s, patience=self._patience())
            down.callback(lambda: left.extend(ranks.discard(_END_S)))
            down.callback(view.close)
            try:
                yield agents, ranks
            finally:
                self.interrupts.ending = True
        if left:
            view.line(f"processes that would not die: {', '.join(str(entry.pid) for entry in left)}")

    def wait_s(self, scenario: Scenario) -> float:
        """Deadline of the engine's own waits. Ranks that are held for a debugger must still stand where they
        hung when it comes."""
        return scenario.engine.step_timeout_s + self._held_s()

    def _ensure(self, scenario: Scenario, plan: TrialPlan, ranks: Ranks) -> Sequence[RankProcess]:
        spec = engine_spec(scenario, plan.device, plan.toggles, self._sharing(scenario))
        processes = ranks.ensure(scenario.target.name, spec, self.wait_s(scenario))
        if self.idle is not None:
            self.idle.hold({entry.rank: entry.device for entry in processes})
        return processes

    def _look_at_devices(self, view: LiveView) -> None:
        """Before anything of ours is up."""
        if self.idle is None and self.request.device in TOOL and self.request.ray_address is None:
            self.idle = IdleDevices(partial(look, self.request.device))
        if self.idle is not None:
            self.idle.begin()
            if self.idle.unknown:
                view.line(f"whether devices are back to idle cannot be told: {self.idle.unknown}")

    def _need_idle_devices(self) -> None:
        """Before a trial that follows one whose ranks were replaced. Raises ClusterError; the next trial looks
        again."""
        if self._busy and self.idle is not None:
            why = self.idle.busy()
            self._busy = why is not None
            if why is not None:
                raise ClusterError(f"the devices are not back to idle after an earlier trial: {why}")

    def _devices_after(self, view: LiveView) -> None:
        """After ranks were ended: waits for what they held."""
        if self.idle is None:
            return
        why = self.idle.wait(0.0 if self._busy else _IDLE_S)
        self._busy = why is not None
        if why is not None:
            view.line(f"the devices are not back to idle: {why}")

    def _patience(self) -> Patience:
        """What the accelerators' libraries must wait for, whichever scenario meets the warm ranks."""
        watchdogs = [scenario.watchdog for scenario in self.request.scenarios]
        held_s = self._held_s()
        return Patience(
            hang_s=max(watchdog.longest_s() for watchdog in watchdogs) + held_s,
            trial_s=max(watchdog.trial_s() for watchdog in watchdogs) + held_s,
        )

    def _held_s(self) -> float:
        """For how long hung ranks are kept for a debugger."""
        if self.request.on_hang != "hold":
            return 0.0
        return self.request.hold_s or AgentOptions().lifetime_s

    def _agent_options(self) -> AgentOptions:
        capture_s = max(scenario.watchdog.capture_s for scenario in self.request.scenarios)
        lifetime_s = max(AgentOptions().lifetime_s, (self.request.time_budget_s or 0.0) + _AFTER_BUDGET_S)
        return AgentOptions(capture_s=capture_s, lifetime_s=lifetime_s, run=self.store.path)

    def _sharing(self, scenario: Scenario) -> int:
        """How many ranks share a device of this machine, at most."""
        key = (scenario.target.name, scenario.target.ranks)
        if key not in self._shared:
            facts = gather_facts(self.request.device, scenario.target.ranks, scenario.target.name)
            self._shared[key] = facts.ranks_per_device
        return self._shared[key]

    # One trial -------------------------------------------------------------------------------------------

    def _trial(
        self,
        scenario: Scenario,
        plan: TrialPlan,
        agents: Agents,
        ranks: Ranks,
        view: LiveView,
        *,
        compared: bool,
    ) -> str:
        """Its outcome. ``compared``: tokens of this seed are held against those of an undisturbed trial."""
        store = self.store.trial(plan.id)
        reference = reference_path(self.store.path, scenario.name, plan.seed)
        facts: dict[str, Any]
        begun = False
        try:
            self._need_idle_devices()
            processes = self._ensure(scenario, plan, ranks)
            if compared and reference not in self._references:
                self._reference(scenario, plan, reference, agents, ranks, view)
                processes = () if self.interrupts.count else self._ensure(scenario, plan, ranks)
            if processes:
                begun = True
                self._record_environment(scenario, plan, store, ranks, view)
                ended = self._drive(scenario, plan, store, agents, ranks, processes, view)
                facts = history(ended, processes, ranks.target.others())
                facts["notes"] += self._sharing_notes(scenario)
                self._store_results(store, ended)
                self._hear(scenario, store, ended, ranks, view)
                if ended.finished and is_foreign(scenario):
                    self._keep_as_reference(reference, plan, ended)
            else:  # nobody waits for more ranks who interrupts a reference
                ended, facts = NEVER_BEGAN, {}
                view.never_began(title(plan))
        except (ClusterError, TargetError, RayError) as error:
            if not begun and not self.interrupts.count and (why := ranks.broken()) is not None:
                ranks.discard(_END_S)
                raise LostGroundError(f"{why}: {error}") from error
            ended = NEVER_BEGAN
            lost = "the ranks were lost" if begun else "the ranks could not be started"
            facts = {"unknown": f"{lost}: {error}"}
            view.never_began(title(plan))
        if self._dirty is not None:
            facts["unknown"] = self._dirty
        elif self.interrupts.count and not ended.finished:
            facts["unknown"] = "interrupted"
        elif ended.reason and not ended.captured and not ended.finished:
            facts["unknown"] = ended.reason
        write_json(store.path / HISTORY, facts)
        if ended.captured:
            self._hold(facts, view)
        # A fault happens once in a process: where it was not met, the next trial needs another.
        if not ended.finished or facts.get("leaks") or (scenario.faults and is_foreign(scenario)):
            left = ranks.discard(_END_S)
            pids = ", ".join(str(entry.pid) for entry in left)
            self._dirty = f"processes {pids} of an earlier trial would not die" if left else None
            self._devices_after(view)
        document = judge(
            store, context(plan.to_json(), scenario, self.store.path, self.simulation), reference
        )
        store.event("judged", outcome=document["outcome"], verdict=document["verdict"])
        view.judged(store.path)
        view.end(one_line(document))
        outcome: str = document["outcome"]
        return outcome

    def _sharing_notes(self, scenario: Scenario) -> list[str]:
        count = self._sharing(scenario)
        if count == 1:
            return []
        how = "gloo carries their data through the host, so no latency of this trial is a result"
        return [f"{count} ranks share a device: {how}"]

    def _drive(
        self,
        scenario: Scenario,
        plan: TrialPlan,
        store: TrialStore,
        agents: Agents,
        ranks: Ranks,
        processes: Sequence[RankProcess],
        view: LiveView,
        *,
        reference: bool = False,
    ) -> Ended:
        spec = trial_spec(scenario, plan, store, processes, self.wait_s(scenario), reference=reference)
        spec = dataclasses.replace(spec, fault_files=[str(path) for path in self.request.fault_files])
        warm = ranks.trials > 0
        watch = AgentWatch(
            agents, watchdog_settings(scenario, warm=warm), store.evidence, ranks.written(plan.device)
        )
        limits = Limits(
            trial_s=scenario.watchdog.trial_timeout_s,
            capture_s=2 * scenario.watchdog.capture_s + _CAPTURE_SLACK_S,
        )
        shown = title(plan)
        ledgers = {rank: Path(path) for rank, path in spec.ledger_paths.items()}
        ledgers |= {r.rank: Path(r.ledger_path) for r in processes if r.ledger_path is not None}
        view.begin(f"{shown} (reference)" if reference else shown, ledgers, counts=not reference)
        store.event("started", ranks=[entry.pid for entry in processes], warm=warm)
        trial = TrialRun(spec, ranks.target, watch, limits, processes)
        state: State = Planned()
        try:
            while not isinstance(state, Ended):
                before = type(state)
                state = trial.step(state)
                if type(state) is not before:
                    store.event("state", state=type(state).__name__.lower())
                if self.interrupts.count:
                    state = trial.capture(state, "interrupted")
                view.update(getattr(state, "suspect", None))
                time.sleep(_POLL_S)  # the loop's pace; every state above has a deadline
        except KeyboardInterrupt:
            state = trial.give_up(state, "interrupted twice")
        ranks.trials += 1
        return state

    def _reference(
        self,
        scenario: Scenario,
        plan: TrialPlan,
        path: Path,
        agents: Agents,
        ranks: Ranks,
        view: LiveView,
    ) -> None:
        """Runs the scenario's requests of this seed undisturbed and stores their tokens."""
        self._references.add(path)
        folder = path.with_suffix("")
        for name in ("ledger", "decisions", "evidence"):
            (folder / name).mkdir(parents=True)
        store = TrialStore(f"reference.{path.stem}", folder, self.store.path / "reference.jsonl")
        processes = self._ensure(scenario, plan, ranks)
        ended = self._drive(scenario, plan, store, agents, ranks, processes, view, reference=True)
        write_json(folder / HISTORY, history(ended, processes))
        if ended.finished:
            write_json(path, {"requests": output_tokens(ended)})
            view.end("done")
            shutil.rmtree(folder)
            return
        failed = "; ".join(text.splitlines()[-1] for text in ended.progress.failed.values())
        why = ended.reason or failed or "it hung"
        if ranks.broken() is None:
            write_json(path, {"why": f"the reference did not finish: {why}"})
        else:  # it says nothing about the requests: the next trial of this seed tries it again
            self._references.discard(path)
            shutil.rmtree(folder)
        ranks.discard(_END_S)
        self._devices_after(view)
        view.end(f"did not finish: {why}")

    def _record_environment(
        self, scenario: Scenario, plan: TrialPlan, store: TrialStore, ranks: Ranks, view: LiveView
    ) -> None:
        """Nothing on devices without libraries that read one."""
        if not ranks.environments:
            return
        record = environment_record(plan.device, ranks.environments)
        write_json(store.evidence / "rank_environment.json", record)
        name = scenario.target.name
        if self._environments.get(name) != ranks.environments:
            self._environments[name] = dict(ranks.environments)
            known = self.store.document.get("rank_environments", {})
            self.store.remember(rank_environments={**known, name: record})
            for trap in dict.fromkeys(t for one in ranks.environments.values() for t in one.traps):
                view.line(f"environment: {trap.words}; {trap.mend}")

    def _keep_as_reference(self, path: Path, plan: TrialPlan, ended: Ended) -> None:
        """The first finished trial of a seed is what the other arms' tokens are held against: another start of a
        real engine, only to be undisturbed, would cost more than the trial."""
        if path not in self._references:
            self._references.add(path)
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"requests": output_tokens(ended), "of": plan.id})

    def _hear(
        self, scenario: Scenario, store: TrialStore, ended: Ended, ranks: Ranks, view: LiveView
    ) -> None:
        """What the engine itself says of the trial, after its own watchdog had its time where that was asked."""
        target = scenario.target
        if ended.captured and target.after_capture == "let":
            view.line(f"captured; waiting up to {target.let_s:g} s for what the engine does by itself")
            deadline = time.monotonic() + target.let_s
            while time.monotonic() < deadline and not self.interrupts.count:
                if ranks.target.linger(_LINGER_S):
                    break
        said = ranks.target.testimony(_TESTIMONY_S)
        if said:
            write_json(store.evidence / "engine.json", said)

    def _store_results(self, store: TrialStore, ended: Ended) -> None:
        done = ended.progress.done
        if done:
            store.write_latency(latencies(done))
        if ended.finished:
            store.write_tokens(output_tokens(ended))
        else:
            store.write_tokens(journal_tokens(store.path))

    def _hold(self, facts: Mapping[str, Any], view: LiveView) -> None:
        """Keeps hung ranks for a debugger, if that was asked."""
        if self.request.on_hang != "hold":
            return
        pids = ", ".join(f"rank {entry['rank']} pid {entry['pid']}" for entry in facts["ranks"])
        hold_s = self.request.hold_s
        until = "until Ctrl-C" if hold_s is None else f"for {hold_s:g} s, or until Ctrl-C"
        view.line(f"held {until}: {pids}")
        deadline = time.monotonic() + (hold_s if hold_s is not None else float("inf"))
        while time.monotonic() < deadline and not self.interrupts.count:
            time.sleep(_POLL_S)


def _compared(job: Job) -> set[int]:
    """Seeds whose tokens are held against those of an undisturbed trial: those with a trial that may not have any
    tokens. A foreign engine has no undisturbed one of its own."""
    if is_foreign(job.scenario):
        return set()
    return {plan.seed for plan in job.trials if plan.expectation.tokens != "any"}
