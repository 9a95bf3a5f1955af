"""What Ascend's ``npu-smi`` prints, as values. Pure, and lenient: a row that is not understood is left out, and
said.

Shapes are those of public reports and manuals: the table of ``npu-smi info`` as in vllm-ascend's issues (npu-smi
24.1 to 26.0; a 910C card has two chips, and then a column Phy-ID), ``Name : value`` lines as in CANN's npu-smi
reference. Which commands are run is in `device_tools.py`, what is wrong with the values the doctor's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_BUS = re.compile(r"^([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d$|^NA$")
_FIELD = re.compile(r"^\s*([^:|+]+?)\s*:\s*(.*?)\s*$")
HEALTHY = "OK"
STATES = ("OK", "Warning", "Alarm", "Critical", "UNKNOWN")
"""Of a chip (npu-smi reference, query of the health)."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One row pair of the table. ``npu``: the card. ``physical``: of the node, where the tool has that column.
    Memory is HBM where the chip has it, in MiB; None: not printed."""

    npu: int
    chip: int
    physical: int | None
    name: str
    health: str
    used_mib: int | None
    total_mib: int | None

    @property
    def words(self) -> str:
        return f"NPU {self.npu} chip {self.chip}"


@dataclass(frozen=True, slots=True)
class ChipProcess:
    """A process that holds memory of a chip; ``name`` may be empty."""

    npu: int
    chip: int
    pid: int
    name: str
    used_mib: int | None


@dataclass(frozen=True, slots=True)
class NpuTable:
    """``unread``: rows of the table that made no sense."""

    tool: str = ""
    driver: str = ""
    chips: tuple[Chip, ...] = ()
    processes: tuple[ChipProcess, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def cards(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(chip.npu for chip in self.chips))


@dataclass(frozen=True, slots=True)
class ChipHealth:
    """``code`` and ``information`` are empty where the tool says NA, or nothing."""

    status: str
    code: str = ""
    information: str = ""


@dataclass(slots=True)
class _Reading:
    chips: list[Chip] = field(default_factory=list)
    processes: list[ChipProcess] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    card: tuple[int, str, str] | None = None
    """Number, name and health of the upper row of a pair, until its lower row comes."""


def parse_table(text: str) -> NpuTable:
    """``npu-smi info``. Never raises; a text that holds no such table gives an empty one."""
    reading = _Reading()
    tool = re.search(r"npu-smi\s+(\S+)", text)
    driver = re.search(r"\bVersion:\s*(\S+)", text)
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 4:
            _process(cells, line, reading)
        elif len(cells) == 3:
            _chip_row(cells, line, reading)
    return NpuTable(
        tool[1] if tool else "",
        driver[1] if driver else "",
        tuple(reading.chips),
        tuple(reading.processes),
        tuple(reading.unread),
    )


def _chip_row(cells: list[str], line: str, reading: _Reading) -> None:
    first, second, third = cells
    words = first.split()
    if not words or not words[0].isdecimal():
        return  # a heading
    if reading.card is not None and _BUS.match(second):
        npu, name, health = reading.card
        physical = int(words[1]) if len(words) > 1 and words[1].isdecimal() else None
        pairs = _PAIR.findall(third)
        used, total = pairs[-1] if pairs else (None, None)
        # A chip without HBM, or of which it is not told, prints 0 / 0 there.
        if total is not None and int(total) == 0 and len(pairs) > 1:
            used, total = pairs[-2]
        reading.chips.append(
            Chip(npu, int(words[0]), physical, name, health, _whole(used), _whole(total) or None)
        )
        reading.card = None
    elif second in STATES or (second.isalpha() and len(words) > 1):
        reading.card = (int(words[0]), " ".join(words[1:]), second)
    else:
        reading.unread.append(line.strip())


def _process(cells: list[str], line: str, reading: _Reading) -> None:
    where = cells[0].split()
    if not where or not where[0].isdecimal():
        return  # a heading
    if len(where) < 2 or not where[1].isdecimal() or not cells[1].isdecimal():
        reading.unread.append(line.strip())
        return
    reading.processes.append(
        ChipProcess(int(where[0]), int(where[1]), int(cells[1]), cells[2], _whole(cells[3]))
    )


def parse_health(text: str) -> ChipHealth | None:
    """``npu-smi info -t health -i CARD -c CHIP``. Without ``-c`` the tool lists the card's controller (MCU) beside
    its chips; then the worst of the chips counts. None: the text does not say."""
    fields = tuple(_fields(text))
    for name, value in fields:
        if name == "Health Status":
            said = dict(fields)
            return ChipHealth(value, _told(said.get("Error Code")), _told(said.get("Error Information")))
    found: list[str] = []
    in_chip = False
    for name, value in fields:
        if name == "Chip ID":
            in_chip = True
        elif name == "Health" and in_chip:
            found.append(value)
            in_chip = False
    worst = max(found, key=lambda one: STATES.index(one) if one in STATES else len(STATES), default=None)
    return None if worst is None else ChipHealth(worst)


def parse_ecc(text: str) -> dict[str, int]:
    """``npu-smi info -t ecc -i CARD``: the greatest count of each name over the card's chips."""
    found: dict[str, int] = {}
    for name, value in _fields(text):
        if " Bit " in name and value.isdecimal():
            found[name] = max(found.get(name, 0), int(value))
    return found


def _fields(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        found = _FIELD.match(line)
        if found is not None:
            yield found[1], found[2]


def _told(value: str | None) -> str:
    return "" if value is None or value.upper() in ("NA", "N/A", "-") else value


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
