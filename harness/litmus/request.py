"""What is asked of a litmus run, and of each process that shoots for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.litmus.rules import MODEL_OF_DEVICE, MODELS

DEVICES = ("sim", "cuda", "npu")
DEFECTS = ("D1", "D2", "D3", "D4")
ITERATIONS = 300
"""None of 300 bounds a rate below 1 % (95 %, one-sided), the bound that a gate asks for by default."""
DEFAULT_MODEL = "cann"


class LitmusError(ValueError):
    """Bad usage; the message names the option and what may be given."""


@dataclass(frozen=True, slots=True)
class LitmusRequest:
    """Raises LitmusError for what does not fit together. ``model`` None: the device's own, ``cann`` on sim."""

    device: str = "sim"
    model: str | None = None
    iterations: int = ITERATIONS
    seed: int = 0
    only: tuple[str, ...] = ()
    defects: tuple[str, ...] = ()
    out: Path = Path("runs")

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise LitmusError(f"--device {self.device}: litmus runs on {', '.join(DEVICES)}")
        if self.model is not None and self.model not in MODELS:
            raise LitmusError(f"--model {self.model} does not exist; allowed: {', '.join(MODELS)}")
        own = MODEL_OF_DEVICE.get(self.device)
        if own is not None and self.model not in (None, own):
            raise LitmusError(
                f"--model {self.model}: device {self.device} has the model {own}; leave it out there"
            )
        if self.defects and self.device != "sim":
            raise LitmusError(f"--defect: device {self.device} is real; defects are switched on in sim alone")
        if unknown := sorted(set(self.defects) - set(DEFECTS)):
            raise LitmusError(f"--defect {', '.join(unknown)} does not exist; allowed: {', '.join(DEFECTS)}")
        if self.iterations < 1:
            raise LitmusError(f"--iterations {self.iterations}: at least 1")

    @property
    def memory_model(self) -> str:
        return self.model or MODEL_OF_DEVICE.get(self.device, DEFAULT_MODEL)


def chosen_names(only: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """``names`` in their order, all where ``only`` is empty. Raises LitmusError for one that does not exist."""
    if unknown := [one for one in only if one not in names]:
        raise LitmusError(f"--only {', '.join(unknown)}: no such program here; there are {', '.join(names)}")
    return tuple(name for name in names if not only or name in only)


@dataclass(frozen=True, slots=True)
class ChildRequest:
    """``backend``: of the communicator of a pair, whose members find each other by the file ``rendezvous``, new for
    each crew. ``shared``: its members share one device."""

    device: str
    model: str
    defects: tuple[str, ...]
    seed: int
    deadline_s: float
    parent: int = 0
    rank: int = 0
    ranks: int = 1
    backend: str = "gloo"
    shared: bool = False
    rendezvous: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> ChildRequest:
        fields = json.loads(text)
        return cls(**{**fields, "defects": tuple(fields["defects"])})
