"""The merged tree as a report shows it: one section a kind of thread, what all share, who differs, who moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_fixture import ARMS, RunBuilder, merged

from harness.stacks import Frame, ProcessStacks, ThreadStack
from harness.stacks_tree import merge, tree_to_json
from harness.store import read_run, write_json
from reports import html
from reports.result import build
from reports.stacks_view import Branch, Section, members_text, sections
from reports.words import ranges

STEP = ("main", "run", "step")
WAIT, ODD = ("agree", "all_gather", "wait"), ("log", "emit", "acquire")


def thread(name: str, *functions: str) -> ThreadStack:
    """``functions`` outermost first, each of the project's own, but for the last words of a wait."""
    files = {"wait": "/usr/lib/python3.11/threading.py", "acquire": "/usr/lib/python3.11/threading.py"}
    frames = [Frame(one, files.get(one, f"/w/serving/{one}.py"), 7) for one in functions]
    return ThreadStack(1, name, False, False, tuple(reversed(frames)))


def sample(hosts: dict[int | str, tuple[str, ...]], **others: tuple[str, ...]) -> list[ProcessStacks]:
    """``hosts``: frames of the host thread by seat; ``others``: of further threads of each, by name."""
    return [
        ProcessStacks(
            1, seat, "py-spy", False,
            (thread("MainThread", *STEP, *frames), *(thread(n, *f) for n, f in others.items())),
        )
        for seat, frames in hosts.items()
    ]  # fmt: skip


def shown(*samples: list[ProcessStacks], culprits: tuple[int | str, ...] = ()) -> dict[str, Section]:
    return {found.title: found for found in sections(tree_to_json(merge(*samples)), culprits)}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_what_all_share_comes_first_and_who_differs_stands_out(world: int) -> None:
    hosts = {rank: ODD if rank == 1 else WAIT for rank in range(world)}
    host = shown(sample(hosts), sample(hosts), culprits=(1,))["host"]
    (root,) = host.branches
    assert (root.who, root.frames[-1]) == (ranges(range(world)), "step (w/serving/step.py:7)")
    odd = next(branch for branch in root.children if branch.who == "rank 1")
    assert odd.culprit and not any(branch.culprit for branch in root.children if branch is not odd)
    assert odd.odd is (world > 2)
    assert host.differ and host.moved == ""
    assert {(place.who, place.frame, place.culprit) for place in host.places} == {
        (ranges(set(range(world)) - {1}), "all_gather (w/serving/all_gather.py:7), in wait", False),
        ("rank 1", "emit (w/serving/emit.py:7), in acquire", True),
    }


def test_threads_that_stand_alike_are_one_place() -> None:
    host = shown(sample(dict.fromkeys(range(8), WAIT)))["host"]
    assert (host.differ, len(host.places), host.who) == (False, 1, "ranks 0 to 7")
    (root,) = host.branches
    assert root.children == () and root.outer + root.frames == tuple(
        f"{name} ({'threading.py' if name == 'wait' else f'w/serving/{name}.py'}:7)"
        for name in (*STEP, *WAIT)
    )


def test_who_moved_stands_in_both_places_and_each_says_when() -> None:
    before = sample({0: WAIT, 1: ("compile", "lower"), 2: WAIT})
    after = sample({0: WAIT, 1: ("compile", "codegen", "emit"), 2: WAIT})
    host = shown(before, after)["host"]
    assert host.moved == "rank 1"
    assert [(place.who, place.when, place.frame.split()[0]) for place in host.places] == [
        ("ranks 0, 2", "", "all_gather"),
        ("rank 1", "in the first sample", "lower"),
        ("rank 1", "in the second sample", "emit"),
    ]
    compiling = host.branches[0].children[1]
    assert (compiling.who, compiling.when, compiling.odd) == ("rank 1", "", True)
    assert [child.when for child in compiling.children] == ["in the first sample", "in the second sample"]


def test_threads_of_a_kind_are_compared_and_the_rest_comes_after() -> None:
    processes = sample(
        {0: WAIT, 1: WAIT, "controller": ("serve",), "child 77 of rank 1": ("work",)},
        **{"hangrig-compute": ("boot", "replay"), "ray_listener": ("boot", "poll")},
    )
    found = shown(processes, culprits=("controller",))
    assert list(found) == ["host", "compute", "other threads", "processes that ranks started"]
    assert found["host"].who == "ranks 0, 1; controller"
    assert [(place.who, place.culprit) for place in found["host"].places] == [
        ("ranks 0, 1", False), ("controller", True),
    ]  # fmt: skip
    assert found["compute"].who == "ranks 0, 1; controller" and not found["compute"].differ
    assert found["other threads"].branches[0].who == "controller ray_listener; ray_listener of ranks 0, 1"
    assert "child 77 of rank 1 host" in found["processes that ranks started"].who


def test_whoever_ends_where_others_go_on_is_named() -> None:
    host = shown(sample({0: (), 1: WAIT}))["host"]
    assert (host.branches[0].end, [child.who for child in host.branches[0].children]) == (
        "rank 0",
        ["rank 1"],
    )


def test_long_shared_parts_are_folded_but_complete() -> None:
    deep = tuple(f"f{number}" for number in range(30))
    (root,) = shown(sample({0: (*deep, "a"), 1: (*deep, "b")}))["host"].branches
    assert len(root.frames) == 3 and len(root.outer) == 30
    assert [name.split()[0] for name in root.outer + root.frames] == [*STEP, *deep]


def test_every_frame_of_the_tree_is_somewhere_in_the_view() -> None:
    document = merged()

    def frames(nodes: list[dict[str, object]]) -> set[str]:
        found: set[str] = set()
        for node in nodes:
            assert isinstance(node["children"], list)
            found |= {str(node["frame"])} | frames(node["children"])
        return found

    def seen(branches: tuple[Branch, ...]) -> set[str]:
        found: set[str] = set()
        for branch in branches:
            found |= {*branch.outer, *branch.frames} | seen(branch.children)
        return found

    shown_frames = set().union(*(seen(section.branches) for section in sections(document)))
    assert shown_frames == frames(document["roots"])


def test_damaged_members_do_not_break_it() -> None:
    odd = {"frame": "f", "members": ["", "rank x host", "rank 1", 7], "children": [{"frame": 3}, "no"]}
    titles = [section.title for section in sections({"roots": [odd, "no", {}]})]
    assert titles == ["other threads"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([0, 1, 2, 4], "ranks 0 to 2, 4"), ([5, 7, 8, 9], "ranks 5, 7 to 9"),
     (range(4), "ranks 0 to 3")],
)  # fmt: skip
def test_ranks_read_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_members_are_named_by_thread() -> None:
    assert members_text(["rank 0 copy", "rank 1 copy", "client host"]) == "client host; copy of ranks 0, 1"


def test_the_page_shows_places_moves_and_children(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    trial = builder.trial(ARMS[0], 0, "hang", expected="any")
    tree = merge(sample({0: WAIT, 1: ("lower",)}), sample({0: WAIT, 1: ("emit",)}))
    write_json(trial.evidence / "merged.json", tree_to_json(tree))
    children = [
        {"of": "rank1", "pid": 5001, "parent": 4001, "state": "S", "command": "sh -c <b>", "python": False}
    ]
    write_json(trial.evidence / "sample-1" / "processes.json", {"ranks": [], "children": children})
    stored = read_run(builder.finish())
    text = html.render(build(stored), stored)
    assert "rank 1 moved" in text and "in the second sample" in text
    assert "Processes that ranks started" in text and "sh -c &lt;b&gt;" in text
