"""What the host of a rank is held up in, from its stacks: a lock, a write, a native call, a communicator. Pure.

Facts for people beside the rules that blame (``diagnosis_roots.py``); they decide nothing. Plain stacks have no
frame for a call into C, so native ones are read where there are any.
"""

from __future__ import annotations

import re

from harness.diagnosis_case import View
from harness.diagnosis_model import Fact
from harness.diagnosis_places import words
from harness.stack_places import doing
from harness.stacks import Frame, ProcessStacks, ThreadStack
from harness.stillness import host_thread

_CREATES = re.compile(
    r"(?:.*[.:])?_?(?:create_communicator|new_group|new_process_group_helper|init_process_group|split_group|"
    r"n?ncclCommInit\w*|HcclCommInit\w*|rendezvous)$"
)
_LOCK = "lock"
_LOCKS = ("acquire", "lock", "wait_for_tstate", "join")
_INPUT_OUTPUT = ("write", "read", "flush", "fsync", "recv", "send", "select", "poll", "open")


def host_facts(view: View) -> list[Fact]:
    """What holds it up, and who could end that; nothing where its stacks do not say."""
    stacks = view.native or view.stacks
    thread = None if stacks is None else host_thread(stacks)
    if stacks is None or thread is None:
        return []
    facts = [*_holds_the_interpreter(view, thread), *_creates(view, thread)]
    found = doing(stacks)
    if not facts and found.kind in (_LOCK, "io", "sleep", "waits-for-peer", "device"):
        at = f" in {words(found.site)}" if found.site is not None else ""
        facts.append(_fact(view, f"its host {found.words().partition(' in ')[0]}{at}"))
    if found.kind == _LOCK and found.site is not None and not _waits_for_an_event(thread):
        facts.append(_who_could_release(view, stacks, thread, found.site))
    return facts or _by_name(view)


def _by_name(view: View) -> list[Fact]:
    """What the innermost frame is called, where nothing else is known of it."""
    frame = view.host_frame()
    name = "" if frame is None else frame.name.lower()
    kinds = {"a lock": _LOCKS, "input or output": _INPUT_OUTPUT}
    what = next((kind for kind, parts in kinds.items() if any(part in name for part in parts)), None)
    if frame is None or what is None:
        return []
    return [Fact(f"{view.name}: the host waits for {what} ({frame.name})", view.stacks_path)]


def _holds_the_interpreter(view: View, thread: ThreadStack) -> list[Fact]:
    inner = thread.frames[0] if thread.frames else None
    if not thread.owns_gil or inner is None or not inner.native:
        return []
    return [
        _fact(
            view,
            f"its host is in native code ({inner.name}) and keeps the interpreter's lock: no other thread of the "
            "process runs Python",
        )
    ]


def _creates(view: View, thread: ThreadStack) -> list[Fact]:
    made = next((frame for frame in thread.frames if _CREATES.match(frame.name)), None)
    return [] if made is None else [_fact(view, f"its host makes a communicator, in {words(made)}")]


def _waits_for_an_event(thread: ThreadStack) -> bool:
    """A lock of Python's own inside an event or a condition: that is not taken, it is waited on."""
    python = [frame for frame in thread.frames if not frame.native]
    return bool(python) and python[0].name.rsplit(".", 1)[-1] == "wait"


def _who_could_release(view: View, stacks: ProcessStacks, host: ThreadStack, site: Frame) -> Fact:
    """Threads inside the code that wants the lock may be the ones that have it."""
    inside = [
        thread.name
        for thread in stacks.threads
        if thread.thread_id != host.thread_id and any(frame.place == site.place for frame in thread.frames)
    ]
    if inside:
        return _fact(view, f"threads in the same code, which may have the lock: {', '.join(inside)}")
    return _fact(
        view,
        f"no other of its {len(stacks.threads)} threads is in that code: whoever took the lock went without "
        "releasing it",
    )


def _fact(view: View, text: str) -> Fact:
    path = view.stacks_path
    return Fact(
        f"{view.name}: {text}", path if view.native is None else path.replace(".json", ".native.json")
    )
