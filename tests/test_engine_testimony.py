"""One testimony of what several launchers say (``engine_target``)."""

from __future__ import annotations

from typing import Any

from serving.targets.engine_target import _together


def part(**changes: Any) -> dict[str, Any]:
    made = {
        "said": [],
        "deaths": [],
        "faults": [],
        "exceptions": {},
        "log": [],
        "probe": {"on": True, "processes": []},
    }
    return made | changes


def test_what_the_nodes_say_comes_in_the_order_of_time() -> None:
    first = part(said=[{"at_s": 3.0, "text": "b"}], deaths=[{"at_s": 9.0, "seat": 0}], exceptions={"0": "x"})
    second = part(said=[{"at_s": 1.0, "text": "a"}], deaths=[{"at_s": 4.0, "seat": 1}], exceptions={"1": "y"})
    whole = _together([first, second])
    assert [line["text"] for line in whole["said"]] == ["a", "b"]
    assert [death["seat"] for death in whole["deaths"]] == [1, 0]
    assert whole["exceptions"] == {"0": "x", "1": "y"}


def test_a_fault_that_the_probe_made_is_told_as_the_probe_tells_it() -> None:
    due = {"index": 1, "name": "block", "seat": None, "at_s": 2.0, "what": "due"}
    sent = {"index": 0, "name": "stop", "seat": 1, "at_s": 2.0, "what": "SIGSTOP to process 7"}
    made = {"index": 1, "name": "block", "step": 17, "mode": "", "what": "the main thread blocks for 3600 s"}
    statuses = [{"seat": 0, "faults": []}, {"seat": "controller", "faults": [made]}]
    whole = _together([part(faults=[sent, due], probe={"on": True, "processes": statuses})])
    assert whole["faults"][0] == sent
    assert whole["faults"][1]["seat"] == "controller"
    assert whole["faults"][1]["what"] == "the main thread blocks for 3600 s, in step 17"


def test_a_fault_that_nobody_made_stays_due() -> None:
    due = {"index": 0, "name": "raise", "seat": None, "at_s": 2.0, "what": "due"}
    assert _together([part(faults=[due])])["faults"] == [due]
