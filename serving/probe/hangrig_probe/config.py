"""What the launcher tells the probe: one JSON file, named by the environment variable HANGRIG_PROBE.

::

    {"schema": 1, "folder": "/run/probe", "node": "n0", "device": "cpu|cuda|npu", "world": 2,
     "pinned": null|"pageable"|"pinned"|"pinned_sync"|"pinned_snapshot", "tracer_pid": int|null,
     "faults": [tables of the scenario, in order]}

Everything that the probe writes goes into ``folder``. Not here: what the values do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HANGRIG_PROBE"
SCHEMA = 1
DEVICES = ("cpu", "cuda", "npu")
POLICIES = ("pageable", "pinned", "pinned_sync", "pinned_snapshot")


class ConfigError(Exception):
    """The file is missing or damaged. The message names it, what was wrong, and what to do."""


@dataclass(frozen=True)
class Config:
    folder: Path
    node: str
    device: str
    world: int
    pinned: str | None = None
    tracer_pid: int | None = None
    faults: tuple[Mapping[str, Any], ...] = ()
    """In the order of the scenario: a fault is known by its place."""


def load(environ: Mapping[str, str]) -> Config | None:
    """None where the variable is not set. Raises ConfigError."""
    name = environ.get(VARIABLE)
    if not name:
        return None
    path = Path(name)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read what {VARIABLE} names ({error.strerror}); the launcher writes it "
            "before it starts the engine"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); let the launcher write it again") from error
    return _checked(path, document)


def _checked(path: Path, document: Any) -> Config:
    def wrong(key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(
            f"{path}: {key}: expected {allowed}, found {value!r}; let the launcher write it again"
        )

    def a(kind: type, key: str, allowed: str) -> Any:
        value = document.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise wrong(key, value, allowed)
        return value

    if not isinstance(document, dict):
        raise wrong("document", document, "an object")
    if document.get("schema") != SCHEMA:
        raise wrong("schema", document.get("schema"), str(SCHEMA))
    device = a(str, "device", " or ".join(DEVICES))
    if device not in DEVICES:
        raise wrong("device", device, " or ".join(DEVICES))
    pinned = document.get("pinned")
    if pinned is not None and pinned not in POLICIES:
        raise wrong("pinned", pinned, "null or " + " or ".join(POLICIES))
    tracer_pid = document.get("tracer_pid")
    if tracer_pid is not None and not isinstance(tracer_pid, int):
        raise wrong("tracer_pid", tracer_pid, "null or a number")
    faults = document.get("faults", [])
    if not isinstance(faults, list) or not all(isinstance(one, dict) and "name" in one for one in faults):
        raise wrong("faults", faults, "a list of tables with a name")
    return Config(
        folder=Path(a(str, "folder", "a path")),
        node=a(str, "node", "a name"),
        device=device,
        world=a(int, "world", "a number of ranks"),
        pinned=pinned,
        tracer_pid=tracer_pid,
        faults=tuple(faults),
    )
