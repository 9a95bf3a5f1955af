"""SGLang's wheels as files to be read, never to be imported: downloaded once, opened in place.

Not here: what the files say (``sglang_options.py``).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cached_property
from pathlib import Path

RELEASES = ("0.5.20", "0.5.23")
_DOWNLOAD_S = 240.0
_FOR_ANY_MACHINE = (
    "--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11", "--abi", "cp311",
    "--platform", "manylinux_2_34_x86_64",
)  # fmt: skip
"""The wheels are read, not run: one build serves on every machine and for every Python."""


class WheelMissing(RuntimeError):
    """Neither kept from an earlier download nor to be had now. The message says what to do."""


class Wheel:
    """One release's package ``sglang``; paths begin below it."""

    def __init__(self, path: Path, release: str) -> None:
        self.release = release
        self._archive = zipfile.ZipFile(path)

    def text(self, path: str) -> str:
        """The file's source. Raises KeyError when the release has no such file."""
        return self._archive.read(f"sglang/{path}").decode()

    def tree(self, path: str) -> ast.Module:
        return ast.parse(self.text(path), filename=f"sglang {self.release}: {path}")

    def modules(self, folder: str) -> list[str]:
        """Python files directly in ``folder``."""
        start = f"sglang/{folder}/"
        inside = (name[len(start) :] for name in self.files if name.startswith(start))
        return [f"{folder}/{name}" for name in inside if name.endswith(".py") and "/" not in name]

    @cached_property
    def files(self) -> tuple[str, ...]:
        return tuple(self._archive.namelist())

    def close(self) -> None:
        self._archive.close()


def folder() -> Path:
    """Where wheels are kept between test runs."""
    kept = os.environ.get("HANGRIG_ENGINES")
    return (Path(kept) if kept else Path.home() / ".cache" / "hangrig" / "engines") / "wheels"


def wheel(release: str) -> Wheel:
    """Opens the wheel, downloaded first where it is not kept yet. Raises WheelMissing."""
    return Wheel(wheel_path(release), release)


def wheel_path(release: str) -> Path:
    """The wheel's file, downloaded first where it is not kept yet. Raises WheelMissing."""
    return _kept(release) or _download(release)


def _kept(release: str) -> Path | None:
    return next((path for path in sorted(folder().glob(f"sglang-{release}-*.whl"))), None)


def _download(release: str) -> Path:
    kept = folder()
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        try:
            done = subprocess.run(
                [*command, *_FOR_ANY_MACHINE, "--dest", scratch, f"sglang=={release}"],
                capture_output=True,
                text=True,
                timeout=_DOWNLOAD_S,
                check=False,
            )
            said = done.stderr
        except subprocess.TimeoutExpired:
            said = f"pip took more than {_DOWNLOAD_S:g} s"
        found = next(iter(Path(scratch).glob("*.whl")), None)
        if found is None:
            raise WheelMissing(
                f"the wheel of sglang {release} is not in {kept} and cannot be downloaded; put it there, or leave "
                f'these tests out with -m "not network and not engines". pip said: {said.strip()[-500:]}'
            )
        return found.replace(kept / found.name)  # at once: another test run may look for it now
