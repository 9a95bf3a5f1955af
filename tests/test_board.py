"""The notice board: records between members that map one file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sim_rig import LONG_S, in_thread, joined

from serving.board import PAYLOAD_BYTES, Board, BoardTimeout


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Board, Board]]:
    boards = Board(tmp_path / "b", member=0, size=2), Board(tmp_path / "b", member=1, size=2)
    yield boards
    for board in boards:
        board.close()


def padded(payload: bytes) -> bytes:
    return payload.ljust(PAYLOAD_BYTES, b"\0")


def test_a_record_is_there_once_posted_and_only_under_its_number(pair: tuple[Board, Board]) -> None:
    mine, theirs = pair
    assert theirs.read(0, 1) is None
    mine.post(1, b"one")
    assert theirs.read(0, 1) == padded(b"one")
    assert theirs.read(0, 2) is None
    assert theirs.read(1, 1) is None


def test_a_later_record_takes_the_place_of_one_long_before(pair: tuple[Board, Board]) -> None:
    mine, theirs = pair
    for sequence in range(1, 10):
        mine.post(sequence, str(sequence).encode())
    assert theirs.read(0, 1) is None
    assert [theirs.read(0, sequence) for sequence in (2, 9)] == [padded(b"2"), padded(b"9")]


def test_a_torn_record_is_not_there_yet(tmp_path: Path, pair: tuple[Board, Board]) -> None:
    mine, theirs = pair
    mine.post(1, b"whole")
    at = (tmp_path / "b").read_bytes().index(b"whole")
    with (tmp_path / "b").open("r+b") as file:
        file.seek(at)
        file.write(b"W")
    assert theirs.read(0, 1) is None
    mine.post(1, b"whole")
    assert theirs.read(0, 1) == padded(b"whole")


def test_a_record_that_is_too_long_is_refused(pair: tuple[Board, Board]) -> None:
    pair[0].post(1, b"x" * PAYLOAD_BYTES)
    with pytest.raises(ValueError, match="53 bytes"):
        pair[0].post(2, b"x" * (PAYLOAD_BYTES + 1))


def test_gather_gives_every_members_record_in_order(tmp_path: Path) -> None:
    members, rounds = 3, 200
    found: dict[int, list[list[bytes]]] = {}

    def member(index: int) -> None:
        board = Board(tmp_path / "b", member=index, size=members)
        found[index] = [
            board.gather(sequence, b"%d of %d" % (sequence, index), timeout_s=LONG_S)
            for sequence in range(1, rounds + 1)
        ]

    threads = [in_thread(lambda index=index: member(index)) for index in range(members)]  # type: ignore[misc]
    for thread in threads:
        joined(thread)
    expected = [[padded(b"%d of %d" % (s, m)) for m in range(members)] for s in range(1, rounds + 1)]
    assert found == dict.fromkeys(range(members), expected)


def test_gather_ends_at_its_deadline_and_names_who_is_missing(tmp_path: Path) -> None:
    boards = [Board(tmp_path / "b", member=member, size=3) for member in range(2)]
    boards[1].post(7, b"")
    with pytest.raises(BoardTimeout, match=r"members \[2\] did not post record 7") as raised:
        boards[0].gather(7, b"", timeout_s=0.02)
    assert raised.value.missing == (2,)


def test_gather_ends_when_it_is_told_to_stop(pair: tuple[Board, Board]) -> None:
    stop, caught = threading.Event(), []

    def wait() -> None:
        try:
            pair[0].gather(1, b"", timeout_s=LONG_S, stop=stop.is_set)
        except BoardTimeout as error:
            caught.append(error.missing)

    thread = in_thread(wait)
    stop.set()
    joined(thread)
    assert caught == [(1,)]


def test_closing_removes_the_file_and_the_other_member_goes_on(tmp_path: Path) -> None:
    first, second = (Board(tmp_path / "b", member=member, size=2) for member in range(2))
    first.post(1, b"last words")
    first.close()
    assert not (tmp_path / "b").exists()
    assert second.read(0, 1) == padded(b"last words")
    second.close()
