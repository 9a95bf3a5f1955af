"""``hangrig bundle``: one trial of a stored run as a redacted archive for a bug report.

Reads the run directory, this machine's drivers and packages where the run was made here, and nothing else; starts
nothing but the vendors' version tools. What goes in is `bundle_files.py`, how it is redacted `harness.redact`, the
archive `bundle_archive.py`, its first page `bundle_readme.py`, what it stood on `bundle_environment.py`.
"""

from __future__ import annotations

import getpass
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.environment import Reading
from harness.redact import Redactor, placeholders_in
from harness.redact_rules import KINDS, Kind, public_name
from harness.request import BadRequest
from harness.store import StoreError, read_run, resolve_run
from harness.trial_choice import choose_trial
from reports import bundle_archive, bundle_readme, fields, markdown, result
from reports.bundle_environment import environment, readings
from reports.bundle_files import File, Gathered, gather, read_documents
from reports.fields import Document
from reports.model import Missing

SCHEMA = 1
_ROUNDS = 6
"""A value that one file gives away is looked for in all again; three rounds have always been enough."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A written archive. ``redacted``: how often something of a kind was replaced."""

    path: Path
    run: str
    trial: str
    nbytes: int
    files: int
    redacted: Mapping[str, int]
    missing: tuple[Missing, ...]
    left_out: tuple[Missing, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "run": self.run,
            "trial": self.trial,
            "bytes": self.nbytes,
            "files": self.files,
            "redacted": dict(self.redacted),
            "missing": [{"what": one.what, "why": one.why} for one in self.missing],
            "left_out": [{"what": one.what, "why": one.why} for one in self.left_out],
        }

    def text(self) -> str:
        """For a person: where it is, what was taken out, what is not in it."""
        counted = ", ".join(f"{count} {kind}" for kind, count in self.redacted.items() if count)
        lines = [f"missing: {one.what}: {one.why}" for one in self.missing]
        lines += [f"left out: {one.what}: {one.why}" for one in self.left_out]
        lines.append(f"redacted: {counted or 'nothing was found'}; redactions.json inside lists them by file")
        lines.append(f"{self.path}  {self.trial}, {self.files} files, {self.nbytes / 1024:.0f} KiB")
        return "\n".join(lines)


def make(
    path: Path,
    trial: str | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    keep: Sequence[str] = (),
) -> Bundle:
    """Bundles ``trial`` of the run at ``path``; None: as a rerun chooses. ``out`` None: ``<run>-<trial>.tar.gz``
    here. ``keep``: kinds or texts that are not replaced.

    Raises BadRequest for what the user got wrong, StoreError when ``path`` is no run, the disk refuses, or a
    replaced value was still in the archive.
    """
    if "secret" in keep:
        raise BadRequest("--keep secret: secrets are never kept; give the text that is none")
    run = resolve_run(path)
    document, judged, ids = read_documents(run)
    trial = choose_trial(run, ids, judged, trial)
    name = f"{run.name}-{trial}"
    target = (out or Path(f"{name}.tar.gz")).absolute()
    _check_target(target, out, force)
    found = gather(run, trial)
    _summary(found, run)
    facts = readings(found, trial)
    kinds = [kind for kind in KINDS if kind in keep]
    files, redactor, counts = _redact(found, document, facts, keep, kinds, name, trial)
    nbytes = bundle_archive.write(target, redactor.text(name), files, redactor)
    return Bundle(
        target, str(run), trial, nbytes, len(files), _totals(counts), (*found.missing,), (*found.left_out,)
    )


def _check_target(target: Path, out: Path | None, force: bool) -> None:
    shown = out or target.name
    if not target.parent.is_dir():
        raise BadRequest(f"--out {shown}: its folder does not exist; make it, or name another file")
    if target.is_dir():
        raise BadRequest(f"--out {shown}: is a directory; name a file in it")
    if target.exists() and not force:
        raise BadRequest(f"--out {shown}: exists; name another file, or add --force to replace it")


def _summary(found: Gathered, run: Path) -> None:
    """The report's summary, made anew where the run has none."""
    if "summary.md" in found.files:
        return
    try:
        text = markdown.render(result.build(read_run(run)))
    except StoreError:
        return
    found.missing = [one for one in found.missing if one.what != "summary.md"]
    found.add(File("summary.md", "text", text))


# --- redaction ---------------------------------------------------------------------------------------------


def _redact(
    found: Gathered,
    run: Document,
    facts: Sequence[Reading],
    keep: Sequence[str],
    kinds: Sequence[Kind],
    name: str,
    trial: str,
) -> tuple[list[File], Redactor, dict[str, Counter[Kind]]]:
    environment_file = File("environment.json", "json", environment(facts))
    notes = [*found.missing, *found.left_out]
    raw = [*found.files.values(), environment_file]
    loose = [name, *found.converted.values(), *(text for one in notes for text in (one.what, one.why))]
    taken = placeholders_in(text for file in raw for text in file.texts()) | placeholders_in(loose)
    redactor = Redactor(taken=taken, keep=keep, keep_kinds=kinds)
    _seed(redactor, run)
    clean, counts = _round(redactor, raw, loose)
    for _ in range(_ROUNDS):
        known = redactor.known
        clean, counts = _round(redactor, raw, loose)
        if redactor.known == known:
            break
    found.missing = [_clean(redactor, one) for one in found.missing]
    found.left_out = [_clean(redactor, one) for one in found.left_out]
    redactions = _redactions(redactor, counts, found, keep)
    redactions_file = File("redactions.json", "json", redactions)
    folder = redactor.text(name)
    base = redactor.text(f"trials/{trial}")
    documents = {file.name: file.content for file in clean if isinstance(file.content, Mapping)}
    readme = bundle_readme.render(
        redactor.text(trial),
        {
            "run": documents.get("run.json"),
            "trial": documents.get(f"{base}/trial.json"),
            "diagnosis": documents.get(f"{base}/diagnosis.json"),
            "engine": documents.get(f"{base}/evidence/engine.json"),
        },
        folder,
        [Reading(*map(redactor.text, (one.name, one.value or "", one.why))) for one in facts],
        found.missing,
        found.left_out,
        {redactor.text(to): redactor.text(was) for to, was in found.converted.items()},
        redactions,
    )
    return [*clean, redactions_file, File("README.md", "text", redactor.text(readme))], redactor, counts


def _seed(redactor: Redactor, run: Document) -> None:
    """Names that are known to be private, whether or not a rule would find them."""
    redactor.learn("host", fields.text(fields.table(run, "machine"), "node"))
    redactor.learn("host", socket.gethostname())
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in some containers
        user = ""
    for one in {user, Path.home().name}:
        if not public_name(one):
            redactor.learn("user", one)


def _round(
    redactor: Redactor, raw: Iterable[File], loose: Iterable[str]
) -> tuple[list[File], dict[str, Counter[Kind]]]:
    clean, counts = [], {}
    for text in loose:
        redactor.text(text)
    for file in raw:
        redactor.counts.clear()
        made = File(redactor.text(file.name), file.kind, redactor.document(file.content))
        clean.append(made)
        counts[made.name] = Counter(redactor.counts)
    return clean, counts


def _clean(redactor: Redactor, one: Missing) -> Missing:
    return Missing(redactor.text(one.what), redactor.text(one.why))


def _totals(counts: Mapping[str, Counter[Kind]]) -> dict[str, int]:
    total = sum(counts.values(), Counter())
    return {kind: total[kind] for kind in KINDS}


def _redactions(
    redactor: Redactor, counts: Mapping[str, Counter[Kind]], found: Gathered, keep: Sequence[str]
) -> dict[str, Any]:
    """redactions.json: what was replaced, by file and kind, and by which names; never what it was."""
    return {
        "schema": SCHEMA,
        "totals": _totals(counts),
        "placeholders": {kind: names for kind, names in redactor.placeholders().items() if names},
        "files": {name: dict(sorted(of.items())) for name, of in sorted(counts.items()) if of},
        "kept": sorted(keep),
        "missing": [{"what": one.what, "why": one.why} for one in found.missing],
        "left_out": [{"what": one.what, "why": one.why} for one in found.left_out],
        "converted": {redactor.text(to): redactor.text(was) for to, was in sorted(found.converted.items())},
    }
