"""Whom a dump speaks of: a rank, by number, or another process of an engine, by name. Pure.

The process's title comes first (SGLang and vLLM set one), then what a file of ours says, then the file's name and
the folders that it lies in (``scheduler_DP0_TP0.json``, ``worker-tp1.json``, ``rank0/stack.txt``), then the
outermost functions of its main thread. Who is a rank and has no number anywhere is called by its pid. A pid that
another file has under a name has that name everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.offline.well_formed import rank_well_formed
from harness.process_titles import EngineName, global_ranks, seat_of_title, served_by
from harness.seats import Seat
from harness.stack_places import deciding_thread
from harness.stacks import ProcessStacks

_RANK = re.compile(r"rank[-_ .]?(\d{1,5})(?!\d)", re.IGNORECASE)
_RANK_ARGUMENT = re.compile(r"--(?:node[-_])?(?:local[-_])?rank[= ](\d{1,5})(?!\d)")
_PLACE = re.compile(r"(?<![A-Za-z])(DP|PP|TP)[-_]?(\d{1,5})(?!\d)", re.IGNORECASE)
_WORKER = re.compile(r"(?:worker|scheduler|trainer|actor|proc)[-_ ]?(\d{1,5})(?!\d)", re.IGNORECASE)
_PID = re.compile(r"pid[-_ .]?(\d{1,9})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(?:^|[^0-9])(\d{1,5})$")
_ROLES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("controller", re.compile(r"data[-_]?parallel[-_]?controller|(?<![a-z])controller")),
    ("coordinator", re.compile(r"coordinator")),
    ("detokenizer", re.compile(r"detokenizer")),
    ("engine_core", re.compile(r"engine[-_ ]?core")),
    (
        "server",
        re.compile(
            r"launch[-_]?server|api[-_]?server|http[-_]?server|tokenizer[-_]?manager|(?<![a-z])server"
        ),
    ),
    ("other", re.compile(r"torchrun|launcher|elastic|(?<![a-z])agent")),
    ("rank", re.compile(r"scheduler|worker|trainer|(?<![a-z])rank")),
)
_FUNCTIONS: tuple[tuple[str, EngineName, str, str], ...] = (
    # py-spy's text shortens the paths of packages without an __init__.py, as SGLang's are.
    ("rank", "sglang", r"run_scheduler_process\w*", r""),
    ("controller", "sglang", r"run_data_parallel_controller_process", r""),
    ("detokenizer", "sglang", r"run_detokenizer_process", r""),
    ("server", "sglang", r"launch_server|run_server|serve", r"sglang/"),
    ("rank", "vllm", r"worker_main|worker_busy_loop", r"vllm/v1/"),
    ("engine_core", "vllm", r"run_engine_core", r"vllm/v1/"),
    ("coordinator", "vllm", r"run_coordinator", r"vllm/v1/"),
    ("server", "vllm", r"run_server|main|serve\w*|<module>", r"vllm/entrypoints/"),
    (
        "other",
        "other",
        r"run|main|launch_agent|_monitor_workers",
        r"torch/distributed/(?:run|launcher|elastic)",
    ),
    ("other", "other", r"spawn|start_processes|join", r"torch/multiprocessing/spawn"),
)
"""Outermost functions of a main thread: role, engine, name, part of the file's path."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one dump says of whose it is. ``role`` empty: nothing did. ``places``: numbers by kind, ``{"TP": 1}``;
    ``name``: of a process that is no rank. ``path``: the file; ``number``: at the end of its name, a rank's or a
    sample's."""

    role: str = ""
    engine: EngineName = "other"
    rank: int | None = None
    places: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    pid: int = 0
    path: str = ""
    number: int | None = None

    @property
    def decided(self) -> bool:
        return bool(self.name) or self.rank is not None or bool(self.places)


def claim_of(
    path: str, pid: int, title: str, stacks: ProcessStacks | None, seat: Seat | None, alone: bool
) -> Claim:
    """``seat``: what a file of ours says; ``alone``: the file holds nothing of another process."""
    titled = seat_of_title(title)
    named = claim_of_name(path) if alone else Claim()
    pid = pid or named.pid
    if titled is not None:
        if titled.role != "rank":
            return Claim(titled.role, titled.engine, name=titled.name, pid=pid, path=path)
        index = titled.index if not titled.places else None
        rank = index if index is not None else None if titled.places else named.rank
        return Claim("rank", titled.engine, rank, titled.places or named.places, pid=pid, path=path)
    role, engine = role_of_stacks(stacks)
    engine = served_by(title) or engine
    if served_by(title) is not None:
        role = "server"
    if isinstance(seat, int):
        return Claim("rank", engine, rank=seat, pid=pid, path=path)
    if isinstance(seat, str):
        return Claim(_role_of_seat(seat), engine, name=seat, pid=pid, path=path)
    role = role or named.role
    argument = _RANK_ARGUMENT.search(title)
    rank = named.rank if named.rank is not None else int(argument[1]) if argument is not None else None
    if role not in ("rank", ""):
        number = named.places.get("DP", 0)
        return Claim(role, engine, name=f"{role}-{number}" if number else role, pid=pid, path=path)
    last = _LAST_NUMBER.search(stem_of(path)) if alone else None
    return Claim(
        role, engine, rank, {} if rank is not None else named.places, pid=pid, path=path,
        number=None if last is None else int(last[1]),
    )  # fmt: skip


def claim_of_name(path: str) -> Claim:
    """By the file's name; by its folders where the name says nothing."""
    parts = tuple(path.split("/"))
    for part in reversed(parts):
        text = part.rpartition(".")[0] or part if part == parts[-1] else part
        rank, pid = _RANK.search(text), _PID.search(text)
        places = {kind.upper(): int(number) for kind, number in _PLACE.findall(text)}
        role = next((role for role, pattern in _ROLES if pattern.search(text.lower())), "")
        worker = _WORKER.search(text)
        number = rank or (worker if not places else None)
        found = Claim(
            role="rank" if (rank or places) and role in ("", "rank") else role,
            rank=int(number[1]) if number is not None and role in ("", "rank") else None,
            places=places,
            pid=int(pid[1]) if pid is not None else 0,
        )
        if found.role or found.decided or found.pid:
            return found
    return Claim()


def rank_of_name(path: str) -> int | None:
    """Of a recorder's, a ledger's or a decision file: also by the last number of its name (``trace_3.json``)."""
    named = claim_of_name(path)
    last = _LAST_NUMBER.search(stem_of(path))
    rank = named.rank
    if rank is None:
        rank = named.places.get("TP", named.places.get("DP"))
    if rank is None and last is not None:
        rank = int(last[1])
    return rank if rank_well_formed(rank) else None


def role_of_stacks(stacks: ProcessStacks | None) -> tuple[str, EngineName]:
    """By the outermost function that tells; empty where none does."""
    thread = None if stacks is None else deciding_thread(stacks)
    for frame in reversed(thread.frames if thread is not None else ()):
        name = frame.name.rsplit(".", 1)[-1]
        for role, engine, functions, file in _FUNCTIONS:
            if re.fullmatch(functions, name) and re.search(file, frame.filename):
                return role, engine
    return "", "other"


def seats_of(claims: Sequence[Claim], flags: Mapping[str, str]) -> list[Seat]:
    """The seat of each claim. ``flags``: of the server, by our words, where a table shows its command line."""
    by_pid: dict[int, Claim] = {claim.pid: claim for claim in claims if claim.decided and claim.pid}
    # A number that several names have is no number of a process (a hand-made dump, or another machine).
    for claim in claims:
        known = by_pid.get(claim.pid)
        if known is not None and claim.decided and _key(known) != _key(claim):
            del by_pid[claim.pid]
    known_claims = [claim if claim.decided else by_pid.get(claim.pid, claim) for claim in claims]
    placed = {_key(claim): claim for claim in known_claims if claim.places and claim.rank is None}
    known_claims = _by_numbers(known_claims)
    numbers: dict[object, int] = {}
    for engine in {claim.engine for claim in placed.values()}:
        own = [claim for claim in placed.values() if claim.engine == engine]
        # A name without its stacks or title does not say which engine it is of.
        known_engine = engine if engine != "other" else _likely(claims)
        ranks = global_ranks(known_engine, [claim.places for claim in own], flags)
        numbers |= {_key(claim): rank for claim, rank in zip(own, ranks, strict=True)}
    return [_seat(claim, numbers) for claim in known_claims]


def _by_numbers(claims: list[Claim]) -> list[Claim]:
    """``stack_0.txt`` to ``stack_3.txt``: of processes that nothing else names, one number each from 0 on."""
    nameless = [claim for claim in claims if not claim.decided and claim.role in ("", "rank")]
    by_pid = {claim.pid or claim.path: claim.number for claim in nameless}
    numbers = sorted(number for number in by_pid.values() if number is not None)
    named = any(claim.rank is not None or claim.places for claim in claims)
    once = len({(claim.pid or claim.path, claim.number) for claim in nameless}) == len(by_pid)
    if named or len(by_pid) < 2 or numbers != list(range(len(by_pid))) or not once:
        return claims
    return [replace(claim, rank=claim.number) if claim in nameless else claim for claim in claims]


def stem_of(path: str) -> str:
    """The file's name up to its first dot."""
    return path.rpartition("/")[2].partition(".")[0]


def _likely(claims: Sequence[Claim]) -> EngineName:
    return next((claim.engine for claim in claims if claim.engine != "other"), "other")


def _seat(claim: Claim, numbers: Mapping[object, int]) -> Seat:
    if claim.name:
        return claim.name
    rank = claim.rank if claim.rank is not None else numbers.get(_key(claim)) if claim.places else None
    if rank_well_formed(rank):
        return rank
    # An engine's only rank has a title or a function and no number.
    return f"pid-{claim.pid}" if claim.pid else stem_of(claim.path) or "unnamed"


def _key(claim: Claim) -> object:
    return claim.name, claim.rank, tuple(sorted(claim.places.items()))


def _role_of_seat(seat: str) -> str:
    """Of a seat of ours that is no number, so no rank: ``controller``, ``child 4711 of rank 1``."""
    if seat.startswith("child "):
        return "other"
    return next((role for role, pattern in _ROLES[:-1] if pattern.search(seat.lower())), "other")
