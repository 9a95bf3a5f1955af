"""The agent: the process on each node, outside ranks and driver, that watches, captures and ends.

    python -m harness.agent SPOOL

It detaches itself (a mere new session dies with a local raylet), reads ``command.json``, writes ``status.json`` ten
times a second, and needs neither Ray nor the driver. When the driver is gone, when it is told by SIGTERM, or when
its life is over, it captures what runs, stores it, ends ranks and cluster, has the reports written that a gone
driver owes, and goes. A failure inside one turn is recorded and the next turn comes. What it watches in a trial is
`trial_watch.py`, the files are `agent_files.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from types import FrameType

from harness import agent_files, process_control
from harness.agent_files import AgentConfig, AgentState, Command, SpoolError, Status
from harness.process_control import ProcessId
from harness.trial_watch import TrialWatch

_IDLE_PERIOD_S = 0.1
_log = logging.getLogger("hangrig.agent")


class Agent:
    """One turn after the other until it is told to stop or has nobody left."""

    def __init__(self, spool: Path, config: AgentConfig) -> None:
        self._spool = spool
        self._config = config
        self._born = time.monotonic()
        self._own = process_control.myself()
        self._wake = Event()
        self._terminated = False
        self._command = Command(counter=0)
        self._heard = time.monotonic()
        self._watch: TrialWatch | None = None
        self._state: AgentState = "starting"
        self._error: str | None = None
        self._logged: str | None = None

    def run(self) -> None:
        """Returns when the agent has no more to do."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._state = "idle"
        while self._state not in ("ending", "ended"):
            started = time.monotonic()
            try:
                self._turn()
            except Exception as error:  # recorded in status and log; one bad turn must not cost the watch
                self._fail(error)
            self._publish()
            self._wake.wait(max(0.0, self._period_s() - (time.monotonic() - started)))
        self._publish("ended")

    # One turn --------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._read_command()
        if self._command.stop:
            self._state = "ending"
            return
        orphaned = self._orphaned()
        if orphaned is not None:
            self._state = "ending"
            self._last_will(orphaned)
            return
        if self._watch is None:
            self._state = "idle"
            return
        if self._command.capture is not None:
            self._watch.capture_now(self._command.capture)
        else:
            self._watch.look(self._command.done)
        self._state = self._watch.state

    def _read_command(self) -> None:
        command = agent_files.read(self._spool, agent_files.COMMAND, Command)
        if command is None or command.counter == self._command.counter:
            return
        self._heard = time.monotonic()
        before, self._command = self._command.trial, command
        trial = command.trial
        if (before and (before.id, before.attempt)) == (trial and (trial.id, trial.attempt)):
            return
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if trial is not None:
            _log.info("trial %s attempt %d: %d ranks", trial.id, trial.attempt, len(trial.ranks))
            self._watch = TrialWatch(trial, capture_s=self._config.capture_s, busy=self._publish_busy)

    def _orphaned(self) -> str | None:
        """Why there is nobody left to work for, None while there is."""
        config = self._config
        if self._terminated:
            return "the agent was told to end (SIGTERM)"
        if time.monotonic() - self._born > config.lifetime_s:
            return f"the agent has lived for {config.lifetime_s:g} s, its longest time"
        if config.driver is not None:
            gone = not process_control.alive(config.driver)
            return f"driver gone (process {config.driver.pid})" if gone else None
        silent_s = time.monotonic() - self._heard
        return f"driver gone (silent for {silent_s:.0f} s)" if silent_s > config.driver_silence_s else None

    def _last_will(self, reason: str) -> None:
        """Evidence first; then everything that the driver would have ended."""
        _log.warning("%s", reason)
        evidence = None
        if self._watch is not None:
            try:
                self._watch.capture_now(reason)
            except Exception as error:  # whatever it is, ranks and cluster must not be left running
                self._fail(error)
            evidence = self._watch.trial.evidence
            self._publish()
        left = self._end_all()
        if left:
            _log.error("would not die: %s", ", ".join(str(process.pid) for process in left))
        self._write_reports()
        if evidence is not None and evidence.is_dir():
            shutil.copyfile(self._spool / agent_files.LOG, evidence / agent_files.LOG)
        on_this_node = evidence is None or not evidence.is_relative_to(self._spool)
        if not left and on_this_node and not self._terminated:
            shutil.rmtree(self._spool, ignore_errors=True)  # nobody is left to read it

    def _write_reports(self) -> None:
        """A job that lost its driver still has a junit.xml, and it says unknown. ``hangrig report`` in a process of
        its own: whatever it meets, this one goes on."""
        run, driver = self._config.run, self._config.driver
        if run is None or not run.is_dir() or driver is None or process_control.alive(driver):
            return
        command = [sys.executable, "-m", "harness.cli", "report", str(run)]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=self._config.report_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._fail(error)
            return
        if not (run / "junit.xml").exists():
            _log.error("no reports of %s: %s", run, done.stderr.decode(errors="replace")[-2000:])

    def _end_all(self) -> list[ProcessId]:
        owned = set(self._command.owned)
        if self._watch is not None:
            owned.update(rank.process for rank in self._watch.trial.ranks)
        owned.update(process_control.children_of(*(p.pid for p in owned if process_control.alive(p))))
        # The cluster first: a raylet that sees a rank die might start something in its place.
        left = [] if self._config.cluster is None else self._config.cluster.end(self._config.end_s)
        return sorted({*left, *process_control.end(owned, self._config.end_s, grace_s=0.0)})

    # Status ----------------------------------------------------------------------------------------------

    def _publish_busy(self, until_ns: int) -> None:
        self._publish("capturing", busy_until_ns=until_ns)

    def _publish(self, state: AgentState | None = None, busy_until_ns: int = 0) -> None:
        if not self._spool.is_dir():
            return
        status = Status(
            process=self._own,
            state=state or self._state,
            counter=self._command.counter,
            heartbeat_ns=time.monotonic_ns(),
            busy_until_ns=busy_until_ns,
            error=self._error,
        )
        watch = self._watch
        if watch is not None:
            status = status.model_copy(
                update={
                    "trial": watch.trial.id,
                    "attempt": watch.trial.attempt,
                    "reason": watch.reason,
                    "ranks": watch.ranks,
                    "proof": watch.proof,
                    "times": watch.times,
                    "samples": watch.samples,
                    "evidence": watch.evidence,
                    "slow": tuple(watch.slow),
                    "notes": tuple(watch.notes),
                    "error": watch.error or self._error,
                }
            )
        try:
            agent_files.write(self._spool, agent_files.STATUS, status)
        except SpoolError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = f"{type(error).__name__}: {error}"
        if self._error != self._logged:  # the same failure ten times a second would fill the disk
            self._logged = self._error
            _log.error("%s", self._error, exc_info=error)

    def _period_s(self) -> float:
        if self._state in ("ending", "ended"):
            return 0.0
        return _IDLE_PERIOD_S if self._watch is None else self._watch.trial.watchdog.sample_period_s

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._terminated = True
        self._wake.set()


def detach() -> None:
    """The caller goes on as a grandchild in a session of its own, adopted by init."""
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    if os.fork() > 0:
        os._exit(0)


def main(arguments: list[str]) -> int:
    """Returns the exit status: 2 when the spool holds no valid configuration."""
    if len(arguments) != 1:
        print("usage: python -m harness.agent SPOOL", file=sys.stderr)
        return 2
    spool = Path(arguments[0])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = agent_files.read(spool, agent_files.CONFIG, AgentConfig)
    except SpoolError as error:
        print(error, file=sys.stderr)
        return 2
    if config is None:
        print(f"{spool / agent_files.CONFIG}: missing; the driver writes it first", file=sys.stderr)
        return 2
    detach()
    Agent(spool, config).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
