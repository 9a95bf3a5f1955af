"""HG103: pinned memory allocated whatever the platform says (CASES.md, case 1, "what it left open"). Pure.

An allocation is gated when its argument, a condition around it or a return before it asks about pinning or about
the device. An argument that is a variable or a parameter is the business of whoever gives it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from harness.audit.device_scope import calls_cuda_by_name, only_cuda
from harness.audit.findings import Finding, Rule
from harness.audit.module import Function, Module, is_constant, keyword, last_name, within

RULE = Rule(
    "HG103",
    "pinned-past-the-switch",
    "pinned memory is allocated without asking the platform",
    "where the platform's switch says no, this copy still runs from pinned memory: it does not synchronise, its "
    "order against other streams is not proven there, and turning the switch off to find a hang changes nothing "
    "here. Without an accelerator pinning raises",
    "ask the platform: pin_memory=is_pin_memory_available(device), or an if around .pin_memory()",
)
WORDS = ("pin_memory",)

_FACTORIES = frozenset(
    {
        "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
        "ones", "ones_like", "rand", "randint", "randn", "randperm", "tensor", "zeros", "zeros_like",
        "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided",
    }
)  # fmt: skip
_ASKS = re.compile(
    r"pin|cuda|hip|rocm|npu|xpu|musa|device|platform|gpu|is_?cpu|accelerator|uva|confidential", re.IGNORECASE
)
_ENDS = ast.Return | ast.Raise | ast.Continue | ast.Break


def check(module: Module) -> Iterator[Finding]:
    if only_cuda(module):
        return
    for call in module.calls():
        what = _allocation(module, call)
        if what and not _gated(module, call) and not _cuda_code(module, call):
            yield module.finding("HG103", call, f"{what} asks no platform whether host memory may be pinned")


def _allocation(module: Module, call: ast.Call) -> str:
    """What pins, as a reader would write it; empty when nothing does, or somebody else decides."""
    name = last_name(call.func)
    if name == "pin_memory" and isinstance(call.func, ast.Attribute):
        function = module.function_of(call)
        if function is not None and function.name == "pin_memory":
            return ""  # the data loader's protocol: its caller decides
        return f"{ast.unparse(call.func)[-60:]}()"
    if name not in _FACTORIES or (not name.startswith("new_") and not _torch(module, call.func)):
        return ""
    value = keyword(call, "pin_memory")
    if value is None or not (is_constant(value, True) or _always_true(module, call, value)):
        return ""
    return f"torch.{name}(pin_memory={ast.unparse(value)})"


def _torch(module: Module, function: ast.expr) -> bool:
    return module.dotted(function).startswith("torch.")


def _always_true(module: Module, call: ast.Call, value: ast.expr) -> bool:
    """A local name that is given True and nothing else."""
    function = module.function_of(call)
    if not isinstance(value, ast.Name) or function is None:
        return False
    arguments = function.args
    if value.id in {one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}:
        return False
    given = [
        node.value
        for node in within(function)
        if isinstance(node, ast.Assign)
        if any(isinstance(target, ast.Name) and target.id == value.id for target in node.targets)
    ]
    return bool(given) and all(is_constant(one, True) for one in given)


def _asks(test: ast.AST) -> bool:
    return bool(_ASKS.search(ast.unparse(test)))


def _gated(module: Module, call: ast.Call) -> bool:
    for child, up in module.above(call):
        if isinstance(up, ast.If | ast.IfExp | ast.While) and child is not up.test and _asks(up.test):
            return True
        if isinstance(up, ast.BoolOp) and any(_asks(one) for one in up.values[: up.values.index(child)]):  # type: ignore[arg-type]
            return True
        if isinstance(child, ast.stmt) and any(_leaves_where_not(one) for one in _before(up, child)):
            return True
        if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
            return any(
                _ASKS.search(ast.unparse(one)) and "skip" in ast.unparse(one) for one in up.decorator_list
            )
    return False


def _before(parent: ast.AST, child: ast.stmt) -> list[ast.stmt]:
    """Statements of the same block ahead of ``child``."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(parent, block, None)
        if isinstance(statements, list) and child in statements:
            return list(statements[: statements.index(child)])
    return []


def _leaves_where_not(statement: ast.stmt) -> bool:
    """``if not pinning: return``, or an assertion about the device."""
    if isinstance(statement, ast.Assert):
        return _asks(statement.test)
    return (
        isinstance(statement, ast.If)
        and _asks(statement.test)
        and bool(statement.body)
        and isinstance(statement.body[-1], _ENDS)
    )


def _cuda_code(module: Module, call: ast.Call) -> bool:
    function: Function | None = module.function_of(call)
    return function is not None and calls_cuda_by_name(function)
