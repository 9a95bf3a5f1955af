"""Writes every report of a run into its directory, each file replaced as a whole."""

from __future__ import annotations

from pathlib import Path

from harness.store import read_run, write_bytes, write_json
from reports import html, junit, markdown, prometheus, result, trace
from reports.baseline import FILE, against_baseline
from reports.model import Result
from reports.timeline import timeline
from reports.words import clean


def write_all(path: str | Path, *, allow_skip: bool = False) -> Result:
    """Writes report.json, report.html, summary.md, junit.xml, metrics.prom, and of each trial with ledgers in its
    evidence a trace.json; returns what they show.

    report.json goes first of the reports, so that programs find the verdict even if a later sink fails. Raises
    StoreError when ``path`` is no run or the disk refuses.
    """
    stored = read_run(path)
    built = against_baseline(result.build(stored, allow_skip=allow_skip), stored)
    if built.baseline is not None and built.baseline.comparison is not None:
        write_json(stored.path / FILE, built.baseline.comparison)
    write_json(stored.path / "report.json", built.to_json())
    write_bytes(stored.path / "junit.xml", junit.render(built))
    write_bytes(stored.path / "metrics.prom", prometheus.render(built))
    write_bytes(stored.path / "summary.md", encode(markdown.render(built)))
    trials = {trial.id: trial for trial in built.trials}
    for one in stored.trials:
        line = timeline(one, trials[one.id]) if one.id in trials else None
        if line is not None:
            write_bytes(one.path / trace.FILE, trace.render(line, trials[one.id], built))
    write_bytes(stored.path / "report.html", encode(html.render(built, stored)))
    return built


def encode(text: str) -> bytes:
    """UTF-8, without the characters that no text file should hold."""
    return clean(text).encode()
