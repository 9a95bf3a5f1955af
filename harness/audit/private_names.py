"""HG101: private accelerator names that importing a module binds or touches (CASES.md, case 2). Pure.

Importing runs the module's body, its conditional blocks, class bodies, decorators, default arguments and, unless
they are postponed, annotations; it does not run the bodies of functions. A name below `torch.cuda.memory`,
`torch._C` or `torch_npu._C` that another release lacks then stops the whole engine before any device is chosen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from harness.audit.findings import Finding, Rule
from harness.audit.module import Module

RULE = Rule(
    "HG101",
    "import-time-private-name",
    "a private accelerator name is bound when the module is imported",
    "private names come and go between releases of torch and torch_npu, and `from ... import` is all or nothing: "
    "where one is missing the engine does not start, whatever device it was to use; a fallback to None moves the "
    "error to a later 'NoneType' object is not callable",
    "look the name up inside the function that calls it, and let the lookup fail with its own name",
)
WORDS = (
    "_cuda_",
    "_npu_",
    "_xpu_",
    "._C",
    "cuda._",
    "npu._",
    "memory._",
    "from torch.cuda",
    "from torch.npu",
    "from torch_npu",
)

_PRIVATE = re.compile(
    r"^(torch|torch_npu)\._C(\.|$)|^torch(?!\.ops\.)[\w.]*\._(cuda|npu|xpu|mtia)_[A-Za-z]\w*$|^torch\.(cuda|npu|xpu)(\.\w+)*\._[a-z]\w*$|^torch_npu\.npu(\.\w+)*\._[a-z]\w*$"
)


def check(module: Module) -> Iterator[Finding]:
    postponed = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in module.tree.body
    )
    said: dict[int, Finding] = {}
    for node in at_import(module.tree, postponed):
        if names := _names(module, node):
            verb = "imports" if isinstance(node, ast.Import | ast.ImportFrom) else "touches"
            finding = module.finding("HG101", node, f"{verb} {', '.join(names)}")
            said.setdefault(
                finding.line, finding
            )  # one for a line: the same name is often its annotation and default
    yield from said.values()


def _names(module: Module, node: ast.AST) -> list[str]:
    """Private names that the node binds or touches."""
    names = []
    if isinstance(node, ast.ImportFrom):
        names = [f"{module.absolute(node)}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Attribute):
        names = [module.dotted(node)]
    elif isinstance(node, ast.Call):
        names = [_asked(module, node)]
    return [name for name in names if _private(name)]


def at_import(node: ast.AST, postponed: bool) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported, the outermost attribute of a chain alone."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        children: list[ast.AST] = [*node.decorator_list, *arguments.defaults]
        children += [default for default in arguments.kw_defaults if default is not None]
        if not postponed:
            everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            everything += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
            children += [one.annotation for one in everything if one.annotation is not None]
            children += [node.returns] if node.returns is not None else []
    elif isinstance(node, ast.Lambda):
        children = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
    elif (isinstance(node, ast.If) and _for_type_checkers(node.test)) or (
        isinstance(node, ast.If) and _is_script(node.test)
    ):
        children = list(node.orelse)
    elif isinstance(node, ast.AnnAssign) and postponed:
        children = [child for child in (node.target, node.value) if child is not None]
    elif isinstance(node, ast.Attribute):
        children = [] if _chain(node) else [node.value]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("hasattr", "getattr")
    ):
        children = list(node.args[1:])  # what they ask about is judged whole, in `_asked`
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield child
        yield from at_import(child, postponed)


def _private(name: str) -> bool:
    return bool(_PRIVATE.search(name))


def _asked(module: Module, call: ast.Call) -> str:
    """The name that ``getattr`` binds; ``hasattr`` binds none."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1):
        return ""
    asked = call.args[1]
    if not (isinstance(asked, ast.Constant) and isinstance(asked.value, str)):
        return ""
    return f"{module.dotted(call.args[0])}.{asked.value}"


def _chain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _for_type_checkers(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _is_script(test: ast.expr) -> bool:
    """``if __name__ == "__main__"``: not run by an import."""
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
