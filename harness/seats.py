"""Seats: the places of an engine's processes. A rank's number, or the name of a process that is no rank.

Here: how a seat is worded, ordered and put into a file's name. Standard library only and pure: agents, capture,
store and diagnosis all speak of seats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Seat: TypeAlias = int | str
"""``1`` is rank 1; ``controller`` or ``engine_core-1`` are processes that take part in no collective."""


def seat_words(seat: Seat) -> str:
    """``rank 1`` or ``controller``, for people."""
    return f"rank {seat}" if isinstance(seat, int) else seat


MANY = 9
"""From so many ranks on they are told as ranges."""


def numbers_words(ranks: Iterable[int]) -> str:
    """``0, 1, 3`` of a few ranks, in their order; ``0-16, 18-4095`` of many, ascending."""
    given = list(ranks)
    if len(given) < MANY:
        return ", ".join(map(str, given))
    runs: list[tuple[int, int]] = []
    for rank in sorted(set(given)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def seats_words(seats: Iterable[Seat]) -> str:
    """``rank 0``, ``ranks 0, 1``, ``ranks 0, 1 and controller``, ``ranks 0-16, 18-4095``."""
    ordered = in_order(seats)
    ranks = [seat for seat in ordered if isinstance(seat, int)]
    words = [f"rank{'s' if len(ranks) > 1 else ''} {numbers_words(ranks)}"] if ranks else []
    words += [seat for seat in ordered if isinstance(seat, str)]
    return " and ".join(words)


def seat_stem(seat: Seat) -> str:
    """``rank1`` or ``controller``, for file names."""
    return f"rank{seat}" if isinstance(seat, int) else seat


def seat_of(stem: str) -> Seat:
    """The seat that ``seat_stem`` made this of."""
    number = stem.removeprefix("rank")
    return int(number) if number != stem and number.isdecimal() else stem


def seat_order(seat: Seat) -> tuple[int, int, str]:
    """A sort key: ranks first, by number; then the others, by name."""
    return (0, seat, "") if isinstance(seat, int) else (1, 0, seat)


def in_order(seats: Iterable[Seat]) -> list[Seat]:
    return sorted(seats, key=seat_order)
