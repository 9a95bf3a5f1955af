"""What a fault is: a table in a scenario, a small class registered by name, and what arms it in a rank.

A fault names the ranks, the site, the steps and the passes at which it acts; its class says what it does there.
The standard ones are in ``fault_library.py``. Anybody adds more, in a file that a command takes with ``--faults``
or in a package that names its module in the entry-point group ``hangrig.faults``; docs/faults.md shows one.

Not here: the sites (``faults.py``) and the faults of foreign engines, which their probe makes
(``scenario_faults.py``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import Field, ValidationError, model_validator

from harness.faults import SITES, FaultError, Passing
from harness.scenario_faults import FaultTable

GROUP = "hangrig.faults"
Steps = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


class Fault(FaultTable):
    """One thing broken on purpose. A subclass gives ``name`` a ``Literal`` type, lists the ``sites`` where it can
    act, its own parameters as further fields, and what it does in ``act``."""

    sites: ClassVar[tuple[str, ...]] = ()
    """Where this kind of fault can act; the first one where the scenario names none."""

    name: str
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Ranks on which it acts; none named means all."""
    site: str = ""
    steps: Steps | None = None
    """First and last step of the engine in which it acts, both included; any where nothing is said."""
    times: Annotated[int, Field(ge=0)] = 1
    """The most often that it acts on a rank in a trial; 0 for no limit."""
    after: Annotated[int, Field(ge=0)] = 0
    """So many passes that fit are let go first."""
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the passes that fit at which it acts."""
    seed: int | None = None
    """Of that draw; the trial's where nothing is said."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Values that a pass must have, such as ``group = "experts"``; a list allows any of its values."""
    twin: dict[str, Any] = Field(default_factory=dict)
    """What is different in the healthy twin. Where nothing is said the twin's fault watches and never acts."""

    @model_validator(mode="after")
    def _fits_its_site(self) -> Fault:
        if self.site and self.site not in self.sites:
            raise ValueError(f"{self.name} cannot act at {self.site!r}; allowed: {', '.join(self.sites)}")
        offered = SITES[self.place].keys
        unknown = sorted(set(self.where) - set(offered))
        if unknown:
            allowed = ", ".join(offered) or "nothing"
            raise ValueError(f"where.{unknown[0]}: {self.place} offers {allowed}")
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ValueError(f"steps: [{self.steps[0]}, {self.steps[1]}] ends before it begins")
        return self

    @property
    def place(self) -> str:
        """The site at which it acts."""
        return self.site or self.sites[0]

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        """Does it, on the thread that passes the site. ``memory`` is this fault's own, for one rank and trial; what
        is raised here, the code at the site sees."""
        raise NotImplementedError

    def begun(self, passing: Passing, memory: Mapping[str, Any]) -> bool:
        """Whether something that it began at an earlier pass goes on at this one."""
        return False

    def finds(self, passing: Passing) -> bool:
        """Whether this pass is one to act at, apart from ranks, steps and ``where``."""
        return True

    def repaired(self) -> Fault:
        """As it is in the healthy twin."""
        changed = {**self.model_dump(exclude={"twin"}), **(self.twin or {"probability": 0.0})}
        return type(self).model_validate(changed)


F = TypeVar("F", bound=Fault)
_REGISTERED: dict[str, type[Fault]] = {}


def register(fault: type[F]) -> type[F]:
    """Makes a class known by the value of its ``name``. Raises FaultError for one that cannot be used, or a name
    that is taken."""
    where = f"{fault.__module__}.{fault.__qualname__}"
    names = get_args(fault.model_fields["name"].annotation)
    if len(names) != 1 or not isinstance(names[0], str):
        raise FaultError(f'{where}: give it a name: Literal["my_fault"]')
    if not fault.sites:
        raise FaultError(f"{where}: give it sites: ClassVar[tuple[str, ...]], of {', '.join(SITES)}")
    unknown = [site for site in fault.sites if site not in SITES]
    if unknown:
        raise FaultError(f"{where}: there is no site {unknown[0]!r}; allowed: {', '.join(SITES)}")
    if fault.act is Fault.act:
        raise FaultError(f"{where}: say what it does: def act(self, passing, memory)")
    name = names[0]
    before = _REGISTERED.get(name)
    if before is not None and f"{before.__module__}.{before.__qualname__}" != where:
        raise FaultError(f"{where}: the name {name!r} is taken by {before.__module__}.{before.__qualname__}")
    _REGISTERED[name] = fault
    return fault


def registered() -> dict[str, type[Fault]]:
    """Every fault by name: the standard ones, those of installed packages, those of files that were loaded. Raises
    FaultError when a package's module cannot be loaded."""
    import harness.fault_library  # noqa: F401 - registers the standard ones

    _load_packages()
    return dict(sorted(_REGISTERED.items()))


@lru_cache(maxsize=1)
def _load_packages() -> None:
    """Once a process: a corpus reads dozens of scenarios, and what is installed does not change meanwhile."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise FaultError(
                f"entry point {entry.name} of {GROUP} ({entry.value}): {_said(error)}"
            ) from error


def load_file(path: Path) -> None:
    """Runs a Python file that registers faults. Raises FaultError naming the file."""
    spec = importlib.util.spec_from_file_location(f"hangrig_faults_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FaultError(f"{path}: is no Python file; give one that registers faults (docs/faults.md)")
    before = set(_REGISTERED)
    module = importlib.util.module_from_spec(spec)
    # Annotations that are texts (``from __future__ import annotations``) are looked up in the module of that name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise FaultError(f"{path}: {_said(error)}") from error
    if not set(_REGISTERED) - before and not any(one.__module__ == spec.name for one in _REGISTERED.values()):
        raise FaultError(f"{path}: registers no fault; put @register before its class (docs/faults.md)")


def _said(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    return f"{type(error).__name__}: {error}" + (f" (line {line})" if line is not None else "")


def parse(table: Mapping[str, Any]) -> Fault:
    """A fault of a stored scenario. Raises FaultError."""
    known = registered()
    name = str(table.get("name"))
    if name not in known:
        raise FaultError(f"there is no fault {name!r}; known: {', '.join(known)}")
    try:
        return known[name].model_validate(dict(table))
    except ValidationError as error:
        raise FaultError(f"fault {name!r}: {error.errors()[0]['msg']}") from error


class Armed:
    """One fault on one rank in one trial. ``log`` is a descriptor to which each act is written before it is done,
    so that also a fault that ends the process has been told; None: nowhere."""

    def __init__(self, fault: Fault, index: int, rank: int, *, seed: int, log: int | None = None) -> None:
        self.fault = fault
        self.acted = 0
        self._index = index
        self._log = log
        self._memory: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._fitting = 0
        chosen = seed if fault.seed is None else fault.seed
        self._began_s = time.monotonic()
        self._source = random.Random(f"{chosen}/{rank}/{index}/{fault.name}")

    def visit(self, passing: Passing) -> None:
        if passing.site == self.fault.place and self._fits(passing) and self._due():
            self._tell(passing)
            self.fault.act(passing, self._memory)

    def _fits(self, passing: Passing) -> bool:
        fault = self.fault
        if fault.steps is not None and not fault.steps[0] <= passing.step <= fault.steps[1]:
            return False
        for key, wanted in fault.where.items():
            allowed = wanted if isinstance(wanted, list | tuple) else [wanted]
            if passing.values.get(key) not in allowed:
                return False
        return fault.begun(passing, self._memory) or fault.finds(passing)

    def _due(self) -> bool:
        with self._lock:
            self._fitting += 1
            drawn = self._source.random() < self.fault.probability
            if self._fitting <= self.fault.after or not drawn:
                return False
            if self.fault.times and self.acted >= self.fault.times:
                return False
            self.acted += 1
            return True

    def _tell(self, passing: Passing) -> None:
        if self._log is None:
            return
        plain = {k: v for k, v in passing.values.items() if isinstance(v, str | int | float | bool)}
        line = {
            "fault": self.fault.name,
            "index": self._index,
            "rank": passing.rank,
            "step": passing.step,
            "at_s": round(time.monotonic() - self._began_s, 6),
            "site": passing.site,
            "values": plain,
        }
        os.write(self._log, json.dumps(line).encode() + b"\n")


def arm(faults: Sequence[Fault], rank: int, *, seed: int, log: int | None = None) -> list[Armed]:
    """Those of ``faults`` that act on ``rank``."""
    return [
        Armed(fault, index, rank, seed=seed, log=log)
        for index, fault in enumerate(faults)
        if not fault.ranks or rank in fault.ranks
    ]
