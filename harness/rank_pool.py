"""The rank processes: one detached Ray actor a rank, started, called, looked at and ended.

Detached, because ranks outlive a killed driver until the agent has their stacks. A rank runs the caller's
class, given as ``"package.module:Class"``: the harness knows no engine. Its constructor and methods run on
the main thread of the process, one at a time. Ending goes by pid and start time where the process is on
this machine: ``ray.kill`` takes 5 s for a stopped one (tried, Ray 2.60).

Not here: clusters (``cluster.py``), who watches the ranks (``agents.py``).
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from harness import process_control, tracing
from harness.cluster import Cluster, ClusterError, Node, nodes
from harness.held_devices import SEE_ALL, write_held
from harness.process_control import ProcessId
from harness.rank_environment import Patience, RankEnvironment, rank_environment
from harness.target import RankProcess

DeviceKind: TypeAlias = Literal["sim", "cpu", "cuda", "npu"]

_SIM_CPUS = 0.01
"""A rank of the simulation reserves next to nothing: how many fit is the user's affair."""
_RESERVE_S = 30.0
_ASCEND_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_RESERVED: Mapping[str, Mapping[str, float]] = {
    "sim": {"CPU": _SIM_CPUS},
    "cpu": {"CPU": _SIM_CPUS},
    "cuda": {"CPU": _SIM_CPUS, "GPU": 1},
    "npu": {"CPU": _SIM_CPUS, "NPU": 1},
}


_RESOURCES: Mapping[str, str] = {"cuda": "GPU", "npu": "NPU"}


def _accelerator_ids() -> dict[str, list[str]]:
    """What Ray gave this process, by resource."""
    given = ray.get_runtime_context().get_accelerator_ids()
    return {name: sorted(ids, key=_natural) for name, ids in given.items()}


class RankHost:
    """What runs in the worker: the caller's object, behind a constructor that cannot fail."""

    def __init__(self) -> None:
        seen = os.environ.get(_ASCEND_VISIBLE)
        if seen is not None:  # before anything of CANN is loaded
            os.environ[_ASCEND_VISIBLE] = ascending(seen)

    def identity(self) -> dict[str, Any]:
        """Known before the caller's class is even imported, so that a constructor that hangs has a pid."""
        own = process_control.myself()
        context = ray.get_runtime_context()
        return {
            "pid": own.pid,
            "start_time_ticks": own.start_time_ticks,
            "node_id": context.get_node_id(),
            "accelerators": _accelerator_ids(),
            # Ray redirects both streams into files of the session; the links name them.
            "log_path": str(Path("/proc/self/fd/2").readlink()),
            "output_path": str(Path("/proc/self/fd/1").readlink()),
        }

    def prepare(
        self, device: str, folder: str, patience: Patience, theirs: Mapping[str, str]
    ) -> RankEnvironment:
        """Sets what the libraries of an accelerator read when they are loaded, which nobody has done yet. Decided
        here, because only this process knows what its node's environment has. ``theirs``: of the engine that it
        starts."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = rank_environment(device, {**os.environ, **theirs}, folder, patience)
        os.environ.update(found.set)
        return found

    def observe(self, dump_path: str, tracer_pid: int | None) -> None:
        """Lets a capture see this process: its own stack dump on request, and a tracer where one is named."""
        if dump_path:
            tracing.install_faulthandler(Path(dump_path))
        if tracer_pid is not None:
            tracing.allow_tracing_by(tracer_pid)

    def construct(self, path: str, kwargs: Mapping[str, Any], device: DeviceKind = "sim") -> None:
        write_held(_accelerator_ids().get(_RESOURCES.get(device, ""), []))
        self._object = load(path)(**kwargs)

    def call(self, method: str, args: Sequence[Any]) -> Any:
        return getattr(self._object, method)(*args)


@dataclass(slots=True)
class _Rank:
    actor: Any
    process: RankProcess
    output_path: str
    node_id: str
    kwargs: Mapping[str, Any]
    answer: Any = None
    """Object reference of the last call."""

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.process.pid, self.process.start_time_ticks)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """``placement``: node ids by rank, else Ray chooses, packed. ``env`` reaches ranks before any import."""

    device: DeviceKind = "sim"
    role: str = "rank"
    env: Mapping[str, str] = field(default_factory=dict)
    placement: Sequence[str] | None = None
    dumps: Path | None = None
    """A directory on every node for the stack dumps that ranks write of themselves when py-spy cannot."""
    start_s: float = 120.0
    """Until every constructor has returned."""
    devices: float = 1
    """Accelerators of each process; a part of one where processes share it."""
    see_all: bool = False
    """A process sees the others' devices too."""
    patience: Patience | None = None
    """How long the libraries of an accelerator must wait; None: their environment is left alone."""
    engine_env: Mapping[str, str] = field(default_factory=dict)
    """What the engine that these processes start has in its own environment."""
    end_s: float = 10.0


class RankPool:
    """See `harness.target.RankPool` for what a target sees of it. Not for several threads."""

    def __init__(
        self,
        cluster: Cluster,
        options: PoolOptions | None = None,
        tracer: Callable[[str], int] | None = None,
        owner: Callable[[Sequence[RankProcess]], None] | None = None,
    ) -> None:
        """``tracer``: pid of the process on a node (by name) that may trace the ranks there. ``owner`` is told
        of all ranks as soon as they have a pid, for the case that this process dies before they are up."""
        self._cluster = cluster
        self._tracer = tracer
        self._owner = owner
        self._options = options or PoolOptions()
        self._name = f"ranks-{secrets.token_hex(4)}"
        self._started = 0
        self._class = ""
        self._ranks: dict[int, _Rank] = {}
        self._group: Any = None
        self._nodes: dict[str, Node] = {}
        self.environments: dict[int, RankEnvironment] = {}
        """By rank, what was set for the libraries of its accelerator; empty on devices without."""

    # What a target uses ----------------------------------------------------------------------------------

    def start(self, rank_class: str, kwargs: Sequence[Mapping[str, Any]]) -> Sequence[RankProcess]:
        """One process a rank, each constructed with its own ``kwargs``.

        Raises ClusterError with the rank's own exception as soon as one constructor raises, when the cluster
        lacks the devices, or when ``start_s`` have passed. Nothing is left running then.
        """
        if self._ranks:
            raise ClusterError("the pool has ranks already; stop it first, or use replace")
        self._class = rank_class
        self._nodes = {node.id: node for node in nodes()}
        self._reserve(len(kwargs))
        return self._launch(dict(enumerate(kwargs)))

    def call(self, method: str, args: Sequence[Sequence[Any]]) -> None:
        """Calls ``method`` on every rank with that rank's ``args``; returns at once."""
        if len(args) != len(self._ranks):
            raise ValueError(f"{method}: arguments for {len(args)} ranks, the pool has {len(self._ranks)}")
        for rank, entry in sorted(self._ranks.items()):
            entry.answer = entry.actor.call.remote(method, list(args[rank]))

    def poll(self) -> tuple[Mapping[int, Any], Mapping[int, str], Collection[int]]:
        """Results and failures of the last call so far, by rank. A rank that still runs is in neither.

        The third are the failed ranks whose process is gone: Ray's word for it is no exception of theirs.
        """
        done: dict[int, Any] = {}
        failed: dict[int, str] = {}
        died: set[int] = set()
        waiting = {entry.answer: rank for rank, entry in self._ranks.items() if entry.answer is not None}
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0) if waiting else ([], [])
        for answer in ready:
            try:
                done[waiting[answer]] = ray.get(answer, timeout=self._options.end_s)
            except ray.exceptions.RayError as error:
                failed[waiting[answer]] = why(error)
                if isinstance(error, ray.exceptions.ActorDiedError):
                    died.add(waiting[answer])
        return done, failed, died

    # What the run uses -----------------------------------------------------------------------------------

    @property
    def processes(self) -> tuple[RankProcess, ...]:
        return tuple(entry.process for _, entry in sorted(self._ranks.items()))

    def logs(self, rank: int) -> tuple[str, str]:
        """Paths of the rank's standard error and standard output, on its node."""
        entry = self._ranks[rank]
        return entry.process.log_path or "", entry.output_path

    def alive(self) -> Mapping[int, bool]:
        """Only for ranks on this machine: is the process there? (A hung or a stopped one is.)"""
        return {
            rank: process_control.alive(entry.id)
            for rank, entry in self._ranks.items()
            if self._is_local(entry)
        }

    def replace(
        self, ranks: Sequence[int], kwargs: Mapping[int, Mapping[str, Any]] | None = None
    ) -> Sequence[RankProcess]:
        """Ends these ranks and starts new ones in their place, with new ``kwargs`` where given.

        Returns all ranks. Raises ClusterError as ``start`` does, or when an old one would not die.
        """
        renewed = {rank: (kwargs or {}).get(rank, self._ranks[rank].kwargs) for rank in ranks}
        left = self.kill(self._options.end_s, ranks)
        if left:
            raise ClusterError(
                f"cannot replace ranks: processes {_pids(left)} would not die; end them by hand"
            )
        self._launch(renewed)
        return self.processes

    def kill(self, deadline_s: float, ranks: Sequence[int] | None = None) -> list[ProcessId]:
        """Ends ranks (all by default) and their children, hung or stopped ones too. Returns what lives on."""
        chosen = [self._ranks.pop(rank) for rank in (list(self._ranks) if ranks is None else ranks)]
        local = [entry.id for entry in chosen if self._is_local(entry)]
        children = process_control.children_of(*(process.pid for process in local))
        for entry in chosen if ray.is_initialized() else []:
            # Also for local ones: Ray forgets the actor sooner. It does not wait.
            ray.kill(entry.actor, no_restart=True)
        left = process_control.end([*local, *children], deadline_s, grace_s=0.0)
        return left + self._still_alive([entry for entry in chosen if not self._is_local(entry)], deadline_s)

    def stop(self, deadline_s: float) -> list[ProcessId]:
        """As ``kill``, and gives the reserved devices back."""
        left = self.kill(deadline_s)
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group = None
        return left

    # Inside ----------------------------------------------------------------------------------------------

    def _is_local(self, entry: _Rank) -> bool:
        return self._nodes[entry.node_id].local

    def _reserve(self, world: int) -> None:
        """All or nothing, so that two runs never hold half of the devices each."""
        options = self._options
        if options.device in ("sim", "cpu") or options.placement is not None:
            return
        each = {"CPU": 1, "GPU": options.devices, "NPU": options.devices}
        wanted = {name: amount * each[name] for name, amount in _RESERVED[options.device].items()}
        total = ray.cluster_resources()
        for name, amount in wanted.items():
            if total.get(name, 0.0) < amount * world:
                raise ClusterError(
                    f"{world} ranks on {options.device} need {amount * world:g} {name}, the cluster has "
                    f"{total.get(name, 0.0):g}; ask for fewer ranks, or start Ray with more of them"
                )
        self._group = placement_group(
            [dict(wanted)] * world, strategy="PACK", lifetime="detached", name=self._name
        )
        if not self._group.wait(min(_RESERVE_S, options.start_s)):
            remove_placement_group(self._group)
            self._group = None
            free = {name: ray.available_resources().get(name, 0.0) for name in wanted}
            raise ClusterError(
                f"the devices are taken: {world} ranks need {dict(wanted)} each, free are {free}"
            )

    def _launch(self, kwargs: Mapping[int, Mapping[str, Any]]) -> Sequence[RankProcess]:
        deadline = time.monotonic() + self._options.start_s
        actors = {rank: self._actor(rank) for rank in kwargs}
        try:
            self._wait_for([actor.identity.remote() for actor in actors.values()], deadline, "start")
            for rank, actor in actors.items():
                # Ready by now; the deadline only bounds a cluster that fails in between.
                self._ranks[rank] = self._entry(rank, actor, kwargs[rank])
            if self._owner is not None:
                self._owner(self.processes)
            self._prepare(actors, deadline)
            seen = [self._observe(self._ranks[rank]) for rank in kwargs]
            self._wait_for(seen, deadline, "become observable")
            built = [
                actor.construct.remote(self._class, dict(kwargs[rank]), self._options.device)
                for rank, actor in actors.items()
            ]
            self._wait_for(built, deadline, f"construct {self._class}")
        except BaseException:
            for actor in actors.values():
                ray.kill(actor, no_restart=True)
            self.stop(self._options.end_s)
            raise
        return [self._ranks[rank].process for rank in sorted(kwargs)]

    def _prepare(self, actors: Mapping[int, Any], deadline: float) -> None:
        options = self._options
        if options.patience is None or options.dumps is None or options.device not in ("cuda", "npu"):
            return
        folder = str(options.dumps / self._name)
        asked = [
            actor.prepare.remote(options.device, folder, options.patience, dict(options.engine_env))
            for actor in actors.values()
        ]
        self._wait_for(asked, deadline, "set their environment")
        self.environments |= zip(actors, ray.get(asked, timeout=options.end_s), strict=True)

    def _actor(self, rank: int) -> Any:
        options = self._options
        self._started += 1
        settings: dict[str, Any] = {
            "name": f"{self._name}-{rank}-{self._started}",
            "lifetime": "detached",
            "max_restarts": 0,
            "max_task_retries": 0,
            "num_cpus": _SIM_CPUS,
        }
        if options.device == "cuda":
            settings["num_gpus"] = options.devices
        if options.device == "npu":
            settings["resources"] = {"NPU": options.devices}
        if options.placement is not None:
            settings["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                options.placement[rank], soft=False
            )
        elif self._group is not None:
            settings["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            )
        wanted = {**(SEE_ALL.get(options.device, {}) if options.see_all else {}), **options.env}
        missing = {name: value for name, value in wanted.items() if self._cluster.env.get(name) != value}
        if missing:
            # Only when needed: a worker that was started ahead has the cluster's environment and no other.
            settings["runtime_env"] = {"env_vars": missing}
        return ray.remote(RankHost).options(**settings).remote()

    def _observe(self, entry: _Rank) -> Any:
        tracer = None if self._tracer is None else self._tracer(entry.process.node)
        return entry.actor.observe.remote(entry.process.faulthandler_path or "", tracer)

    def _entry(self, rank: int, actor: Any, kwargs: Mapping[str, Any]) -> _Rank:
        found = ray.get(actor.identity.remote(), timeout=self._options.end_s)
        devices = found["accelerators"].get(_RESOURCES.get(self._options.device, ""), [])
        process = RankProcess(
            rank=rank,
            role=self._options.role,
            node=self._nodes[found["node_id"]].name,
            pid=found["pid"],
            start_time_ticks=found["start_time_ticks"],
            device=f"{self._options.device}:{devices[0]}" if devices else self._options.device,
            log_path=found["log_path"],
            faulthandler_path=self._dump_path(rank),
        )
        return _Rank(actor, process, found["output_path"], found["node_id"], kwargs)

    def _dump_path(self, rank: int) -> str | None:
        dumps = self._options.dumps
        return None if dumps is None else str(dumps / f"faulthandler-{rank}-{self._started}.txt")

    def _wait_for(self, references: list[Any], deadline: float, what: str) -> None:
        """Fails with the first one that fails, not with the first one in order."""
        waiting = references
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank, reference in enumerate(references) if reference in waiting]
                pids = [entry.process.pid for entry in self._ranks.values()]
                raise ClusterError(
                    f"{len(late)} of {len(references)} ranks (the starting ones numbered {late}) did not "
                    f"{what} within {self._options.start_s:g} s; pids {pids or 'not known yet'}"
                )
            try:
                ray.get(ready[0], timeout=self._options.end_s)
            except ray.exceptions.RayError as error:
                raise ClusterError(f"a rank did not {what}: {why(error)}") from error

    def _still_alive(self, remote: Sequence[_Rank], deadline_s: float) -> list[ProcessId]:
        """Ray's word for ranks on other nodes: a killed actor answers with its death."""
        probes = {entry.actor.identity.remote(): entry for entry in remote}
        if not probes:
            return []
        _, unanswered = ray.wait(list(probes), num_returns=len(probes), timeout=deadline_s)
        return [probes[probe].id for probe in unanswered]


def load(path: str) -> Any:
    """``package.module:Name`` → the object. Raises ValueError, ImportError or AttributeError."""
    module, separator, name = path.partition(":")
    if not separator or not name:
        raise ValueError(f"{path!r} is no import path; write package.module:Class")
    return getattr(importlib.import_module(module), name)


def why(error: BaseException) -> str:
    """What a failed rank said: its own exception with its traceback, or how its process ended."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return str(error).strip()
    text = getattr(error, "error_msg", None) or str(error)
    return f"{type(error).__name__}: {' '.join(str(text).split())}"


def ascending(visible: str) -> str:
    """A list of devices as CANN takes it: logic ids that ascend, with commas (PLATFORMS.md). Ray names them in the
    order in which they became free. What is no list of numbers is left as it is."""
    parts = visible.split(",")
    return ",".join(sorted(parts, key=int)) if all(part.isdecimal() for part in parts) else visible


def _natural(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (0, text)


def _pids(found: Sequence[ProcessId]) -> str:
    return ", ".join(str(process.pid) for process in found)
