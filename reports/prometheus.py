"""metrics.prom: the run's figures for a node exporter's text-file collector.

Gauges of one finished run, labelled by scenario and arm. Series stay few: no trial and no pid is a label.
"""

from __future__ import annotations

from datetime import datetime

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from reports.model import Result
from reports.words import clean

VERDICTS = ("pass", "fail", "unknown", "skipped")


def render(result: Result) -> bytes:
    """Text exposition format, UTF-8."""
    registry = CollectorRegistry()
    _run(result, registry)
    _arms(result, registry)
    rendered: bytes = generate_latest(registry)
    return rendered


def _run(result: Result, registry: CollectorRegistry) -> None:
    verdict = Gauge(
        "hangrig_run_verdict", "1 for the run's verdict, 0 for the others", ["device", "verdict"],
        registry=registry,
    )  # fmt: skip
    for name in VERDICTS:
        verdict.labels(clean(result.device), name).set(name == result.verdict)
    for metric, text, value in (
        ("hangrig_run_exit_status", "Exit status of the run", float(result.exit)),
        ("hangrig_run_simulation", "1 when no real device took part", float(result.simulation)),
        ("hangrig_run_trials_never_run", "Planned trials that never ran", float(len(result.never_run))),
        ("hangrig_run_trials_left_out", "Trials left out on purpose", float(len(result.left_out))),
        ("hangrig_run_started_timestamp_seconds", "When the run started", _timestamp_s(result.started_utc)),
    ):
        if value is not None:
            Gauge(metric, text, registry=registry).set(value)
    signatures = Gauge(
        "hangrig_signature_trials", "Trials that stopped with one signature",
        ["signature", "mechanism", "status"], registry=registry,
    )  # fmt: skip
    for row in result.signatures:
        signatures.labels(clean(row.signature), clean(row.mechanism), row.status).set(row.count)


def _timestamp_s(utc: str) -> float | None:
    try:
        return datetime.fromisoformat(utc).timestamp()
    except ValueError:
        return None


def _arms(result: Result, registry: CollectorRegistry) -> None:
    labels = ["scenario", "arm", "device"]
    outcomes = Gauge(
        "hangrig_arm_trials", "Trials of an arm by outcome", [*labels, "outcome"], registry=registry
    )
    verdicts = Gauge(
        "hangrig_arm_verdict", "1 for the arm's verdict, 0 for the others", [*labels, "verdict"],
        registry=registry,
    )  # fmt: skip
    rates = {
        key: Gauge(f"hangrig_arm_hang_rate_{key}", text, labels, registry=registry)
        for key, text in (
            ("observed", "Share of trials that hung"),
            ("low", "Lower end of the 95 % interval of the hang rate"),
            ("high", "Upper end of the 95 % interval of the hang rate"),
        )
    }
    corrupt = Gauge("hangrig_arm_corrupt_trials", "Trials with differing tokens", labels, registry=registry)
    latency = Gauge(
        "hangrig_arm_latency_seconds", "Latency of a hot path", [*labels, "path", "quantile"],
        registry=registry,
    )  # fmt: skip
    for arm in result.arms:
        own = (clean(arm.scenario), clean(arm.name), clean(result.device))
        for name in VERDICTS:
            verdicts.labels(*own, name).set(name == arm.verdict)
        for outcome in sorted({trial.outcome for trial in arm.trials}):
            outcomes.labels(*own, clean(outcome)).set(sum(trial.outcome == outcome for trial in arm.trials))
        if arm.hangs.n:
            rates["observed"].labels(*own).set(arm.hangs.k / arm.hangs.n)
        rates["low"].labels(*own).set(arm.hangs.low)
        rates["high"].labels(*own).set(arm.hangs.high)
        corrupt.labels(*own).set(arm.corrupt.k)
        for path, figures in arm.latency_us.items():
            for quantile, value in (("0.5", figures.p50), ("0.95", figures.p95), ("0.99", figures.p99)):
                latency.labels(*own, clean(path), quantile).set(value / 1e6)
