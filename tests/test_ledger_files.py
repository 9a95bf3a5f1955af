"""Ledger files that are missing, foreign, cut or damaged: a clear error, never a wrong number."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_rig import content, fill, make, read, run_child

from harness import ledger_layout as layout
from harness.ledger import (
    LedgerError,
    LedgerReader,
    Snapshot,
)

# --- files that are no ledger, or no longer one


def test_missing_short_foreign_and_other_version(tmp_path: Path) -> None:
    good = make(tmp_path).path.read_bytes()
    path = tmp_path / "other"
    with pytest.raises(LedgerError, match=r"other: expected a ledger, cannot open it \(No such file"):
        LedgerReader.open(path)
    for text, message in (
        (b"", r"expected a ledger of \d+ bytes, it has 0"),
        (good[:100], "damaged: the header"),
        (good[:5000], r"expected a ledger of \d+ bytes, it has 5000; .* copy it again whole"),
        (good + b"x", r"expected a ledger of \d+ bytes"),
        (b'{"schema": 1}' * 1000, "not a ledger"),
        (good[:8] + struct.pack("<I", 2) + good[12:], "expected ledger version 4, found 2; read it with"),
        (good[:30] + b"\xff" + good[31:], "damaged: the header"),
    ):
        path.write_bytes(text)
        with pytest.raises(LedgerError, match=message) as caught:
            LedgerReader.open(path)
        assert str(path) in str(caught.value)


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    writer = make(tmp_path)
    copy = tmp_path / "copy"
    copy.write_bytes(writer.path.read_bytes())
    reader = LedgerReader.open(copy)
    os.truncate(copy, 5000)
    with pytest.raises(LedgerError, match="cut short"):
        reader.snapshot()
    reader.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Snapshot]:
    directory = tmp_path_factory.mktemp("filled")
    writer = make(directory)
    for _ in range(70):
        fill(writer)
    return directory, writer.path.read_bytes(), read(writer)


def places() -> st.SearchStrategy[int]:
    """Any byte of the file, and often one of a slot that is read."""
    sections = [
        layout.LAYOUT.host_phase,
        layout.LAYOUT.decisions,
        layout.LAYOUT.enqueue["compute"],
        layout.LAYOUT.complete["compute"],
        layout.LAYOUT.external_waits,
        layout.LAYOUT.external_record[3],
        layout.LAYOUT.register[0],
        layout.LAYOUT.register[1],
        layout.LAYOUT.collective[0],
        layout.LAYOUT.group_log[0],
    ]
    in_slots = st.sampled_from(sections).flatmap(
        lambda section: st.builds(
            lambda slot, byte: section.offset + slot * section.stride + byte,
            st.integers(0, section.slots - 1),
            st.integers(0, 31),
        )
    )
    return st.one_of(st.integers(0, layout.LAYOUT.file_bytes - 1), in_slots, in_slots)


@given(at=places(), flip=st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_one_damaged_byte_never_gives_a_wrong_number(
    filled: tuple[Path, bytes, Snapshot], at: int, flip: int
) -> None:
    directory, good, snapshot = filled
    path = directory / "damaged"
    bad = bytearray(good)
    bad[at] ^= flip
    path.write_bytes(bad)
    try:
        found = read(path)
    except LedgerError as error:
        assert str(path) in str(error)
        assert (
            "damaged" in str(error) or "not a ledger" in str(error) or "expected ledger version" in str(error)
        )
    else:
        assert content(found) == content(snapshot)


def test_damage_is_found_where_it_matters(filled: tuple[Path, bytes, Snapshot]) -> None:
    """The negative control of the test above: in the newest record of a section, every byte counts."""
    directory, good, snapshot = filled
    path = directory / "damaged"
    section = layout.LAYOUT.enqueue["compute"]
    newest = (snapshot.streams["compute"].enqueued - 1) % section.slots
    at = section.offset + newest * section.stride
    nbytes = layout.SLOT_HEAD.unpack_from(good, at)[2]
    for byte in range(layout.SLOT_HEAD.size + nbytes):
        bad = bytearray(good)
        bad[at + byte] ^= 0x40
        path.write_bytes(bad)
        with pytest.raises(LedgerError, match=r"damaged: section compute\.enqueue"):
            read(path)


def test_a_record_half_written_when_the_writer_stopped(tmp_path: Path) -> None:
    writer = make(tmp_path)
    for number in range(1, 300):
        writer.enqueue("compute", f"op {number}", "x.py:1")
    section = layout.LAYOUT.enqueue["compute"]
    at = section.offset + 299 % section.slots * section.stride
    copy = tmp_path / "copy"
    torn = bytearray(writer.path.read_bytes())
    struct.pack_into("<Q", torn, at, 2 * 300 - 1)
    torn[at + 16 : at + 40] = b"x" * 24
    copy.write_bytes(torn)
    assert read(copy).streams["compute"].enqueued == 299
    # Here only the last store is missing: the record is whole.
    writer.enqueue("compute", "op 300", "x.py:1")
    whole = bytearray(writer.path.read_bytes())
    struct.pack_into("<Q", whole, at, 2 * 300 - 1)
    copy.write_bytes(whole)
    assert read(copy).streams["compute"].recent[-1].label == "op 300"


# --- creation


def test_creation_fails_at_once_when_there_is_no_room(tmp_path: Path) -> None:
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from harness.ledger import LedgerError, LedgerWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    LedgerWriter.create(Path(sys.argv[1]), rank=0, world=1, node='n', device='sim')\n"
        "except LedgerError as error:\n"
        "    print(error)\n"
    )
    path = tmp_path / "rank0.ledger"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = run_child(program, str(path))
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout and "cannot make a ledger" in done.stdout and "free space" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_creation_names_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="No such file or directory"):
        make(tmp_path / "no" / "such")
    with pytest.raises(LedgerError, match="cannot append decisions"):
        make(tmp_path, decisions_path=tmp_path / "no" / "d.jsonl")


def test_all_blocks_are_reserved(tmp_path: Path) -> None:
    status = make(tmp_path).path.stat()
    assert status.st_size == layout.LAYOUT.file_bytes
    assert status.st_blocks * 512 >= layout.LAYOUT.file_bytes
