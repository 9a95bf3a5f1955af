"""Whether a device still works: its first error, its end, and the waits that both of them end.

Used by all devices; a wait through ``block`` or ``delay`` is one that the device can end, as on the simulated one.
"""

from __future__ import annotations

import itertools
import threading

from harness.devices.base import DeviceError


class Stopped(Exception):
    """Raised inside stream threads when a wait ends because the device failed or was closed."""


class Life:
    """Whether the device still works: the first error is kept, and ends every wait of the device."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        """Failed or closed."""
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._error: DeviceError | None = None
        self._waits: dict[int, threading.Event] = {}
        self._numbers = itertools.count()

    def fail(self, where: str, cause: BaseException) -> None:
        """Keeps the first error of a stream thread and wakes all that wait. A closed device has no errors."""
        with self._lock:
            if self.stopped.is_set():
                return
            notes = "".join(f" ({note})" for note in getattr(cause, "__notes__", ()))
            self._error = DeviceError(f"{where} failed on the device: {type(cause).__name__}: {cause}{notes}")
            self._error.__cause__ = cause
            self._stop()

    def close(self) -> None:
        with self._lock:
            self.closed.set()
            self._stop()

    def check(self) -> None:
        """Raises DeviceError if an operation has failed or the device was closed."""
        if not self.stopped.is_set():
            return
        if self._error is None:
            raise DeviceError("the device was closed; nothing can be enqueued or waited for any more")
        raise DeviceError(str(self._error)) from self._error.__cause__

    def block(self, signal: threading.Event, timeout_s: float | None) -> bool:
        """Waits for ``signal``; False after ``timeout_s``. Raises Stopped when the device fails or closes."""
        if not signal.is_set() or self.stopped.is_set():
            number = next(self._numbers)
            with self._lock:
                if self.stopped.is_set():
                    raise Stopped
                self._waits[number] = signal
            try:
                came = signal.wait(timeout_s)
            finally:
                with self._lock:
                    del self._waits[number]
            if self.stopped.is_set():
                raise Stopped
            return came
        return True

    def delay(self, seconds: float) -> None:
        """Lets modelled time pass on the calling thread. Raises Stopped when the device fails or closes."""
        if seconds > 0.0 and self.stopped.wait(seconds):
            raise Stopped

    def delay_on_host(self, seconds: float) -> None:
        """The same on the host, where the device's error is raised instead."""
        if seconds > 0.0:
            self.stopped.wait(seconds)
        self.check()

    def _stop(self) -> None:
        self.stopped.set()
        for signal in self._waits.values():
            signal.set()
