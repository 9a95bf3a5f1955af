"""Directories in, what the gate looks at out: stored runs, and what ``hangrig litmus`` stored.

Only what is recorded is read, leniently: a fact that is not there is unknown and never guessed. Not here: what may
be counted together (``platforms.py``) and any rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.arms import arm_string
from harness.gate.model import SHARED, Evidence, GateError, LitmusTest, Pool, Trial
from harness.run_list import COMPARED_TABLES
from harness.scenario import scenario_files
from harness.store import StoredRun, StoredTrial, StoreError, read_run
from harness.toggles import BUILTIN

LITMUS = "litmus.json"
_DRIVERS: Mapping[str, tuple[str, ...]] = {
    "device_name": ("nvidia devices", "ascend devices"),
    "driver": ("nvidia driver", "ascend driver"),
    "firmware": ("ascend firmware",),
    "cann": ("cann",),
}
"""Facts of a platform by the names under which run.json has them (``environment.py``)."""
_PLATFORM = ("device_name", "driver", "firmware", "cann", "cuda", "torch", "torch_npu")
"""Facts that a litmus result may state itself."""


def read_evidence(paths: Sequence[Path]) -> tuple[Evidence, ...]:
    """Each directory once, however often it is named. Raises GateError for one that is neither, and for copies of
    one run: their trials would count twice."""
    real = dict.fromkeys(path.resolve() for path in paths)
    found = [read_litmus(path) if (path / LITMUS).is_file() else _read_run(path) for path in real]
    known: dict[str, Evidence] = {}
    for one in found:
        if one.identity and (other := known.setdefault(one.identity, one)) is not one:
            raise GateError(f"{other.path} and {one.path} are copies of one run; give one of them")
    return tuple(found)


# --- litmus ------------------------------------------------------------------------------------------------


def read_litmus(path: Path) -> Evidence:
    """What ``hangrig litmus`` left in ``path``. Raises GateError where it cannot be read."""
    document = _document(path / LITMUS)
    said = _table(document, "platform")
    facts = _recorded(document, _table(document, "versions"))
    facts |= {name: str(said[name]) for name in _PLATFORM if isinstance(said.get(name), str)}
    device = str(document.get("device", "unknown"))
    model = document.get("model")
    if device == "sim" and isinstance(model, str):
        facts["memory_model"] = model
    return Evidence(
        path=str(path),
        kind="litmus",
        device=device,
        # In doubt it is one: a simulation opens no gate.
        simulation=device == "sim" or document.get("simulation") is not False,
        facts=facts,
        tests=tuple(_test(row, shared=said.get("shared") is True) for row in _rows(document, "tests")),
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_bytes())
    except OSError as error:
        raise GateError(f"{path}: cannot be read: {error.strerror}; run hangrig litmus again") from error
    except (ValueError, RecursionError) as error:
        raise GateError(f"{path}: damaged or half-written: {error}; run hangrig litmus again") from error
    if not isinstance(loaded, dict):
        raise GateError(f"{path}: holds a {type(loaded).__name__}, not an object; run hangrig litmus again")
    return loaded


def _test(row: Mapping[str, Any], *, shared: bool) -> LitmusTest:
    """``shared``: two ranks had one device, so gloo carried the collectives. What it does not show says nothing."""
    observed = row.get("observed")
    counts = observed if isinstance(observed, dict) else {}
    blind = shared and row.get("family") == "groups"
    return LitmusTest(
        name=str(row.get("name", "?")),
        forbidden=row.get("forbidden") is True,
        k=_count(counts.get("k")),
        n=_count(counts.get("n")),
        power=row.get("power") is True and not blind,
        verdict=str(row.get("verdict", "unknown")),
        why="two ranks shared a device, and gloo is not its collectives"
        if blind
        else str(row.get("why", "")),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


# --- runs --------------------------------------------------------------------------------------------------


def _read_run(path: Path) -> Evidence:
    try:
        stored = read_run(path)
    except StoreError as error:
        raise GateError(f"{error}; give directories of hangrig run and hangrig litmus") from error
    run = stored.run
    device = str(run.get("device", "unknown"))
    pools = _pools(stored)
    argv = run.get("argv")
    again = isinstance(argv, list) and argv[:1] == ["rerun"]
    notes = [*stored.problems]
    if not stored.finished:
        notes.append("the run never finished: its judged trials count")
    if lost := sum(one.trial is None for one in stored.trials):
        notes.append(f"{lost} trials without a readable trial.json do not count")
    simulation = device == "sim" or run.get("simulation") is not False
    return Evidence(
        path=str(path),
        kind="run",
        device=device,
        simulation=simulation,
        facts=_run_facts(stored),
        trials=tuple(
            trial
            for one in stored.trials
            if (trial := _trial(one, str(path), pools, again=again)) is not None
        ),
        notes=tuple(notes),
        identity=json.dumps([run.get(key) for key in ("name", "started_utc", "driver", "argv")]),
    )


def _recorded(document: Mapping[str, Any], versions: Mapping[str, Any]) -> dict[str, str]:
    """What run.json and litmus.json record alike: drivers, the processor's kind, and versions."""
    drivers, machine = _table(document, "drivers"), _table(document, "machine")
    facts = {
        fact: str(drivers[name])
        for fact, names in _DRIVERS.items()
        for name in names
        if isinstance(drivers.get(name), str)
    }
    if "device_name" in facts:  # "16 x Ascend910": how many there are is no part of what they are
        facts["device_name"] = re.sub(r"\b\d+ x ", "", facts["device_name"])
    if isinstance(machine.get("architecture"), str):
        facts["architecture"] = machine["architecture"]
    return facts | {
        name: versions[name] for name in ("torch", "torch_npu") if isinstance(versions.get(name), str)
    }


def _run_facts(stored: StoredRun) -> dict[str, str]:
    """The platform of a run. An engine in an environment of its own has its own torch."""
    run = stored.run
    foreign = any(table.get("python") for table in _targets(stored))
    facts = _recorded(run, _table(run, "engine_versions" if foreign else "versions"))
    models = sorted({str(_table(table, "sim").get("memory_model")) for table in _tables(stored).values()})
    if run.get("device") == "sim" and len(models) == 1:
        facts["memory_model"] = models[0]
    engines = [(trial.engine or {}).get("engine") for trial in stored.trials]
    if said := sorted({one for one in engines if isinstance(one, str)}):
        facts["engine"] = ", ".join(said)
    return facts


def _targets(stored: StoredRun) -> list[Mapping[str, Any]]:
    return [_table(table, "target") for table in _tables(stored).values()]


def _tables(stored: StoredRun) -> dict[str, dict[str, Any]]:
    """The scenarios of a run by name, as run.json keeps them; what cannot be read is left out."""
    found: dict[str, dict[str, Any]] = {}
    for row in _rows(stored.run, "scenarios"):
        try:
            table = json.loads(row["text"])
            found[str(row["name"])] = table if isinstance(table, dict) else {}
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _pools(stored: StoredRun) -> dict[str, tuple[Pool, dict[str, Any]]]:
    """By scenario: its pool, and the scenario's tables."""
    settings = stored.run.get("settings")
    found = {}
    for name, table in _tables(stored).items():
        own = {key: table.get(key) for key in COMPARED_TABLES if key != "toggles"}
        target = _table(table, "target")
        own["target"] = {key: value for key, value in target.items() if key not in ("python", "start_s")}
        if str(target.get("name", BUILTIN)) == BUILTIN:  # the engine is part of hangrig
            own["hangrig"] = _table(stored.run, "versions").get("hangrig")
        if stored.run.get("device") != "sim":
            del own["sim"]
        found[name] = (
            Pool(
                scenario=name,
                definition=json.dumps(own, sort_keys=True),
                model=_model(_table(table, "model")),
                source=_source(name, stored.run.get("argv")),
                settings=tuple(str(one) for one in settings) if isinstance(settings, list) else (),
                foreign="hangrig" not in own,
            ),
            table,
        )
    return found


def _model(table: Mapping[str, Any]) -> str:
    return str(table.get("directory") or table.get("preset") or "of the engine's choice")


def _source(name: str, argv: Any) -> str:
    """What to type for a scenario: the name of one that comes with hangrig, else the file that was named."""
    if name in scenario_files():
        return name
    files = [word for word in argv if str(word).endswith(".toml")] if isinstance(argv, list) else []
    return str(files[0]) if len(files) == 1 else f"{name}.toml"


def _trial(
    stored: StoredTrial, run: str, pools: Mapping[str, tuple[Pool, dict[str, Any]]], *, again: bool
) -> Trial | None:
    """None for a trial without a toggle ``pinned``, which is of no arm of the gate, or that nobody judged."""
    document = stored.trial or {}
    resolved = {
        str(name): str(row.get("resolved"))
        for name, row in _table(document, "resolved").items()
        if isinstance(row, dict)
    }
    if "pinned" not in resolved:
        return None
    name = str(document.get("scenario", ""))
    pool, table = pools.get(name, (Pool(name, "", "unknown"), {}))
    if (defect := resolved.get("defect", "none")) != "none":  # each simulates another platform
        pool = replace(pool, definition=f"{pool.definition} {defect}")
    seed = document.get("seed")
    checks = {row.get("name"): row.get("verdict") for row in _rows(document, "checks")}
    pressed = checks.get("pressure") == "pass" and _count(_table(table, "require").get("retractions")) > 0
    diagnosis = stored.diagnosis or {}
    compared = _count(document.get("tokens_compared"))
    if checks.get("tokens") == "skipped":  # it was the first of its seed: the others are held against it
        compared = 0
    return Trial(
        id=stored.id,
        run=run,
        pool=pool,
        pinned=resolved["pinned"],
        others=arm_string({name: value for name, value in resolved.items() if name != "pinned"}),
        seed=seed if isinstance(seed, int) else None,
        outcome=str(document.get("outcome", "unknown")),
        weak=SHARED if _shared(document) else "" if pressed else "too few retractions, or none required",
        tokens_differ=_count(document.get("tokens_differ")),
        tokens_compared=compared,
        signature=str(diagnosis.get("signature", "")),
        spoiled="a rerun: it was chosen by what it had done before" if again else _spoiled(document, table),
    )


def _spoiled(trial: Mapping[str, Any], scenario: Mapping[str, Any]) -> str:
    fault = _table(_table(trial, "resolved"), "fault").get("resolved")
    if scenario.get("faults") and fault != "off":
        return "its scenario breaks the engine on purpose"
    return ""


def _shared(trial: Mapping[str, Any]) -> bool:
    places = [
        (rank.get("node"), device)
        for rank in _rows(trial, "ranks")
        if re.fullmatch(r"(npu|cuda):\d+", device := str(rank.get("device")))
    ]
    return len(set(places)) < len(places)


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def _rows(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = document.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []
