"""What the probe's tests share: a probe with a folder, its status and ledgers, and torch put back as it was."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.ledger import LedgerReader, Snapshot
from serving.probe.hangrig_probe.config import Config
from serving.probe.hangrig_probe.probe import Probe
from serving.probe.hangrig_probe.status import Status


def config(folder: Path, *, device: str = "cpu", pinned: str | None = None, faults: Any = ()) -> Config:
    return Config(folder, "node-a", device, 2, pinned, None, tuple(faults))


def probe(folder: Path, **more: Any) -> Probe:
    return Probe("fake", config(folder, **more), Status("fake 1"))


def seated(folder: Path, seat: int | str = 0, role: str = "rank", **more: Any) -> Probe:
    made = probe(folder, **more)
    made.take_seat(seat, role=role)
    return made


def status(folder: Path, stem: str = "rank0") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / f"{stem}.probe.json").read_text())
    return document


def ledger(folder: Path, stem: str = "rank0") -> Snapshot:
    reader = LedgerReader.open(folder / f"{stem}.ledger")
    try:
        return reader.snapshot()
    finally:
        reader.close()


def counts(snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """Enqueued and completed, by group."""
    return {name: (group.enqueued, group.completed) for name, group in snapshot.groups.items()}


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """Undoes what a seat of role rank does to torch.distributed."""
    import torch.distributed as dist

    kept = {name: value for name, value in vars(dist).items() if callable(value)}
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(dist, name, value)


@contextmanager
def modules(sources: Mapping[str, str]) -> Iterator[None]:
    """Modules made of their source text, importable for a while, with packages where a name has a dot."""
    before = dict(sys.modules)
    try:
        for name, source in sources.items():
            parts = name.split(".")
            for depth in range(1, len(parts)):
                package = ".".join(parts[:depth])
                if package not in sys.modules:
                    sys.modules[package] = types.ModuleType(package)
                    sys.modules[package].__path__ = []
            module = types.ModuleType(name)
            sys.modules[name] = module
            exec(source, vars(module))
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in {one.split(".")[0] for one in sources}:
                del sys.modules[name]
