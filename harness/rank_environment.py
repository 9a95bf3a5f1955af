"""What the ranks' environment needs so that a hang on CUDA or NPU leaves evidence, and what in it would hide one.
Pure.

Here: the variables that are set for each device unless the user set them himself, the record of that, and the
traps in what the user set. Names are checked against the torch_npu wheels 2.7.1 and 2.14.0 (their libraries name
every ``TORCH_HCCL_*`` below; 2.7.1 knows ``HCCL_ASYNC_ERROR_HANDLING`` and ``HCCL_DESYNC_DEBUG``, 2.14.0 the
``TORCH_`` ones too) and against torch 2.13 (``ProcessGroupNCCL.hpp``, ``FlightRecorder.hpp``, ``libtorch_cpu``).
Not here: setting them (``rank_pool.py``), picking up what they make the libraries write (``device_evidence.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SLACK_S = 30.0
"""Between the end of the watchdog's work and the first library that may end a rank."""
HCCL_STEP_S = 68
"""Atlas training and inference series round HCCL_EXEC_TIMEOUT down to a multiple of this, and less up to it; A2
and A3 take any second (CANN's reference of environment variables, HCCL_EXEC_TIMEOUT)."""
HCCL_DEFAULT_S = 1836
HCCL_AIV_S = 1091
"""The most, and what 0 means, where HCCL_OP_EXPANSION_MODE is AIV (same page)."""
HCCL_CONNECT_S = (120, 7200)
"""Least (and default), and most."""
NCCL_HEARTBEAT_S = 480
HCCL_HEARTBEAT_S = 600
"""The libraries' defaults: a watchdog thread that is silent for so long ends its process."""
LATE_S = 3600.0
"""A timeout above this is as good as none in a night of trials of minutes."""
RECORDS = 2000
"""Calls that the flight recorder keeps: torch's own default from 2.8 on (``FlightRecorder.hpp``)."""
HCCL_DUMP = "hccl_trace_rank_"
NCCL_DUMP = "nccl_trace_rank_"
HCCL_PIPE = "hccl_pipe_rank_"
NCCL_PIPE = "nccl_pipe_rank_"
"""Beginnings of file names; the library appends the rank, and to a pipe's ``.pipe``. A byte written into the pipe
makes the library's monitor thread dump, whatever the rank's own threads do."""
_OFF = frozenset({"0", "false", "off", "no", "n"})

Severity = Literal["warn", "fail"]


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting. ``also``: other names of it; who has set any of them has decided."""

    name: str
    value: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trap:
    """A value in the environment that would hide a hang, or make one."""

    name: str
    value: str
    severity: Severity
    why: str
    mend: str

    @property
    def words(self) -> str:
        return f"{self.name}={self.value}: {self.why}"


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """``set``: what is added; ``left``: what the user had set of the same settings; ``traps``: in what he had."""

    set: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    traps: tuple[Trap, ...] = ()

    @property
    def effective(self) -> Mapping[str, str]:
        return {**self.left, **self.set}

    def to_json(self) -> dict[str, Any]:
        words = [trap.words for trap in self.traps]
        return {"set": dict(self.set), "left": dict(self.left), "traps": words}


@dataclass(frozen=True, slots=True)
class Patience:
    """``hang_s``: from the last progress until a hang's evidence is on disk, at worst; a library that ends a rank
    before that destroys it. ``trial_s``: the longest a trial may take, with its capture; what is set here waits for
    both. A hold for a debugger is in each."""

    hang_s: float
    trial_s: float

    @property
    def longest_s(self) -> float:
        return max(self.hang_s, self.trial_s)


def rank_environment(device: str, own: Mapping[str, str], folder: str, patience: Patience) -> RankEnvironment:
    """What a rank on ``device`` gets. ``own``: its environment so far. ``folder``: on its node, for what the
    libraries write; it must exist before a rank makes its pipe there. Nothing for devices without such
    libraries."""
    wanted = _wanted(device, folder, patience.longest_s, own)
    kept: dict[str, str] = {}
    added: dict[str, str] = {}
    for variable in wanted:
        decided = {name: own[name] for name in (variable.name, *variable.also) if name in own}
        if decided:
            kept |= decided
        else:
            added[variable.name] = variable.value
    found = traps(device, {**own, **added}, patience.hang_s) if wanted else ()
    return RankEnvironment(added, kept, found)


def _wanted(device: str, folder: str, longest_s: float, own: Mapping[str, str]) -> tuple[Variable, ...]:
    if device == "cuda":
        return _nccl(folder, longest_s)
    return _hccl(folder, longest_s, own) if device == "npu" else ()


def _nccl(folder: str, longest_s: float) -> tuple[Variable, ...]:
    records = str(RECORDS)
    dump = f"{folder}/{NCCL_DUMP}"
    return (
        # NCCL waits for ever; torch's own watchdog ends a rank after the group's timeout and after this.
        Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(max(NCCL_HEARTBEAT_S, _after(longest_s)))),
        Variable("TORCH_NCCL_ENABLE_MONITORING", "1"),
        Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", ("NCCL_ASYNC_ERROR_HANDLING",)),
        Variable("TORCH_NCCL_DESYNC_DEBUG", "1", ("NCCL_DESYNC_DEBUG",)),
        # torch before 2.8 knows the first name alone, and the pipe of later ones asks for it too.
        Variable("TORCH_NCCL_TRACE_BUFFER_SIZE", records),
        Variable("TORCH_FR_BUFFER_SIZE", records, ("TORCH_NCCL_TRACE_BUFFER_SIZE",)),
        Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        Variable("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", dump),
        Variable("TORCH_FR_DUMP_TEMP_FILE", dump, ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",)),
        Variable("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", f"{folder}/{NCCL_PIPE}"),
        Variable("NCCL_DEBUG", "WARN"),
    )


def _hccl(folder: str, longest_s: float, own: Mapping[str, str]) -> tuple[Variable, ...]:
    exec_s = HCCL_STEP_S * math.ceil(_after(longest_s) / HCCL_STEP_S)
    theirs = seconds(own.get("HCCL_EXEC_TIMEOUT", ""))
    # torch_npu makes its own event timeout from the one that the user chose.
    event = () if theirs is not None else (Variable("HCCL_EVENT_TIMEOUT", str(exec_s + HCCL_STEP_S)),)
    return (
        Variable("HCCL_CONNECT_TIMEOUT", str(HCCL_CONNECT_S[0])),
        Variable("HCCL_EXEC_TIMEOUT", str(exec_s)),
        *event,
        Variable("TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC", str(max(HCCL_HEARTBEAT_S, exec_s + 2 * HCCL_STEP_S))),
        Variable("TORCH_HCCL_ENABLE_MONITORING", "1"),
        # Each branch of torch_npu reads one of the two names; a user who set one of them has decided both.
        Variable("TORCH_HCCL_ASYNC_ERROR_HANDLING", "1", ("HCCL_ASYNC_ERROR_HANDLING",)),
        Variable("HCCL_ASYNC_ERROR_HANDLING", "1", ("TORCH_HCCL_ASYNC_ERROR_HANDLING",)),
        Variable("TORCH_HCCL_DESYNC_DEBUG", "1", ("HCCL_DESYNC_DEBUG",)),
        Variable("HCCL_DESYNC_DEBUG", "1", ("TORCH_HCCL_DESYNC_DEBUG",)),
        Variable("TORCH_HCCL_TRACE_BUFFER_SIZE", str(RECORDS)),
        Variable("TORCH_HCCL_DUMP_ON_TIMEOUT", "1"),
        Variable("TORCH_HCCL_DEBUG_INFO_TEMP_FILE", f"{folder}/{HCCL_DUMP}"),
        Variable("TORCH_HCCL_DEBUG_INFO_PIPE_FILE", f"{folder}/{HCCL_PIPE}"),
        Variable("TORCH_HCCL_STATUS_SAVE_ENABLE", "1"),
        Variable("TORCH_HCCL_STATUS_SAVE_PATH", f"{folder}/status"),
        Variable("TORCH_HCCL_STATUS_SAVE_INTERVAL", "2"),
        Variable("ASCEND_PROCESS_LOG_PATH", f"{folder}/plog", ("ASCEND_WORK_PATH",)),
    )


def _after(age_s: float) -> int:
    return math.ceil(age_s + SLACK_S)


def environment_record(device: str, found: Mapping[int, RankEnvironment]) -> dict[str, Any]:
    """As it is stored beside a trial's evidence and in run.json: ``found`` by process, alike ones together."""
    alike: list[tuple[RankEnvironment, list[int]]] = []
    for number, one in sorted(found.items()):
        same = next((numbers for other, numbers in alike if other == one), None)
        if same is None:
            alike.append((one, [number]))
        else:
            same.append(number)
    return {
        "device": device,
        "environments": [{"processes": numbers, **one.to_json()} for one, numbers in alike],
    }


@dataclass(frozen=True, slots=True)
class Written:
    """Where the libraries of a rank write, on its node. ``dumps``: beginnings of the flight recorder's files,
    newest name first; ``pipe``: of its pipes; ``logs``: folders of CANN's logs. What is not written is empty."""

    device: str
    dumps: tuple[str, ...] = ()
    pipe: str = ""
    status: str = ""
    logs: tuple[str, ...] = ()


def written(device: str, effective: Mapping[str, str]) -> Written:
    """From ``RankEnvironment.effective``. CANN logs under ASCEND_PROCESS_LOG_PATH, else under ASCEND_WORK_PATH
    (PLATFORMS.md); one of them is always set here."""
    if device == "cuda":
        names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        dumps = tuple(dict.fromkeys(effective[name] for name in names if effective.get(name)))
        return Written(device, dumps, effective.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", ""))
    dump = effective.get("TORCH_HCCL_DEBUG_INFO_TEMP_FILE", "")
    own, work = effective.get("ASCEND_PROCESS_LOG_PATH", ""), effective.get("ASCEND_WORK_PATH", "")
    logs = (own,) if own else (f"{work}/log", work) if work else ()
    return Written(
        device,
        (dump,) if dump else (),
        effective.get("TORCH_HCCL_DEBUG_INFO_PIPE_FILE", ""),
        effective.get("TORCH_HCCL_STATUS_SAVE_PATH", ""),
        logs,
    )


# Traps -------------------------------------------------------------------------------------------------------


def traps(device: str, env: Mapping[str, str], hang_s: float) -> tuple[Trap, ...]:
    """What in an environment hides hangs of ``device`` or their causes; ``hang_s`` as in `Patience`."""
    if device == "npu":
        return (*_hccl_traps(env, hang_s), *_recorder_traps(env, "HCCL"))
    if device == "cuda":
        return (*_nccl_traps(env, hang_s), *_recorder_traps(env, "NCCL"))
    return ()


def _hccl_traps(env: Mapping[str, str], hang_s: float) -> Iterator[Trap]:
    execution = "HCCL_EXEC_TIMEOUT"
    exec_s = seconds(env.get(execution, ""))
    aiv = env.get("HCCL_OP_EXPANSION_MODE", "").upper() == "AIV"
    if execution in env and exec_s is None:
        yield _no_number(env, execution)
    elif exec_s == 0 and not aiv:
        why = "collectives never time out, so a hung rank neither dumps nor ends by itself"
        yield _trap(env, execution, "warn", why, f"unset it, or use {_after(hang_s)}")
    elif exec_s is not None and 0 < exec_s < hang_s:
        why = f"HCCL ends a hung collective before the watchdog is done ({hang_s:g} s): its evidence goes"
        yield _trap(env, execution, "fail", why, f"unset it, or use {_after(hang_s)} or more")
    elif exec_s is not None and exec_s > LATE_S and not aiv:
        why = "HCCL's own dump and error code of a hang would come after the trial"
        yield _trap(env, execution, "warn", why, f"unset it, or use {_after(hang_s)}")
    if aiv and hang_s > HCCL_AIV_S:
        why = f"in AIV mode HCCL times out after {HCCL_AIV_S} s at most, before the watchdog is done ({hang_s:g} s)"
        yield _trap(
            env, "HCCL_OP_EXPANSION_MODE", "fail", why, "shorten watchdog.trial_timeout_s or the hold"
        )
    event = "HCCL_EVENT_TIMEOUT"
    event_s = seconds(env.get(event, ""))
    bound_s = HCCL_DEFAULT_S if exec_s is None else exec_s
    if event in env and event_s is None:
        yield _no_number(env, event)
    elif event_s is not None and event_s > 0 and (bound_s == 0 or event_s <= bound_s):
        why = f"must exceed {execution} ({bound_s:g} s)" if bound_s else f"{execution} is 0, never"
        yield _trap(
            env, event, "fail", f"{why}; else waits for events fail first and hide who waits", "unset it"
        )
    connect = "HCCL_CONNECT_TIMEOUT"
    connect_s = seconds(env.get(connect, ""))
    least, most = HCCL_CONNECT_S
    if connect in env and (connect_s is None or not least <= connect_s <= most):
        yield _trap(
            env, connect, "warn", f"HCCL takes whole seconds from {least} to {most}", f"unset it ({least})"
        )
    for name in ("ACL_STREAM_TIMEOUT", "ACL_DEVICE_SYNC_TIMEOUT"):
        limit_s = seconds(env.get(name, ""))
        if limit_s is not None and 0 < limit_s < hang_s:
            why = f"a synchronisation fails before the watchdog is done ({hang_s:g} s)"
            yield _trap(env, name, "fail", why, f"unset it, or use {_after(hang_s)} or more")
    yield from _heartbeat(env, "TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC", hang_s)
    yield from _async(env, ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING"))
    yield from _blocking(env, "ASCEND_LAUNCH_BLOCKING")
    if env.get("TASK_QUEUE_ENABLE", "").strip() == "0":
        why = (
            "every operator is launched by the thread that calls it, in another order than a night looks for"
        )
        yield _trap(env, "TASK_QUEUE_ENABLE", "warn", why, "unset it (1)")
    if not _off(env.get("PER_STREAM_QUEUE", "0")):
        why = "one dispatch queue a stream is experimental in torch_npu"
        yield _trap(env, "PER_STREAM_QUEUE", "warn", why, "unset it, unless this is what you look into")


def _nccl_traps(env: Mapping[str, str], hang_s: float) -> Iterator[Trap]:
    yield from _heartbeat(env, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", hang_s)
    yield from _async(env, ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"))
    yield from _blocking(env, "CUDA_LAUNCH_BLOCKING")
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if not _off(env.get(name, "0")):
            why = "hosts wait inside each collective, so streams are never seen to run ahead"
            yield _trap(env, name, "warn", why, "unset it")


def _recorder_traps(env: Mapping[str, str], library: str) -> Iterator[Trap]:
    name = f"TORCH_{library}_TRACE_BUFFER_SIZE"
    if env.get(name, "1").strip() == "0":
        yield _trap(
            env, name, "warn", "the flight recorder is off: no record of collectives", f"unset it ({RECORDS})"
        )
    if _off(env.get(f"TORCH_{library}_ENABLE_MONITORING", "1")):
        why = "without torch's monitor thread nothing is dumped on request"
        yield _trap(env, f"TORCH_{library}_ENABLE_MONITORING", "warn", why, "unset it (1)")


def _heartbeat(env: Mapping[str, str], name: str, hang_s: float) -> Iterator[Trap]:
    limit_s = seconds(env.get(name, ""))
    if limit_s is not None and 0 < limit_s < hang_s:
        why = f"torch's monitor ends a rank before the watchdog is done ({hang_s:g} s)"
        yield _trap(env, name, "fail", why, f"unset it, or use {_after(hang_s)} or more")


def _async(env: Mapping[str, str], names: Sequence[str]) -> Iterator[Trap]:
    for name in names:
        if _off(env.get(name, "1")):
            why = "a collective that times out or fails is not ended and not dumped"
            yield _trap(env, name, "warn", why, f"unset {' and '.join(names)}, or set both alike")


def _blocking(env: Mapping[str, str], name: str) -> Iterator[Trap]:
    if not _off(env.get(name, "0")):
        why = "every launch waits for the device: races of streams, copies and hosts do not show"
        yield _trap(env, name, "fail", why, "unset it")


def _trap(env: Mapping[str, str], name: str, severity: Severity, why: str, mend: str) -> Trap:
    return Trap(name, env.get(name, ""), severity, why, mend)


def _no_number(env: Mapping[str, str], name: str) -> Trap:
    return _trap(env, name, "fail", "is no number of seconds", "unset it")


def _off(value: str) -> bool:
    return value.strip().lower() in _OFF or not value.strip()


def seconds(text: str) -> float | None:
    """A number of seconds as the libraries read it; None for anything else, and where nothing is set."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
