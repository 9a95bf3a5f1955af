"""Evidence for the gate: made up in memory for the rule, and as stored runs and litmus results for the readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_fixture import RunBuilder, latencies

from harness.gate.model import Document, Evidence, LitmusTest, Pool, Trial
from harness.gate.needs import PATHS, forbidden_on
from harness.store import write_json

NPU = {
    "device_name": "Ascend910",
    "driver": "25.2.0",
    "cann": "8.2.RC1",
    "torch": "2.7.1",
    "torch_npu": "2.7.1",
}
POOL = Pool("dp-pinned-gate", "{}", "lite", source="dp-pinned-gate")
RATIO = {"ratio": 0.7, "low": 0.6, "high": 0.8, "verdict": "faster", "why": ""}
COMPARED: Document = {
    "paths": [{"path": path, "against": "pageable", "ratios": {"pinned": RATIO}} for path in PATHS]
}


def trial(pinned: str, seed: int, outcome: str = "healthy", **changes: Any) -> Trial:
    fields: dict[str, Any] = {
        "id": f"{pinned}-{seed}", "run": "runs/a", "pool": POOL, "others": "graph=on", "tokens_compared": 750,
    }  # fmt: skip
    return Trial(pinned=pinned, seed=seed, outcome=outcome, **{**fields, **changes})


def arm(pinned: str, trials: int, hangs: int = 0, **changes: Any) -> list[Trial]:
    """``trials`` of one arm, seed by seed; the first ``hangs`` of them hang."""
    return [trial(pinned, seed, "hang" if seed < hangs else "healthy", **changes) for seed in range(trials)]


def four(trials: int, pageable: int = 0, pinned: int = 0, sync: int = 0, snapshot: int = 0) -> list[Trial]:
    """Four arms of so many trials, with so many hangs in each."""
    hangs = {"pageable": pageable, "pinned": pinned, "pinned_sync": sync, "pinned_snapshot": snapshot}
    return [one for value, number in hangs.items() for one in arm(value, trials, number)]


def run(trials: Sequence[Trial], *, device: str = "npu", path: str = "runs/a", **changes: Any) -> Evidence:
    fields: dict[str, Any] = {"simulation": device == "sim", "facts": NPU, "latency": COMPARED}
    return Evidence(path, "run", device, trials=tuple(trials), **{**fields, **changes})


def litmus(
    *, device: str = "npu", change: Callable[[LitmusTest], LitmusTest] = lambda test: test, **changes: Any
) -> Evidence:
    """All forbidden tests of a device, Never in 300 with power, but for what ``change`` makes of them."""
    tests = [LitmusTest(name, True, 0, 300, True, "pass") for name in sorted(forbidden_on("npu"))]
    tests.append(LitmusTest("copy-race", False, 120, 300, True, "pass"))
    fields: dict[str, Any] = {"simulation": device == "sim", "facts": NPU}
    return Evidence(
        changes.pop("path", "runs/litmus"),
        "litmus",
        device,
        tests=tuple(map(change, tests)),
        **{**fields, **changes},
    )


# --- on disk -----------------------------------------------------------------------------------------------

TEXT = {
    "name": "dp-pinned-hang", "target": {"name": "builtin", "ranks": 2}, "model": {"preset": "lite"},
    "engine": {"retract_every": 4}, "require": {"retractions": 5}, "sim": {"memory_model": "cann"}, "faults": [],
}  # fmt: skip
DRIVERS = {"ascend devices": "16 x Ascend910", "ascend driver": "25.2.0", "cann": "8.2.RC1"}


@dataclass(frozen=True, slots=True)
class Arms:
    """Hangs of each value in a stored run; None: the arm was not run."""

    trials: int
    pageable: int | None = 0
    pinned: int | None = 0
    pinned_sync: int | None = None
    pinned_snapshot: int | None = None


def stored_run(
    out: Path,
    arms: Arms,
    *,
    device: str = "npu",
    first_seed: int = 0,
    text: Mapping[str, Any] = TEXT,
    **fields: Any,
) -> Path:
    """A run as ``hangrig run`` leaves it. ``fields`` replace those of run.json."""
    builder = RunBuilder(out, device=device)
    for value in ("pageable", "pinned", "pinned_sync", "pinned_snapshot"):
        hangs = getattr(arms, value)
        for at in range(arms.trials if hangs is not None else 0):
            one = {"pinned": value}
            builder.trial(
                one, first_seed + at, "hang" if at < hangs else "healthy", device=device,
                latency=latencies(at, one),
            )  # fmt: skip
    versions = {"hangrig": "0.1.0", "torch": "2.7.1+cpu", "torch_npu": "2.7.1"}
    scenario = {"name": "dp-pinned-hang", "text": json.dumps(text), "arms": []}
    known = {"versions": versions, "drivers": DRIVERS, "scenarios": [scenario], "simulation": device == "sim"}
    return builder.finish(**{**known, **fields})


def stored_litmus(out: Path, name: str = "a-litmus", **fields: Any) -> Path:
    """A result as ``hangrig litmus`` stores it: every forbidden outcome Never in 300, with power."""
    folder = out / name
    folder.mkdir(parents=True)
    tests = [
        {
            "name": test.name, "forbidden": test.forbidden, "power": test.power, "verdict": test.verdict,
            "observed": {"k": test.k, "n": test.n, "low": 0.0, "high": 0.1, "confidence": 0.95},
        }
        for test in litmus().tests
    ]  # fmt: skip
    document = {"device": "npu", "model": "cann", "simulation": False, "tests": tests, "platform": NPU}
    write_json(folder / "litmus.json", {**document, **fields})
    return folder
