"""A virtual environment over the Python of an accelerator image, whose torch and torch_npu stay the image's.

An image pairs torch, torch_npu and CANN, or torch and CUDA; a torch of another build in front of it breaks that
pair in ways that look like hangs. So hangrig's other dependencies are installed into an environment of their
own, under constraints that pin everything the image has, and torch is looked up before and after: same file,
same version, no copy in the environment. Standard library only, since it runs before anything is installed.
Nothing imports torch here: without CANN's libraries the import itself fails.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

IMAGE_OWNED = ("torch", "torch_npu", "triton")
"""Never installed, upgraded or shadowed. On Ascend the module triton is triton-ascend's, and
the Dockerfile of vllm-ascend takes out what x86 brings in its place."""
READY = ".hangrig-ready"
_PTH = "hangrig_image.pth"
_LOOK_S = 60.0
_INSTALL_S = 1800.0
_VERSION = re.compile(r"[0-9][0-9A-Za-z.!+_-]*")

_PROBE = """
import importlib.metadata, importlib.util, json, re, sys, sysconfig
normal = lambda name: re.sub(r"[-_.]+", "_", name).lower()
packages = {}
for one in importlib.metadata.distributions():
    if one.metadata["Name"]:
        packages.setdefault(normal(one.metadata["Name"]), one.version)
origins = {}
for name in sys.argv[1:]:
    found = importlib.util.find_spec(name)
    origins[name] = None if found is None else found.origin
sites = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
own = sysconfig.get_paths()["purelib"]
print(json.dumps({"origins": origins, "packages": packages, "sites": sites, "own": own,
                  "version": ".".join(map(str, sys.version_info[:3]))}))
"""


class ImageError(RuntimeError):
    """The environment cannot be made; the message says what to do."""


class NoTorchError(ImageError):
    """The image's Python has no torch."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a Python sees. ``origins``: file of each of IMAGE_OWNED, None where it is not there; ``packages``:
    version by normalised name; ``sites``: its folders of packages; ``own``: the one that it installs into."""

    origins: Mapping[str, str | None]
    packages: Mapping[str, str]
    sites: Sequence[str]
    own: str
    version: str

    def owned(self) -> dict[str, tuple[str | None, str | None]]:
        """File and version of each package that is the image's alone."""
        return {name: (origin, self.packages.get(name)) for name, origin in self.origins.items()}


def look(python: str | Path) -> Sight:
    """Raises ImageError for what is no Python that runs."""
    command = [str(python), "-c", _PROBE, *IMAGE_OWNED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_S, check=True)
        return Sight(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise ImageError(
            f"{python}: is no Python that runs: {error}; name the image's own, PYTHON=..."
        ) from error


def make(python: str | Path, venv: Path, project: Path, extra: str | None = None) -> Path:
    """The environment's interpreter; made anew when the image or the project's dependencies have changed.

    ``extra`` of the project's optional dependencies is installed too, without what is the image's. Raises
    ImageError, and then there is no environment that looks ready.
    """
    image = look(python)
    if image.origins["torch"] is None:
        raise NoTorchError(
            f"{python} has no torch: this runs in the image's own Python, whose torch and torch_npu are left as "
            "they are; name that Python, PYTHON=..., or start the container of an accelerator image"
        )
    text = (project / "pyproject.toml").read_text()
    key = hashlib.sha256(
        json.dumps([text, extra, image.version, image.owned()], sort_keys=True).encode()
    ).hexdigest()
    interpreter, ready = venv / "bin" / "python", venv / READY
    if ready.exists() and ready.read_text() == key and look(interpreter).owned() == image.owned():
        return interpreter
    _create(python, venv)
    try:
        _see_through(interpreter, image)
        _install(interpreter, project, requirements(text, extra), constraints(image, text))
        _check(interpreter, image)
    except ImageError:
        shutil.rmtree(venv)
        raise
    ready.write_text(key)
    return interpreter


def requirements(pyproject: str, extra: str | None) -> list[str]:
    """What hangrig needs beside what is the image's."""
    table = tomllib.loads(pyproject)["project"]
    wanted = [*table["dependencies"], *(table["optional-dependencies"][extra] if extra else [])]
    return [one for one in wanted if _name(one) not in IMAGE_OWNED]


def constraints(image: Sight, pyproject: str) -> list[str]:
    """Every package of the image at its version, so that nothing in front of it is newer; hangrig's own direct
    dependencies are left out, which pip takes from the image where they are new enough."""
    direct = {_name(one) for one in requirements(pyproject, None)}
    return [
        f"{name}=={version}"
        for name, version in sorted(image.packages.items())
        if name in IMAGE_OWNED or (name not in direct and _VERSION.fullmatch(version))
    ]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "_", found[0]).lower() if found else requirement


def _create(python: str | Path, venv: Path) -> None:
    if venv.exists():
        if not (venv / "pyvenv.cfg").exists():
            raise ImageError(f"{venv}: is in the way and no environment; remove it")
        shutil.rmtree(venv)
    _run([str(python), "-m", "venv", "--system-site-packages", str(venv)], "make a virtual environment")


def _see_through(interpreter: Path, image: Sight) -> None:
    """Lets the environment see the image's packages also where the image's Python is an environment itself, of
    which ``--system-site-packages`` knows nothing."""
    sight = look(interpreter)
    if sight.owned() == image.owned():
        return
    lines = [f"import site; site.addsitedir({path!r})" for path in image.sites if path not in sight.sites]
    (Path(sight.own) / _PTH).write_text("\n".join(lines) + "\n")
    if look(interpreter).owned() != image.owned():
        raise ImageError(
            f"{interpreter}: does not see the image's torch at {image.origins['torch']}; is PYTHON the Python that "
            "the image serves with?"
        )


def _install(interpreter: Path, project: Path, wanted: Sequence[str], pinned: Sequence[str]) -> None:
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="hangrig-image-") as file:
        file.write("\n".join(pinned) + "\n")
        file.flush()
        _run([*pip, "-c", file.name, *wanted], "install hangrig's dependencies beside the image's packages")
        _run([*pip, "--no-deps", "-e", str(project)], "install hangrig")
    if (Path(look(interpreter).own) / "triton").exists():
        # xgrammar asks for it, on x86 whatever the accelerator; what hangrig uses of xgrammar runs without.
        _run([str(interpreter), "-m", "pip", "uninstall", "--quiet", "--yes", "triton"], "leave out triton")


def _check(interpreter: Path, image: Sight) -> None:
    """Raises ImageError where torch or torch_npu is not the image's any more."""
    sight = look(interpreter)
    copies = [
        path.name
        for name in IMAGE_OWNED
        for path in Path(sight.own).glob(f"{name}*")
        if _owned(path.name, name)
    ]
    if sight.owned() != image.owned() or copies:
        told = ", ".join(copies) or f"{sight.owned()} instead of {image.owned()}"
        raise ImageError(f"torch is not the image's any more ({told}); the environment was removed")


def _owned(entry: str, name: str) -> bool:
    """``torch`` and ``torch-2.9.0.dist-info``, not ``torchvision``."""
    return entry == name or re.fullmatch(rf"{name}-[^-]+\.dist-info", entry) is not None


def _run(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ImageError(f"cannot {what}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ImageError(f"cannot {what}:\n  " + "\n  ".join(said[-12:] or [f"status {done.returncode}"]))
