"""What a process of an engine does, read from its stacks: waits for work, stands in a collective, computes. Pure.

One thread decides, the host thread. Its frames fall into *plumbing* (Python's library, torch, zmq, an engine's
layer of communication) and the engine's own code; the innermost frame of the engine's own is the *site*, and what
it called says what the thread waits for. A plain dump has no frame for a call into C (``time.sleep``,
``lock.acquire``): there native frames or the kernel's word for the thread's system call decide, and without either
it stays ``unknown``.

Not here: the places by name (``stack_sites.py``), who is to blame (``diagnosis_stacks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.stack_sites import (
    ASKED,
    AT_WORK,
    BETWEEN,
    COLLECTIVE_FILES,
    COLLECTIVE_NATIVE,
    DEFAULTS,
    IN_C,
    KERNEL,
    LIBRARY,
    LOOP_FILES,
    NATIVE_OPERATION,
    OPERATION,
    PLUMBING_CALLS,
    SITES,
    STARTING,
    Asked,
    PlaceKind,
)
from harness.stacks import Frame, ProcessStacks, ThreadStack, same_place

__all__ = ["HELD", "RUNNING", "WAITING", "Doing", "PlaceKind", "deciding_thread", "doing"]

WAITING: frozenset[PlaceKind] = frozenset({"collective", "device", "waits-for-peer"})
"""Others may be the reason that it stands."""
HELD: frozenset[PlaceKind] = frozenset({"lock", "sleep", "io"})
"""It is held up in its own doing."""
RUNNING = "running"
"""The kernel's word, in the place of a system call's name, for a thread that is in none."""

_VERBS: dict[PlaceKind, str] = {
    "idle": "idle, waits for",
    "device": "waits for",
    "waits-for-peer": "waits for",
    "lock": "held up, waits for",
    "io": "held up, waits for",
    "compute": "at work",
    "sleep": "held up, sleeps",
    "unknown": "stands",
}


@dataclass(frozen=True, slots=True)
class Doing:
    """``frame`` decides; ``site`` is the engine's own line. ``operation``, of a collective, as torch names it.
    ``layer``: the innermost ``forward`` of a model's layer that it was called for. ``waits_for``: whom or what, in
    words. ``between``: a collective that ranks go through with or without work. ``starting``: the engine is not
    ready yet. ``left``: the thread left its place between two dumps; None: only one is there."""

    kind: PlaceKind
    frame: Frame | None = None
    site: Frame | None = None
    layer: Frame | None = None
    operation: str = ""
    waits_for: str = ""
    between: bool = False
    starting: bool = False
    left: bool | None = None

    def words(self) -> str:
        """``in all_reduce, called by _dp_gather (dp_attention.py:713) for LogitsProcessor.forward (...:634)``."""
        if self.kind == "collective":
            called = f", called by {self.site.words()}" if self.site is not None else ""
            return f"in {self.operation}{called}{self._purpose()}"
        at = f" in {self.site.words()}" if self.site is not None else ""
        what = f" {self.waits_for}" if self.waits_for else ""
        return f"{_VERBS[self.kind]}{what}{at}{self._purpose() if self.kind == 'compute' else ''}"

    def _purpose(self) -> str:
        return f" for {self.layer.words()}" if self.layer is not None and self.layer != self.site else ""


def doing(stacks: ProcessStacks, earlier: ProcessStacks | None = None, *, kernel: str | None = None) -> Doing:
    """What the process does in ``stacks``, plain or native ones. ``kernel``: the system call that its host thread
    is in, by name, or ``RUNNING``; None: not known. The call and the dump are not of one moment, so it only counts
    for a thread that stays where it is; a caller who knows better than ``earlier`` does gives None."""
    thread = deciding_thread(stacks)
    before = None if earlier is None else deciding_thread(earlier)
    left = None if thread is None or before is None else not same_place(before, thread)
    if thread is None or not thread.frames:
        return Doing("unknown", left=left)
    found = _read(thread, None if left else kernel)
    if left and found.kind == "unknown":
        found = replace(found, kind="compute")
    starting = any(STARTING.search(frame.name) for frame in thread.frames)
    return replace(found, starting=starting, left=left)


def deciding_thread(stacks: ProcessStacks) -> ThreadStack | None:
    """The host thread; of a dump that names none the first one with frames."""
    host = stacks.thread("host")
    return host or next((thread for thread in stacks.threads if thread.frames), None)


def _read(thread: ThreadStack, kernel: str | None) -> Doing:
    frames = thread.frames
    own = (i for i, frame in enumerate(frames) if not (frame.native or _is_plumbing(frame)))
    at = next(own, len(frames))
    inner = frames[:at]
    site = frames[at] if at < len(frames) else None
    layer = next((frame for frame in frames[at:] if _is_layer(frame)), None)
    found = _collective(inner)
    if found is not None:
        between = any(BETWEEN.match(frame.name) for frame in frames[at:])
        return Doing("collective", found[0], site, layer, operation=found[1], between=between)
    # What the site asked for lies next to it; what that needed lies further in.
    for frame in reversed(inner):
        asked = _asked(frame)
        if asked is not None:
            kind, waits_for = _waiting(asked, frame, inner, site)
            return Doing(kind, frame, site, layer, waits_for=waits_for)
    kind, waits_for = _in_its_own_doing(thread, inner, frames[at:], kernel)
    return Doing(kind, site or frames[0], site or frames[0], layer, waits_for=waits_for)


def _waiting(asked: Asked, frame: Frame, inner: Sequence[Frame], site: Frame | None) -> tuple[PlaceKind, str]:
    if asked == "loop":
        innermost = next((one for one in inner if not one.native), frame)
        # Anything else inside a loop is a callback at work; it is called by Handle._run.
        waits = LOOP_FILES.search(innermost.filename) is not None and innermost.name != "Handle._run"
        return ("idle", "requests") if waits else ("compute", "")
    known = None if site is None else _known_site(site)
    if known is not None and asked not in ("room", "output", "device"):
        return known
    return DEFAULTS[asked]


def _in_its_own_doing(
    thread: ThreadStack, inner: Sequence[Frame], outer: Sequence[Frame], kernel: str | None
) -> tuple[PlaceKind, str]:
    """Python shows no wait: C does something for the engine, or the engine itself is at it."""
    for frame in inner:
        for kind, waits_for, names in IN_C:
            if frame.native and names.match(frame.name):
                return kind, waits_for
    at_work = any(AT_WORK.match(frame.name) for frame in outer)
    said = KERNEL.get(kernel or "")
    known = _known_site(outer[0]) if outer else None
    loops = known is not None and known[0] == "idle"
    # The threads of a kernel wait for each other in futexes, too; and a loop may pause between two looks.
    if said is not None and not (at_work and kernel == "futex") and not (loops and said[0] == "sleep"):
        return said
    if known is not None and loops:
        return known
    if any(frame.name.rsplit(".", 1)[-1] == "on_idle" for frame in outer):
        return "idle", "requests"
    return ("compute", "") if at_work or thread.active or kernel == RUNNING else ("unknown", "")


def _collective(inner: Sequence[Frame]) -> tuple[Frame, str] | None:
    """The frame that is the collective, and the collective's name."""
    native: Frame | None = None
    for frame in inner:
        if frame.native:
            native = native or (frame if COLLECTIVE_NATIVE.match(frame.name) else None)
        elif COLLECTIVE_FILES.search(frame.filename) and OPERATION.match(_last_name(frame)):
            return frame, _last_name(frame).lstrip("_")
    if native is None:
        return None
    said = NATIVE_OPERATION.search(native.name)
    return native, said[1].lower() if said is not None else "a collective"


def _asked(frame: Frame) -> Asked | None:
    if frame.native:
        return None
    found = (a for a, name, file in ASKED if name.match(frame.name) and file.search(frame.filename))
    return next(found, None)


def _known_site(frame: Frame) -> tuple[PlaceKind, str] | None:
    found = (
        (kind, what)
        for name, file, kind, what in SITES
        if name.match(frame.name) and file.search(frame.filename)
    )
    return next(found, None)


def _is_plumbing(frame: Frame) -> bool:
    if LIBRARY.search(frame.filename):
        return True
    return any(frame.filename.endswith(file) and frame.name in names for file, names in PLUMBING_CALLS)


def _is_layer(frame: Frame) -> bool:
    """``SomeModule.forward`` of a model, not torch's own."""
    return "." in frame.name and _last_name(frame) == "forward" and not (frame.native or _is_plumbing(frame))


def _last_name(frame: Frame) -> str:
    return frame.name.rsplit(".", 1)[-1]
