"""A bundle as a file: the same bytes for the same content, and looked through once more before it gets its name.

Here: tar, gzip and the last check. Not here: what goes in (`bundle_files.py`) and how it was redacted.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.redact import Redactor
from harness.store import StoreError
from reports.bundle_files import File, texts_of

_MODE = 0o644


def write(path: Path, folder: str, files: Sequence[File], redactor: Redactor) -> int:
    """Writes ``path`` with ``files`` below ``folder``, sorted, without times and owners; returns its bytes.

    The archive is read back, and does not become ``path`` when a value that was replaced is still in it. Raises
    StoreError then, or when the disk refuses; no part of it is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(_packed(folder, files))
        if leaks := leaked(temporary, redactor):
            told = "; ".join(f"{name}: {', '.join(places)}" for name, places in leaks.items())
            raise StoreError(path, f"not written: what these stand for was still in it: {told}; report this")
        temporary.replace(path)
    except OSError as error:
        raise StoreError(path, f"cannot write: {error.strerror or error}; choose another --out") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path.stat().st_size


def _packed(folder: str, files: Sequence[File]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in sorted(files, key=lambda file: file.name):
            content = file.encoded()
            entry = tarfile.TarInfo(f"{folder}/{file.name}")
            entry.size, entry.mode = len(content), _MODE
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def leaked(path: Path, redactor: Redactor) -> dict[str, list[str]]:
    """Placeholders by member whose values are still in the archive."""
    found: dict[str, list[str]] = {}
    with tarfile.open(path, "r:gz") as archive:
        for entry in archive:
            member = archive.extractfile(entry)
            content = member.read() if member is not None else b""
            # Newlines keep the texts apart: no value is found across two of them.
            text = "\n".join([entry.name, *_decoded(entry.name, content)])
            if left := redactor.left(text):
                found[entry.name] = sorted(set(left))
    return found


def _decoded(name: str, content: bytes) -> Iterator[str]:
    """The texts of a member: of JSON its keys and texts, unescaped, and what they hold as JSON themselves."""
    text = content.decode("utf-8", errors="replace")
    if not name.endswith((".json", ".jsonl")):
        yield text
        return
    for part in [text] if name.endswith(".json") else text.splitlines():
        try:
            document: Any = json.loads(part)
        except (ValueError, RecursionError):
            yield part
        else:
            yield from texts_of(document)
