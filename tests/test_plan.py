"""``hangrig plan``: the trials that a bound takes, in words and as a document."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.store import load_schema


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_trials_of_the_gate() -> None:
    done = call("--rate", "0.01", "--confidence", "0.95")
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "299 trials without a hang show that hangs are rarer than 1 %, with 95 % confidence (one-sided, exact)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "trials", "allowed"),
    [
        ((), 299, 0),
        (("--rate", "0.05"), 59, 0),
        (("--confidence", "0.99"), 459, 0),
        (("--true-rate", "0.001"), 299, 0),
        (("--true-rate", "0.001", "--power", "0.9"), 473, 1),
    ],
)
def test_the_document(arguments: tuple[str, ...], trials: int, allowed: int) -> None:
    found = json.loads(call(*arguments, "--json").stdout)
    jsonschema.validate(found, load_schema("trials_needed"))
    assert (found["trials"], found["allowed"]) == (trials, allowed)


def test_how_probable_it_is_to_get_there_is_told() -> None:
    text = call("--true-rate", "0.001", "--power", "0.9").stdout
    assert "473 trials with at most 1 hang" in text
    assert "at a true rate of 0.1 % so few hangs come with probability 91.8 %" in text
    assert "with at most 2 hangs" in call("--true-rate", "0.002", "--power", "0.8").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "0"), "bound must lie between 0 and 1"),
        (("--rate", "1e-9"), "more than"),
        (("--confidence", "1"), "confidence must lie"),
        (("--power", "0.9"), "needs --true-rate"),
        (("--power", "1", "--true-rate", "0.001"), "power must lie"),
        (("--true-rate", "0.02"), "must lie below the bound 0.01"),
    ],
)
def test_what_cannot_be_planned_exits_2(arguments: tuple[str, ...], said: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
