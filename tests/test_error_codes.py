"""Error codes in logs: what is one, what it means, whom it names. Lines are of the shape of public reports'."""

from __future__ import annotations

import pytest

from harness.error_codes import find_codes, first_hand, known_codes, meaning_of

EI0002 = (
    "EI0002: [PID: 13075] 2025-06-25-10:45:23.586.187 The wait execution of the Notify register times out. Reason: "
    "The Notify register has not received the Notify record from remote rank: [{rank}]. base information: "
    "[streamID:[1], taskID[8318285], tag[AllReduce_group_name_710], AlgType(level 0-1-2):[fullmesh-ring-NHR].]"
)


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        (EI0002.format(rank=3), ["EI0002"]),
        ("[PID: 3480365] 2025-12-24-14:10:31.094.189 Execution_Error_SDMA(EI0012): SDMA memory copy", ["EI0012"]),
        ("EI0006: [PID: 176930] 2025-07-01-00:40:04 Getting socket times out. Reason: Remote", ["EI0006"]),
        ("EI0031: something that came later", ["EI0031"]),
        ("NPU function error: AclrtSynchronizeStreamWithTimeout(copy_stream), error code is 507048", ["507048"]),
        ("EH9999: synchronize stream failed, runtime result = 507046[FUNC:ReportCallError]", ["EH9999", "507046"]),
        ("OPS function error: HcclAllgather, error code is 9", ["HCCL 9"]),
        ("HeartbeatAbnormal Cluster Exception Location[10.119.7.40/15], [Stuck Occurred]", ["HCCL stuck"]),
        ("kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=1122, GPU has fallen off the bus.", ["Xid 79"]),
        ("NVRM: Xid (PCI:0000:0f:00): 999, pid=1", ["Xid 999"]),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", ["CUDA illegal address"]),
        ("NCCL error: remote process exited or there was a network error, ncclRemoteError", ["ncclRemoteError"]),
        ("[rank1] Watchdog caught collective operation timeout: WorkHCCL(SeqNum=18,", ["torch timeout"]),
    ],
)  # fmt: skip
def test_what_a_line_says(line: str, codes: list[str]) -> None:
    assert [found.code for found in find_codes(line)] == codes


@pytest.mark.parametrize(
    "line",
    [
        "block 507048 of the cache was freed",
        "https://example.org/photo-1507048331197-7d4ac70811cf",
        "LTEI00023 and MEI00021 are no codes",
        "all is well with nccl and cuda",
        "error code is 1507048",
        "",
    ],
)
def test_numbers_that_are_no_codes(line: str) -> None:
    assert find_codes(line) == ()


@pytest.mark.parametrize(("rank", "peer"), [("3", 3), ("unknown", None), ("4294967295", None)])
def test_the_peer_that_a_rank_waited_for(rank: str, peer: int | None) -> None:
    (found,) = find_codes(EI0002.format(rank=rank))
    assert found.peer == peer and found.meaning.role == "waited"
    assert ("for rank 3 of its communicator" in found.words()) is (peer == 3)


def test_codes_are_counted_and_come_in_order() -> None:
    text = "\n".join(
        [
            "nothing yet",
            "EI9999: Inner Error!",
            EI0002.format(rank="unknown"),
            EI0002.format(rank=1),
            "x" * 1000 + " EI9999",
        ]
    )
    first, second = find_codes(text)
    assert (first.code, first.number, first.count) == ("EI9999", 2, 2)
    assert (second.code, second.count, second.peer) == ("EI0002", 2, 1)
    assert len(second.line) <= 400 and "2 times" in second.words()


def test_a_fault_is_told_from_a_wait() -> None:
    text = f"{EI0002.format(rank=0)}\nNVRM: Xid (PCI:0000:01:00): 48, pid=1\n"
    assert [found.code for found in first_hand(find_codes(text))] == ["Xid 48"]


def test_the_codes_of_the_contract_are_explained() -> None:
    """PLATFORMS.md names these."""
    for code in (
        "EI0002", "EI0004", "EI0006", "EI0009", "EI0010", "EI0012", "EI0013", "EI9999", "507048", "507011",
    ):  # fmt: skip
        assert code in known_codes()
    for code, meaning in known_codes().items():
        assert meaning.title and meaning.means and meaning.source, code
    assert meaning_of("EI0099").title == "error of HCCL"


def test_every_code_of_the_table_can_be_found() -> None:
    """A meaning that no line leads to explains nothing."""
    lines = {
        "CUDA illegal address": "cudaErrorIllegalAddress",
        "CUDA launch timeout": "cudaErrorLaunchTimeout",
        "CUDA launch failure": "cudaErrorLaunchFailure",
        "CUDA assert": "cudaErrorAssert",
        "CUDA ECC": "cudaErrorECCUncorrectable",
        "CUDA NVLink": "cudaErrorNvlinkUncorrectable",
        "CUDA out of memory": "CUDA out of memory",
        "HCCL stuck": "Cluster Exception, type Stuck",
        "torch timeout": "Watchdog caught collective operation timeout: Work",
    }
    for code in known_codes():
        line = lines.get(code)
        if line is None:
            family, _, number = code.partition(" ")
            line = {
                "HCCL": f"HcclAllReduce, error code is {number}",
                "Xid": f"NVRM: Xid (PCI:0000:01:00): {number}, pid=1",
            }.get(family, f"error code is {code}" if code.isdigit() else f"{code}: said")
        assert code in [found.code for found in find_codes(line)], line
