"""torch.distributed under the probe, between two real processes over gloo: what each rank's ledger says of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from probe_rig import counts, ledger, modules, seated, status, torch_as_it_was

from serving.probe.hangrig_probe.collectives import Describe
from serving.probe.hangrig_probe.probe import Probe

if TYPE_CHECKING:
    from local_ranks import LocalRanks, Seat

WAIT_S = 20.0


@contextmanager
def recorded(seat: Seat, folder: Path, faults: Sequence[dict[str, Any]] = ()) -> Iterator[Probe]:
    """This process as a rank under the probe; torch's own functions are put back afterwards."""
    assert seat.groups is not None
    with torch_as_it_was():
        yield seated(folder, seat.rank, faults=faults)


def _calls(rank: int) -> dict[str, Callable[[Any], Any]]:
    """One call of each function that is recorded, in an order that both ranks follow."""
    part, whole = torch.ones(2, 3), torch.ones(4, 3)
    objects: list[Any] = [None, None]
    return {
        "all_reduce": lambda g: dist.all_reduce(part, group=g),
        "broadcast": lambda g: dist.broadcast(part, 0, g),
        "reduce": lambda g: dist.reduce(part, 0, group=g),
        "all_gather": lambda g: dist.all_gather([torch.empty(2, 3), torch.empty(2, 3)], part, g),
        "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(torch.empty(4, 3), part, group=g),
        "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(torch.empty(2, 3), whole, group=g),
        "all_to_all_single": lambda g: dist.all_to_all_single(torch.empty(4, 3), whole, group=g),
        "gather": lambda g: dist.gather(part, [part, part] if rank == 0 else None, 0, g),
        "scatter": lambda g: dist.scatter(part, [part, part] if rank == 0 else None, 0, g),
        "barrier": dist.barrier,
        "all_gather_object": lambda g: dist.all_gather_object(objects, rank, g),
        "gather_object": lambda g: dist.gather_object(rank, objects if rank == 0 else None, 0, g),
        "broadcast_object_list": lambda g: dist.broadcast_object_list(objects, 0, g),
        "scatter_object_list": lambda g: dist.scatter_object_list([None], [1, 2], 0, g),
        "monitored_barrier": dist.monitored_barrier,
    }


def _every_function(seat: Seat, folder: Path) -> list[tuple[str, tuple[int, ...], str]]:
    with recorded(seat, folder) as probe:
        group = dist.new_group([0, 1])
        probe.recorder.name_group(group, "tp")
        for call in _calls(seat.rank).values():
            call(group)
        found = ledger(folder, f"rank{seat.rank}").groups["tp"]
        assert found.completed == found.started == found.enqueued
        return [(one.operation, one.shape, one.dtype) for one in found.recent]


def test_every_function_is_one_record_and_the_same_on_both_ranks(ranks: LocalRanks, tmp_path: Path) -> None:
    first, second = ranks.run(2, _every_function, tmp_path)
    assert first == second
    assert [operation for operation, _, _ in first] == list(_calls(0))
    shapes = {operation: (shape, dtype) for operation, shape, dtype in first}
    assert shapes["all_reduce"] == ((2, 3), "float32")
    assert shapes["reduce_scatter_tensor"] == ((4, 3), "float32")
    assert shapes["broadcast_object_list"] == ((), "")
    assert status(tmp_path)["hooks"]["torch.distributed"] == "on"
    assert status(tmp_path)["errors"] == []


def _names(seat: Seat, folder: Path) -> dict[str, tuple[int, int]]:
    with recorded(seat, folder) as probe:
        probe.recorder.naming("moe_ep")
        device, host = dist.new_group([0, 1]), dist.new_group([0, 1])
        probe.recorder.naming(None)
        unnamed, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in (0, 1)][seat.rank]
        other = [dist.new_group([rank]) for rank in (1, 0)][seat.rank]
        for group in (device, device, host, unnamed, alone, None, dist.group.WORLD):
            dist.barrier(group)
        dist.all_reduce(torch.ones(1), group=other)  # Not a member: torch warns and does nothing.
        return counts(ledger(folder, f"rank{seat.rank}"))


def test_groups_have_the_engines_names_and_lone_ranks_have_none(ranks: LocalRanks, tmp_path: Path) -> None:
    first, second = ranks.run(2, _names, tmp_path)
    assert first == second
    own = next(name for name in first if name.startswith("pg."))
    assert first == {"moe_ep": (2, 2), "moe_ep.cpu": (1, 1), own: (1, 1), "default": (2, 2)}


def _asynchronous(seat: Seat, folder: Path) -> tuple[bool, list[int]]:
    with recorded(seat, folder) as probe:
        group = dist.new_group([0, 1])
        probe.recorder.name_group(group, "tp")
        seen = []
        if seat.rank == 0:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            # The peer comes only after this rank has said that it looked.
            seen.append(ledger(folder).groups["tp"].completed)
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        found = ledger(folder, f"rank{seat.rank}").groups["tp"]
        return found.enqueued == found.completed == 1, seen


def test_an_asynchronous_collective_is_done_when_its_work_is(ranks: LocalRanks, tmp_path: Path) -> None:
    assert ranks.run(2, _asynchronous, tmp_path) == [(True, [0]), (True, [])]


def _pairs(seat: Seat, folder: Path) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    with recorded(seat, folder) as probe:
        group = dist.new_group([0, 1])
        probe.recorder.name_group(group, "pp")
        if seat.rank == 0:
            dist.send(torch.ones(5), 1, group)
            dist.send(torch.ones(5), group=group, group_dst=1)
            dist.recv(torch.ones(2), 1, group)
        else:
            assert dist.recv(torch.ones(5), 0, group) == 0
            dist.recv(torch.ones(5), group=group, group_src=0)
            dist.send(torch.ones(2), 0, group)
        return {
            name: (one.ranks, [f"{record.operation} {record.shape}" for record in one.recent])
            for name, one in ledger(folder, f"rank{seat.rank}").groups.items()
            if one.completed
        }


def test_what_two_ranks_send_has_a_sequence_of_its_own(ranks: LocalRanks, tmp_path: Path) -> None:
    first, second = ranks.run(2, _pairs, tmp_path)
    assert first == second
    assert first == {"pp:0>1": ((0, 1), ["send (5,)"] * 2), "pp:1>0": ((1, 0), ["send (2,)"])}


def _unequal(seat: Seat, folder: Path) -> list[tuple[int, ...]]:
    with recorded(seat, folder):
        mine = 1 if seat.rank == 0 else 3
        dist.all_to_all_single(torch.empty(2 * mine), torch.ones(4), [mine, mine], [1, 3])
        return [one.shape for one in ledger(folder, f"rank{seat.rank}").groups["default"].recent]


def test_what_ranks_may_split_unequally_is_no_difference_between_them(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    assert ranks.run(2, _unequal, tmp_path) == [[()]] * 2
    # gloo cannot gather unequal parts, NCCL can: both ranks then see the whole.
    describe = Describe(1, ["tensor_list", "tensor"])
    parts = [torch.empty(1), torch.empty(3)]
    assert [describe((parts, part), {}) for part in parts] == [((4,), "float32", False)] * 2


def _skipped(seat: Seat, folder: Path) -> tuple[list[float], bool, dict[str, tuple[int, int]]]:
    fault = {"name": "skip_collective", "operation": "all_reduce", "group": "tp"}
    with recorded(seat, folder, [fault, fault]) as probe:
        group = dist.new_group([0, 1])
        probe.recorder.name_group(group, "tp")
        for index in (0, 1):
            (folder / f"due-{index}").touch()
        probe.recorder.new_step()
        value = torch.ones(1)
        dist.barrier(group)
        dist.all_reduce(value, group=group)  # Left out, on both ranks.
        work = dist.all_reduce(value, group=group, async_op=True)  # So is this.
        waited = work.wait()
        dist.all_reduce(value, group=group)
        dist.barrier()
        return value.tolist(), waited, counts(ledger(folder, f"rank{seat.rank}"))


def test_a_skipped_collective_returns_untouched_and_is_in_no_ledger(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    assert ranks.run(2, _skipped, tmp_path) == [([2.0], True, {"tp": (2, 2), "default": (1, 1)})] * 2
    for rank in (0, 1):
        faults = status(tmp_path, f"rank{rank}")["faults"]
        assert [one["what"] for one in faults] == ["skipped all_reduce of group tp"] * 2


def _inside(seat: Seat, folder: Path) -> dict[str, tuple[int, int]]:
    with recorded(seat, folder) as probe:
        group = dist.new_group([0, 1])
        probe.recorder.name_group(group, "tp")
        token = probe.recorder.begin(group, "dispatch")
        dist.barrier(group)
        dist.all_reduce(torch.ones(1))
        probe.recorder.end(token)
        dist.barrier(group)
        return counts(ledger(folder, f"rank{seat.rank}"))


def test_what_an_engines_own_collective_calls_inside_is_part_of_it(ranks: LocalRanks, tmp_path: Path) -> None:
    assert ranks.run(2, _inside, tmp_path) == [{"tp": (2, 2)}] * 2


def _raises(seat: Seat, folder: Path) -> tuple[tuple[int, int], bool]:
    with recorded(seat, folder) as probe:
        try:
            dist.all_reduce("no tensor")
        except TypeError:
            pass
        else:
            raise AssertionError("torch takes text for a tensor")
        # What cannot be described is not recorded, and no longer tried.
        dist.all_reduce(torch.ones(1))
        probe.recorder.thread.inside = False
        try:
            dist.broadcast(torch.ones(1), src=9)
        except (ValueError, RuntimeError):
            pass
        else:
            raise AssertionError("there is no rank 9")
        return counts(ledger(folder, f"rank{seat.rank}"))["default"], probe.recorder.thread.inside


def test_what_torch_raises_passes_and_is_entered_but_not_done(ranks: LocalRanks, tmp_path: Path) -> None:
    assert ranks.run(2, _raises, tmp_path) == [((1, 0), False)] * 2
    document = status(tmp_path)
    assert "torch.distributed.all_reduce is no longer recorded" in document["errors"][0]
    assert document["hooks"]["torch.distributed.all_reduce"].startswith("off: ")


def _threads(seat: Seat, folder: Path) -> dict[str, tuple[int, int]]:
    with recorded(seat, folder) as probe:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        for number, group in enumerate(groups):
            probe.recorder.name_group(group, f"g{number}")

        def work(group: Any) -> None:
            for _ in range(20):
                dist.all_reduce(torch.ones(1), group=group)

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return counts(ledger(folder, f"rank{seat.rank}"))


def test_two_threads_on_two_groups_are_both_counted(ranks: LocalRanks, tmp_path: Path) -> None:
    assert ranks.run(2, _threads, tmp_path) == [{"g0": (20, 20), "g1": (20, 20)}] * 2


def _copies(seat: Seat, folder: Path) -> dict[str, tuple[int, int]]:
    assert seat.groups is not None
    with modules({"fake.user": "from torch.distributed import barrier as wait_all"}), torch_as_it_was():
        seated(folder, seat.rank)
        sys.modules["fake.user"].wait_all()
        return counts(ledger(folder, f"rank{seat.rank}"))


def test_copies_that_an_engine_imported_by_name_are_recorded(ranks: LocalRanks, tmp_path: Path) -> None:
    assert ranks.run(2, _copies, tmp_path) == [{"default": (1, 1)}] * 2


def _compiled(seat: Seat, folder: Path) -> tuple[list[float], int]:
    with recorded(seat, folder):

        def forward(value: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(value)
            return value + 1

        result = torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(1))
        return result.tolist(), counts(ledger(folder, f"rank{seat.rank}")).get("default", (0, 0))[0]


def test_under_torch_compile_the_wrapper_is_transparent(ranks: LocalRanks, tmp_path: Path) -> None:
    assert ranks.run(2, _compiled, tmp_path) == [([3.0], 0)] * 2
