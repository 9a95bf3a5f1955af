"""Does a value that came from a file have the type that a dataclass says? Pure.

Snapshots and decision records are read leniently elsewhere, because we wrote them; here anybody may have.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from harness.ledger_snapshot import Snapshot

MOST_RANKS = 1 << 16
"""A larger number of a rank is none: whoever counts up to it would run out of memory."""
_LARGEST = 2**63
"""Times are nanoseconds and counters 64 bits wide."""
_DECISION: Mapping[str, Any] = {
    "tokens": list, "dp": int, "retracted": list, "aborted": list, "collectives": dict,
}  # fmt: skip
"""Fields of a decision record that the rules look into; the others they only compare."""


def well_formed(value: object, hint: Any) -> bool:
    """``hint``: a class, a dataclass, or what a dataclass's field says."""
    if hint is Any:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(well_formed(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(well_formed(one, arguments[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            well_formed(key, arguments[0]) and well_formed(one, arguments[1]) for key, one in value.items()
        )
    if is_dataclass(hint):
        return isinstance(value, hint) and all(  # type: ignore[arg-type]
            well_formed(getattr(value, name), one) for name, one in _hints(type(value)).items()
        )
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
    return isinstance(value, hint)


def rank_well_formed(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_RANKS


def snapshot_well_formed(snapshot: Snapshot) -> bool:
    """All of it, and the ranks that it names are ranks of its world."""
    if not (well_formed(snapshot, Snapshot) and all(map(decision_well_formed, snapshot.decisions))):
        return False
    world = snapshot.header.world
    named = {snapshot.header.rank, *(rank for group in snapshot.groups.values() for rank in group.ranks)}
    return 0 < world <= MOST_RANKS and all(0 <= rank < world for rank in named)


def decision_well_formed(record: Mapping[str, Any]) -> bool:
    """The fields that the rules look into have their types; None stands for an absent one."""
    if not all(
        well_formed(record[name], kind) for name, kind in _DECISION.items() if record.get(name) is not None
    ):
        return False
    tokens = record.get("tokens") or ()
    return well_formed(record.get("step"), int) and all(well_formed(one, int) for one in tokens)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
