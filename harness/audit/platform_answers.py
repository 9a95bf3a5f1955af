"""HG102: a platform class that answers a capability less safely than its base (CASES.md, case 1). Pure.

An answer is read from the source: ``False`` throughout is safe, ``True`` throughout is not, all else lies between.
A class is compared with the next class of its line that answers at all. It is accepted when it names its evidence,
in a comment or docstring line ``Evidence: ...`` at the answer, or where the vendor documents what the capability
rests on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from harness.audit.classes import ClassIndex, ClassInfo
from harness.audit.findings import Finding, Rule
from harness.audit.module import Module, is_constant, within

RULE = Rule(
    "HG102",
    "less-safe-than-base",
    "a platform class answers a capability less safely than its base",
    "the base's answer is the one that is right while nobody has looked at a device; an override that answers "
    "otherwise changes hot paths of every decode step without a line of theirs changing. DeepSeek-V2 hung on "
    "Ascend after such an override",
    "answer as the base does, or write the evidence beside the answer: a comment or docstring line "
    "`Evidence: ...` that names the runs or the document",
)


@dataclass(frozen=True, slots=True)
class Capability:
    """A question whose safe answer is *no*."""

    risk: str
    documented: frozenset[str] = frozenset()
    """Families of devices whose vendor documents what a *yes* rests on."""


_CUDA_ALIKE = frozenset({"cuda", "rocm"})
CAPABILITIES: Mapping[str, Capability] = {
    "is_pin_memory_available": Capability(
        "copies from pinned memory do not synchronise where copies from pageable memory do, so pinning takes a "
        "barrier away",
        _CUDA_ALIKE,
    ),
    "is_uva_available": Capability("kernels read host memory while the host may write it", _CUDA_ALIKE),
    "is_async_output_supported": Capability(
        "outputs of a step are read after the next one has started", _CUDA_ALIKE
    ),
    "use_custom_allreduce": Capability(
        "collectives over peer memory have no watchdog and no timeout", _CUDA_ALIKE
    ),
    "supports_symmetric_memory": Capability(
        "symmetric memory needs peer access and a runtime that signals across devices", _CUDA_ALIKE
    ),
}
"""What the rule knows. sglang `srt/platforms/device_mixin.py` and vLLM `platforms/interface.py` have the names."""

_ANSWER = re.compile(
    rf"\bdef ({'|'.join(CAPABILITIES)})\b|^[ \t]+({'|'.join(CAPABILITIES)})[ \t]*(:[^=\n]+)?=[^=]",
    re.MULTILINE,
)
_EVIDENCE = re.compile(r"^\s*evidence\s*:\s*\S", re.IGNORECASE)
_FAMILY = re.compile(r"cuda|rocm|npu|ascend|xpu|musa|mps|hpu|tpu|cpu|gaudi|mlu", re.IGNORECASE)


class Answer(IntEnum):
    """In the order of danger."""

    SAFE = 0
    MIXED = 1
    UNSAFE = 2


_WORDS = {Answer.SAFE: "no", Answer.MIXED: "no in some cases only", Answer.UNSAFE: "yes"}


def may_answer(text: str) -> bool:
    """A class in this source may answer a capability."""
    return any(name in text for name in CAPABILITIES) and bool(_ANSWER.search(text))


def check(module: Module, index: ClassIndex) -> Iterator[Finding]:
    for info in index.classes(module):
        for name, capability in CAPABILITIES.items():
            finding = _judge(info, name, capability, index)
            if finding is not None:
                yield finding


def _judge(info: ClassInfo, name: str, capability: Capability, index: ClassIndex) -> Finding | None:
    line = [info, *index.ancestors(info)]
    answers = [(one, given) for one in line if (given := answer(one, name)) is not None]
    if len(answers) < 2:
        return None
    (owner, given), *others = answers
    if owner is info:
        base, before = others[0]
    else:
        # An inherited answer was judged where it stands, but for a base that only this class brings together.
        known = index.ancestors(owner)
        fresh = [pair for pair in others if pair[0] not in known]
        if not fresh:
            return None
        base, before = fresh[0]
    if given <= before or family(line) in capability.documented or _evidence(owner, name):
        return None
    place: ast.AST = info.node if owner is not info else _member(owner, name)
    via = "" if owner is info else f" through {owner.node.name}"
    return info.module.finding(
        "HG102",
        place,
        f"{info.node.name} answers {name}{via} with {_WORDS[given]}, its base {base.name} with {_WORDS[before]}; "
        f"{capability.risk}",
    )


def _member(info: ClassInfo, name: str) -> ast.stmt:
    member = info.member(name)
    assert member is not None
    return member


def answer(info: ClassInfo, name: str) -> Answer | None:
    """What the class itself answers; None where it says nothing or hands the question on."""
    member = info.member(name)
    if isinstance(member, ast.Assign | ast.AnnAssign):
        return None if member.value is None else _of([member.value])
    if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    values = [node.value for node in within(member) if isinstance(node, ast.Return)]
    given = [value for value in values if value is not None]
    if any(_asks_super(value) for value in given):
        return None
    return _of(given) if given else None


def _of(values: list[ast.expr]) -> Answer:
    if all(is_constant(value, False) or is_constant(value, None) for value in values):
        return Answer.SAFE
    return Answer.UNSAFE if all(is_constant(value, True) for value in values) else Answer.MIXED


def _asks_super(value: ast.expr) -> bool:
    """The base's answer, or that and a condition more."""
    if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And):
        return any(_asks_super(one) for one in value.values)
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
        for node in ast.walk(value)
        if not isinstance(value, ast.BoolOp | ast.IfExp)
    )


def family(line: list[ClassInfo]) -> str:
    """Of the device that the first class of the line is for: its attributes, then the names of class and module."""
    for info in line:
        for attribute in ("device_type", "device_name", "_enum"):
            member = info.member(attribute)
            if isinstance(member, ast.Assign | ast.AnnAssign) and member.value is not None:
                value = member.value
                said = str(value.value) if isinstance(value, ast.Constant) else info.module.dotted(value)
                if found := _FAMILY.search(said.rpartition(".")[2]):
                    return _plain(found[0])
        for said in (info.node.name, info.module.name.rpartition(".")[2]):
            if found := _FAMILY.search(said):
                return _plain(found[0])
    return ""


def _plain(word: str) -> str:
    return "npu" if word.lower() == "ascend" else word.lower()


def _evidence(info: ClassInfo, name: str) -> bool:
    member, module = _member(info, name), info.module
    lines = range(member.lineno, (member.end_lineno or member.lineno) + 1)
    first = min((d.lineno for d in getattr(member, "decorator_list", ())), default=member.lineno)
    comments = [module.comments.get(line, "") for line in [*lines, *module.comments_above(first)]]
    said = ""
    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
        said = ast.get_docstring(member) or ""
    return any(_EVIDENCE.search(line) for line in [*comments, *said.splitlines()])
