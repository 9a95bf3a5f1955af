"""HG106: waits without a bound in code that tears down. Pure.

Teardown is a function by name (`shutdown`, `__exit__` and their like), and one that ``atexit``, ``signal`` or
``weakref.finalize`` is given. Nobody watches there any more: a peer that died first is waited for until a person
comes. A wait after ``.kill()`` of the same process, and one inside ``wait_for`` or ``timeout``, is bounded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from harness.audit.findings import Finding, Rule
from harness.audit.module import Function, Module, is_constant, keyword, last_name, within

RULE = Rule(
    "HG106",
    "unbounded-wait-in-teardown",
    "code that tears down waits without a bound",
    "when the other side is dead or hangs itself, shutting down hangs too: the process keeps its devices and its "
    "port, the next start fails, and what was hung first is hidden behind it",
    "give the wait a timeout, say what did not end, and go on to kill it",
)
WORDS = (
    ".join()", ".wait()", ".get()", ".result()", ".recv", "destroy_process_group", "barrier(", "ray.get",
    "wait=True", "timeout=None",
)  # fmt: skip

_TEARDOWN = re.compile(
    r"^_*(async_|sync_|do_|graceful(ly)?_)?(shut_?down|close|stop|terminate|tear_?down|clean_?up|destroy|"
    r"kill)(_(?!profil)\w+)?$|^finali[sz]e$|^__(del|exit|aexit)__$",
    re.IGNORECASE,
)
_QUEUE = re.compile(r"queue|(^|_)q$", re.IGNORECASE)
_RECEIVES = frozenset({"recv", "recv_pyobj", "recv_multipart", "recv_json", "recv_string", "recv_bytes"})
_ORDERS = re.compile(r"shut_?down|stop|exit|quit|terminat", re.IGNORECASE)
_POOLS = re.compile(r"executor|pool", re.IGNORECASE)


def check(module: Module) -> Iterator[Finding]:
    given = _given(module)
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            _tears_down(module, node) or node.name in given
        ):
            body = list(within(node))
            for call in (one for one in body if isinstance(one, ast.Call)):
                what = _unbounded(module, call)
                if what and not _bounded(module, node, body, call):
                    yield module.finding("HG106", call, f"{node.name} waits in {what} without a bound")


def _tears_down(module: Module, function: Function) -> bool:
    """By its name; the end of a profile is not the end of an engine."""
    owner = module.class_of(function)
    return bool(_TEARDOWN.search(function.name)) and not (
        owner is not None and "profil" in owner.name.lower()
    )


def _given(module: Module) -> set[str]:
    """Functions that are run when the process or an object ends."""
    if not any(word in module.text for word in ("atexit", "weakref", "signal")):
        return set()
    found = set()
    for call in module.calls():
        name = module.dotted(call.func)
        if name in ("atexit.register", "weakref.finalize", "signal.signal"):
            place = 0 if name == "atexit.register" else 1
            if len(call.args) > place:
                found.add(last_name(call.args[place]))
        elif last_name(call.func) == "add_signal_handler" and len(call.args) > 1:
            found.add(last_name(call.args[1]))
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef) and any(
            module.dotted(one) == "atexit.register" for one in node.decorator_list
        ):
            found.add(node.name)
    return found - {""}


def _unbounded(module: Module, call: ast.Call) -> str:
    """The wait as a reader would write it; empty for a call that is none or has a bound."""
    name = last_name(call.func)
    shown = f"{ast.unparse(call.func)[-50:]}()"
    dotted = module.dotted(call.func)
    bare = not call.args and not call.keywords
    if name in ("destroy_process_group", "barrier") and _distributed(dotted):
        return shown if keyword(call, "timeout") is None else ""
    if dotted == "ray.get":
        return shown if keyword(call, "timeout") is None else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    receiver = ast.unparse(call.func.value)
    if name in ("join", "wait"):
        forever = bare or _none_timeout(call)
        if isinstance(call.func.value, ast.Constant) or dotted in ("os.wait", "asyncio.wait"):
            return ""
        # Waiting for an event that orders the end is what comes before teardown.
        ordered = name == "wait" and _ORDERS.search(receiver) and "event" in receiver
        return shown if forever and not ordered else ""
    if name == "get" and bare and _QUEUE.search(receiver.rpartition(".")[2]):
        return shown
    if name == "result" and bare:
        return shown
    if name in _RECEIVES and bare:
        return shown
    if name == "shutdown" and _POOLS.search(receiver) and is_constant(keyword(call, "wait"), True):
        return shown
    return ""


def _none_timeout(call: ast.Call) -> bool:
    timeout = keyword(call, "timeout")
    return not call.args and len(call.keywords) == 1 and is_constant(timeout, None)


def _distributed(dotted: str) -> bool:
    """torch.distributed by any of the names under which it is imported; a name of one's own is none."""
    return dotted.startswith("torch.distributed.") or dotted.rpartition(".")[0] in ("dist", "torch_dist")


def _bounded(module: Module, function: Function, body: list[ast.AST], call: ast.Call) -> bool:
    for child, up in module.above(call):
        if up is function:
            break
        if (
            isinstance(up, ast.Call)
            and child is not up.func
            and last_name(up.func) in ("wait_for", "timeout")
        ):
            return True
        if isinstance(up, ast.AsyncWith) and any("timeout" in ast.unparse(item) for item in up.items):
            return True
        if isinstance(up, ast.If) and child in up.body and _has_ended(up.test, call):
            return True
    assert isinstance(call.func, ast.Attribute | ast.Name)
    receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.lineno <= call.lineno
        and (
            (node.func.attr == "kill" and ast.unparse(node.func.value) == receiver)
            or (last_name(call.func) in _RECEIVES and node.func.attr in ("poll", "settimeout", "setsockopt"))
        )
        for node in body
    )


def _has_ended(test: ast.expr, call: ast.Call) -> bool:
    """``if work.is_completed(): work.wait()`` and ``if future.done(): future.result()``."""
    asked = {last_name(node) for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    negated = any(isinstance(node, ast.Not) for node in ast.walk(test))
    return bool(asked & {"done", "is_completed", "empty", "poll"}) and (not negated or "empty" in asked)
