"""Which accelerators a rank's process holds, and which number torch gives them there.

Ray hands out devices by the ids of the machine. What a process sees may be fewer (``CUDA_VISIBLE_DEVICES``,
``ASCEND_RT_VISIBLE_DEVICES``), and torch numbers those from 0. The pool writes down what a rank was given; the rank
asks here, in the same process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

VISIBLE: Mapping[str, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_HELD = "HANGRIG_HELD_DEVICES"
SEE_ALL: Mapping[str, Mapping[str, str]] = {"cuda": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
"""By device: what keeps Ray from hiding the others' devices from a rank. torch's symmetric memory tells devices
apart by their number in each process, so that ranks which see one device each have the same one to it
(``CUDASymmetricMemory.cu``, rendezvous: "overlapping devices from different ranks")."""


def write_held(ids: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Once in a process, before anybody asks."""
    environ[_HELD] = ",".join(ids)


def held(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Ids of the machine; empty where nobody placed this process."""
    return tuple(filter(None, environ.get(_HELD, "").split(",")))


def local_index(kind: str, environ: Mapping[str, str] = os.environ) -> int:
    """Torch's number of the first device that this process holds; 0 where nobody placed it. Raises ValueError when
    the process does not see that device."""
    ids = held(environ)
    if not ids:
        return 0
    text = environ.get(VISIBLE[kind])
    seen = None if text is None else [part.strip() for part in text.split(",")]
    if seen is None and ids[0].isdecimal():
        return int(ids[0])
    if seen is None or ids[0] not in seen:
        raise ValueError(
            f"this rank was given {kind} device {ids[0]}, but {VISIBLE[kind]} is {text!r}; start Ray and hangrig "
            "with the same visible devices"
        )
    return seen.index(ids[0])
