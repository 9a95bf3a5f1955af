"""Outputs of npu-smi and nvidia-smi, made after the shape of public ones, for the tests that read them.

The table of a 910C is that of npu-smi 24.1 to 26.0 in vllm-ascend's issues (two chips a card, a column Phy-ID);
that of a 910B has none. The health of a card lists its controller too. Values are ours."""

from __future__ import annotations

RULE = "+---------------------------+---------------+----------------------------------------------------+"
_HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.3.rc1                 Version: 25.3.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
_PROCESSES = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""


def npu_table(
    cards: int = 8,
    chips: int = 2,
    *,
    health: dict[tuple[int, int], str] | None = None,
    used: dict[tuple[int, int], int] | None = None,
    processes: tuple[tuple[int, int, int, str, int], ...] = (),
) -> str:
    """``npu-smi info`` of a node. ``health`` and ``used`` (MiB) by card and chip, OK and 3100 where nothing is
    said; ``processes``: card, chip, pid, name, MiB."""
    rows = []
    for card in range(cards):
        for chip in range(chips):
            at = (card, chip)
            state, held = (health or {}).get(at, "OK"), (used or {}).get(at, 3100)
            power = "166.5" if chip == 0 else "-"
            physical = str(card * chips + chip) if chips > 1 else ""
            rows += [
                f"| {card:<6}{'Ascend910':<20}| {state:<14}| {power:<12}36                0    / 0             |",
                f"| {chip:<6}{physical:<20}| 0000:{0x80 + card:02X}:00.0  | 0           0    / 0          "
                f"{held:<5}/ 65536         |",
                RULE,
            ]
    table = "".join(f"{row}\n" for row in rows)
    listed = "".join(
        f"| {card:<8}{chip:<18}| {pid:<14}| {name:<25}| {held:<24}|\n"
        for card, chip, pid, name, held in processes
    )
    idle = "".join(
        f"| No running processes found in NPU {card:<61}|\n"
        for card in range(cards)
        if card not in {one[0] for one in processes}
    )
    return _HEAD + table + _PROCESSES + listed + idle + RULE + "\n"


CHIP_OK = """
        Health Status                  : OK
        Error Code                     : NA
        Error Information              : NA
"""
CHIP_ALARM = """
        Health Status                  : Alarm
        Error Code                     : 80C98001
        Error Information              : node type=AIC, sensor type=RAS State, event state=module error
"""
CARD_HEALTH = """
        NPU ID                         : 0
        Chip Count                     : 2

        Chip ID                        : 0
        Health                         : OK
        Chip ID                        : 1
        Health                         : Warning

        Health                         : Critical
        Chip Name                      : MCU
"""
ECC = """
        NPU ID                                   : 0
        Chip Count                               : 2

        HBM Single Bit Error Count               : 3
        HBM Double Bit Error Count               : 0
        HBM Single Bit Aggregate Total Err Cnt   : 9
        HBM Double Bit Aggregate Total Err Cnt   : 0
        Chip ID                                  : 0

        HBM Single Bit Error Count               : 1
        HBM Double Bit Error Count               : {now}
        HBM Single Bit Aggregate Total Err Cnt   : 2
        HBM Double Bit Aggregate Total Err Cnt   : {ever}
        Chip ID                                  : 1
"""
GPUS = """\
index, uuid, name, driver_version, memory.total [MiB], memory.used [MiB], utilization.gpu [%], temperature.gpu, \
ecc.errors.uncorrected.volatile.total, ecc.errors.uncorrected.aggregate.total
0, GPU-aaaa0000-1111-2222-3333-444455556666, NVIDIA H200, 570.86.15, 143771, 1, 0, 29, 0, 0
1, GPU-bbbb0000-1111-2222-3333-444455556666, NVIDIA H200, 570.86.15, 143771, 91022, 100, 61, [N/A], 4
"""
GPU_PROCESSES = """\
gpu_uuid, pid, process_name, used_gpu_memory [MiB]
GPU-bbbb0000-1111-2222-3333-444455556666, 4711, /usr/bin/python3, 91000
"""
