"""Captured graphs: the collectives that a capture saw are enqueued again by every replay.

Wraps ``capture_begin``, ``capture_end`` and ``replay`` of the device module's graph class. What is enqueued
during a capture does not run: it is remembered with the graph, and each replay records it as one entry a group,
operation ``graph``. Not here: where an engine captures and replays.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from .patching import guarded
from .recorder import Recorder
from .status import Status
from .streams import Streams

CLASSES = ("CUDAGraph", "NPUGraph")


def install(module: Any, recorder: Recorder, streams: Streams, status: Status) -> None:
    """``module``: torch.cuda or torch.npu."""
    graph_class = next((getattr(module, name) for name in CLASSES if hasattr(module, name)), None)
    if graph_class is None:
        status.hook("graphs", "missing: the device module has no graph class")
        return
    captured: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()

    def begin(*_: Any, **__: Any) -> None:
        streams.capturing = True
        recorder.captured = {}

    def end(_: Any, graph: Any, *__: Any, **___: Any) -> None:
        streams.capturing = False
        captured[graph] = recorder.captured or {}
        recorder.captured = None

    def replay(graph: Any, *_: Any, **__: Any) -> None:
        for place, count in captured.get(graph, {}).items():
            recorder.replayed(place, count)

    hooks: dict[str, dict[str, Any]] = {
        "capture_begin": {"before": begin},
        "capture_end": {"after": end},
        "replay": {"before": replay},
    }
    for name, hook in hooks.items():
        original = getattr(graph_class, name)
        setattr(graph_class, name, guarded(original, f"graphs.{name}", status, **hook))
    status.hook("graphs", "on")
