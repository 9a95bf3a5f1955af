"""What a person sees while trials run: a live table on a terminal, plain lines elsewhere.

The table has a row a rank and stream: last operation completed, oldest unfinished one and since when. It reads
the ledgers as the agents do, and only on this node. Everything goes to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.ledger import LedgerError, LedgerReader
from harness.ledger_snapshot import Snapshot

_REFRESH_S = 0.25
_LATE_S = 1.0
"""An operation unfinished for longer is shown in red."""


class LiveView:
    """One a run. ``total``: trials in all."""

    def __init__(self, total: int) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._total = total
        self._number = 0
        self._live: Live | None = None
        self._ledgers: Mapping[int, Path] = {}
        self._readers: dict[int, LedgerReader] = {}
        self._title = ""
        self._open: str | None = None
        """Of the trial that has begun and not ended."""
        self._drawn_s = 0.0
        self._said: str | None = None

    def line(self, text: str) -> None:
        """One line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def begin(self, title: str, ledgers: Mapping[int, Path], *, counts: bool = True) -> None:
        """A trial starts. ``counts`` False: a reference, which is not one of the run's trials."""
        self._name(title, counts=counts)
        self._ledgers = ledgers
        self._said = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def never_began(self, title: str) -> None:
        """A trial that counts, and for which no ranks could be started; nothing if it did begin."""
        if self._open != title:
            self._name(title, counts=True)

    def _name(self, title: str, *, counts: bool) -> None:
        self._number += counts
        self._open = title
        self._title = f"[{self._number}/{self._total}] {title}" if counts else title

    def update(self, suspect: str | None) -> None:
        """Draws again if it is time."""
        if suspect is not None and suspect != self._said:
            self._said = suspect
            self.line(f"{self._title}: suspicion: {suspect}")
        if self._live is None or time.monotonic() - self._drawn_s < _REFRESH_S:
            return
        self._drawn_s = time.monotonic()
        self._live.update(table(self._title, self._snapshots(), time.monotonic_ns()))

    def judged(self, trial: Path) -> None:
        """``trial`` has been judged; for views that show more than this one."""

    def end(self, outcome: str) -> None:
        """The trial's last line."""
        self.close()
        self.line(f"{self._title}: {outcome}")
        self._open = None

    def close(self) -> None:
        """Gives the terminal back and lets the ledgers go; also where a trial did not come to its end."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _snapshots(self) -> list[Snapshot]:
        found = []
        for rank, path in sorted(self._ledgers.items()):
            try:
                if rank not in self._readers:
                    self._readers[rank] = LedgerReader.open(path)
                found.append(self._readers[rank].snapshot())
            except LedgerError:  # not made yet; the agents report what is wrong with a ledger
                continue
        return found


def table(title: str, snapshots: Sequence[Snapshot], now_ns: int) -> Table:
    """Rank × stream, as the ledgers have it. Narrow enough that 100 columns hold a site with its line."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    for name in ("rank", "stream", "done", "queued", "oldest unfinished operation", "since", "enqueued at"):
        justify: Literal["left", "right"] = "right" if name in ("rank", "done", "queued", "since") else "left"
        drawn.add_column(name, justify=justify, no_wrap=name == "enqueued at")
    for snapshot in snapshots:
        host = snapshot.host
        since = f"{(now_ns - host.since_ns) / 1e9:.1f} s"
        drawn.add_row(str(snapshot.header.rank), "host", f"step {host.step}", "", host.phase, since, "")
        for name, stream in snapshot.streams.items():
            oldest = stream.oldest
            waited_s = (now_ns - stream.oldest_since_ns) / 1e9 if oldest is not None else 0.0
            drawn.add_row(
                "",
                name,
                str(stream.completed),
                str(stream.enqueued - stream.completed),
                Text(oldest.label if oldest is not None else "", "bold red" if waited_s > _LATE_S else ""),
                f"{waited_s:.1f} s" if oldest is not None else "",
                Text(oldest.site if oldest is not None else "", "dim"),
            )
    return drawn
