"""All files of a tree through all rules, on all cores.

Each file is parsed once, in one of the workers; those that answer a platform's capabilities, and their ancestors,
once more here, where bases are found across files. Workers are ended before `scan` returns.
"""

from __future__ import annotations

import ast
import gc
import multiprocessing
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.audit import platform_answers
from harness.audit.classes import ClassIndex, flat
from harness.audit.findings import Finding
from harness.audit.module import Module, Unreadable, last_name
from harness.audit.rules import ABOUT_THE_AUDIT, BAD_SUPPRESSION, FILE_CHECKS, UNREADABLE
from harness.audit.source import SourceFile, Tree
from harness.audit.suppress import bad_suppressions, suppress

_CHUNK = 40
"""Files that a worker takes at a time."""
_WORTH_A_WORKER = 150
"""Files; a worker takes about as long to start as so many take to be read."""
_MOST_WORKERS = 8
CHUNK_S = 120.0
"""A chunk takes a second or two; a worker that needs so long has died or is stuck."""

Bases = tuple[str, tuple[str, ...]]
"""A class's name and the last names of its bases."""


class ScanError(RuntimeError):
    """A worker did not answer."""


@dataclass(frozen=True, slots=True)
class _Looked:
    """What a worker found in one file."""

    file: SourceFile
    findings: tuple[Finding, ...]
    answers: bool = False
    """A class in it may answer a capability."""
    classes: tuple[Bases, ...] = ()


def scan(
    tree: Tree, rules: Collection[str], references: Sequence[Tree] = (), workers: int | None = None
) -> list[Finding]:
    """Every finding in the order of path and line, those that the source allows marked so.

    ``references``: trees whose classes are bases here and which are not audited. ``workers``: None for as many as
    the machine has use for. Raises ScanError, and BadZipFile or KeyError for a
    damaged wheel.
    """
    looked = list(_look(tree, rules, _workers(len(tree.files)) if workers is None else workers))
    findings = [finding for one in looked for finding in one.findings]
    if platform_answers.RULE.id in rules:
        findings += _platforms(tree, looked, references)
    return sorted(findings, key=lambda finding: finding.order)


def _workers(files: int) -> int:
    return max(1, min(len(os.sched_getaffinity(0)), _MOST_WORKERS, files // _WORTH_A_WORKER))


def _look(tree: Tree, rules: Collection[str], workers: int) -> Iterator[_Looked]:
    chunks = [tree.files[at : at + _CHUNK] for at in range(0, len(tree.files), _CHUNK)]
    jobs = [(chunk, tree.wheel, frozenset(rules)) for chunk in chunks]
    if workers == 1:
        for job in jobs:
            yield from _examine(job)
        return
    with multiprocessing.get_context("spawn").Pool(workers, initializer=gc.disable) as pool:
        answers = pool.imap_unordered(_examine, jobs)
        try:
            for _ in jobs:
                yield from answers.next(timeout=CHUNK_S)
        except multiprocessing.TimeoutError as error:
            raise ScanError(f"a worker gave no answer for {CHUNK_S:g} s") from error


def _examine(job: tuple[Sequence[SourceFile], str | None, frozenset[str]]) -> list[_Looked]:
    files, wheel, rules = job
    tree = Tree(tuple(files), wheel)
    return [_one(tree, file, rules) for file in files]


def _one(tree: Tree, file: SourceFile, rules: frozenset[str]) -> _Looked:
    try:
        module = Module(file.path, file.name, file.is_package, tree.read(file))
        found = suppress(module, _checked(module, rules))
    except (Unreadable, OSError, RecursionError) as error:
        line, said = getattr(error, "line", 1), f"not audited: {error}"
        told = Finding(UNREADABLE.id, file.path, line, said, "", line, line)
        return _Looked(file, (told,) if UNREADABLE.id in rules else ())
    if BAD_SUPPRESSION.id in rules:
        found += bad_suppressions(module)
    classes = tuple(
        (node.name, tuple(last_name(base) for base in node.bases))
        for node in flat(module.tree.body)
        if isinstance(node, ast.ClassDef)
    )
    return _Looked(file, tuple(found), platform_answers.may_answer(module.text), classes)


def _checked(module: Module, rules: frozenset[str]) -> list[Finding]:
    """Raises RecursionError for an expression nested deeper than Python recurses."""
    found: list[Finding] = []
    for one in FILE_CHECKS:
        if one.rule.id in rules and any(word in module.text for word in one.words):
            found += one.check(module)
    return found


def _platforms(tree: Tree, looked: Iterable[_Looked], references: Sequence[Tree]) -> list[Finding]:
    """HG102, over the files that answer a capability and those that bring such a class together with another."""
    looked = list(looked)
    answering = {one.file for one in looked if one.answers}
    names = {name for one in looked if one.answers for name, _ in one.classes}
    grown = True
    while grown:
        heirs = {name for one in looked for name, bases in one.classes if names & set(bases)} - names
        grown = bool(heirs)
        names |= heirs
    files = answering | {
        one.file for one in looked if any(len(bases) > 1 and names & set(bases) for _, bases in one.classes)
    }
    index = ClassIndex(lambda name: _module(name, [tree, *references]))
    found: list[Finding] = []
    for file in sorted(files, key=lambda file: file.path):
        module = index.module(file.name)
        if module is not None:
            found += suppress(module, platform_answers.check(module, index))
    return found


def _module(name: str, trees: Sequence[Tree]) -> Module | None:
    for tree in trees:
        file = tree.find(name)
        if file is not None:
            try:
                return Module(file.path, file.name, file.is_package, tree.read(file))
            except (Unreadable, OSError):
                return None  # told as HG001 where it is audited
    return None


def selected(select: Collection[str], ignore: Collection[str], known: Iterable[str]) -> frozenset[str]:
    """The rules to run: all, or those of ``select`` and those about the audit itself, less ``ignore``."""
    chosen = set(known) if not select else set(select) | ABOUT_THE_AUDIT
    return frozenset(chosen - set(ignore))
