"""Who waits for whom: arrows by ledgers, and the picture of them."""

from __future__ import annotations

import itertools
import json
from importlib import resources

import jsonschema
from ledger_builder import Group, Rank, Stream

from harness.ledger_snapshot import ExternalState
from harness.wait_graph import WaitGraph, wait_graph
from reports import wait_chart


def arrows(graph: WaitGraph) -> set[tuple[str, str]]:
    return {(arrow.waits, arrow.on) for arrow in graph.arrows}


def graph_of(*ranks: Rank) -> WaitGraph:
    graph = wait_graph({one.rank: one.snapshot() for one in ranks})
    schema = json.loads((resources.files("harness") / "schemas" / "waits.json").read_text())
    jsonschema.validate(graph.to_json(), schema)
    names = {node.id for node in graph.nodes}
    assert {side for arrow in arrows(graph) for side in arrow} <= names
    return graph


def test_ranks_that_wait_for_nothing_have_no_arrows() -> None:
    graph = graph_of(Rank(0), Rank(1))
    assert graph.nodes == () and graph.arrows == ()
    assert wait_chart.chart(graph.to_json(), {0}) is None


def test_a_collective_waits_for_the_host_that_did_not_enqueue_it() -> None:
    inside = Rank(0, groups={"experts": Group((0, 1)).round("all_gather").enter("all_reduce")})
    inside.streams["comm"] = Stream([("all_reduce experts", 10)])
    absent = Rank(1, groups={"experts": Group((0, 1)).round("all_gather")})
    found = graph_of(inside, absent)
    assert arrows(found) == {
        ("stream 0 comm", "collective experts 2 0"),
        ("collective experts 2 0", "host 1"),
    }


def test_a_lost_record_is_a_circle_over_the_host_that_would_enqueue_the_update() -> None:
    one = Rank(1, groups={"experts": Group((0, 1))}, host_wait=("copy", 1))
    one.streams["compute"] = Stream([("graph.replay decode.8", 9)])
    one.streams["copy"] = Stream([("event.wait", 9)])
    one.external = [ExternalState("decode.8 attention.0", 22, 21, 1, 2)]
    found = arrows(graph_of(one))
    circle = ["host 1", "stream 1 copy", "stream 1 compute", "event 1 decode.8 attention.0", "host 1"]
    assert set(itertools.pairwise(circle)) <= found


def test_an_event_with_a_record_left_is_not_waited_for() -> None:
    one = Rank(0)
    one.streams["compute"] = Stream([("graph.replay decode.8", 9)])
    one.external = [ExternalState("decode.8 attention.0", 22, 21, 0, 0)]
    assert not [node for node in graph_of(one).nodes if node.kind == "event"]


def test_the_picture_keeps_to_the_blamed_rank_and_a_few() -> None:
    ranks = []
    for number in range(8):
        one = Rank(number, world=8, groups={"experts": Group(tuple(range(8))).enter("all_reduce")})
        one.streams["comm"] = Stream([("all_reduce experts", 10)])
        ranks.append(one)
    ranks[6].groups = {"experts": Group(tuple(range(8)))}
    ranks[6].streams["comm"] = Stream()
    chart = wait_chart.chart(graph_of(*ranks).to_json(), {6})
    assert chart is not None and "rank 6 host" in chart.svg and "rank 7 comm" not in chart.svg
    assert "4 more ranks are in evidence/waits.json only" in chart.reading


def test_a_damaged_graph_is_drawn_as_far_as_it_goes() -> None:
    row = {"id": "a", "kind": "host", "rank": 0, "name": "host", "label": "<b>"}
    document = {
        "nodes": [row, {"id": 3}, "x"],
        "arrows": [{"waits": "a", "on": "gone"}, {"waits": "a", "on": "a"}],
    }
    chart = wait_chart.chart(document, ())
    assert chart is not None and "&lt;b&gt;" in chart.svg
