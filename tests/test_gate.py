"""The gate's rule on made-up evidence: each need, the answers, blame by four arms, platforms that are not mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from gate_fixture import COMPARED, NPU, POOL, arm, four, litmus, run, trial
from hypothesis import example, given
from hypothesis import strategies as st

from harness.gate.blame import blame
from harness.gate.decision import Gate, decide
from harness.gate.model import SHARED, Evidence, GateError, LitmusTest, Need, Trial, Wish
from harness.gate.platforms import same
from reports.gate import render, sentence

ENOUGH = 299
USUAL = Wish()
WEAK = "too few retractions"
SMALL = Wish(bound=0.3)  # 9 trials
VALUES = ("pageable", "pinned", "pinned_sync", "pinned_snapshot")


def gate(trials: Sequence[Trial], *more: Evidence, wish: Wish = USUAL, **changes: Any) -> Gate:
    return decide([run(trials, **changes), litmus(), *more], wish)


def need(found: Gate, name: str) -> Need:
    return next(one for one in found.needs if one.name == name)


def without(name: str, **changes: Any) -> Any:
    """Changes one litmus test."""
    return lambda test: replace(test, **changes) if test.name == name else test


# --- the answers ---


def test_299_clean_trials_and_all_else_open_the_gate() -> None:
    found = gate(four(ENOUGH))
    assert (found.answer, found.exit, found.missing) == ("yes", 0, ())
    assert {one.name: one.verdict for one in found.needs} == {
        "platform": "met", "litmus": "met", "hangs": "met", "tokens": "met", "latency": "met",
    }  # fmt: skip
    assert (
        found.chosen.platform == "npu (Ascend910, driver 25.2.0, CANN 8.2.RC1, torch 2.7.1, torch_npu 2.7.1)"
    )
    said = sentence(found)
    assert (
        "0 of 299 trials of dp-pinned-gate (model lite) hung, a rate below 0.997 % at 95 %, one-sided" in said
    )
    assert "step takes 0.7 times as long, 95 %: 0.6 to 0.8" in said


def test_one_trial_fewer_is_not_yet_and_the_command_brings_that_one() -> None:
    found = gate(four(ENOUGH - 1))
    assert (found.answer, found.exit) == ("not yet", 3)
    assert {lack.command for lack in found.missing} == {
        "hangrig run dp-pinned-gate --device npu --trials 1 --seed 298"
    }
    assert "1 more trials of pinned" in found.missing[0].what


def test_trials_that_do_not_count_are_told_and_do_not_help() -> None:
    weak = [trial("pinned", 400 + seed, weak=WEAK) for seed in range(3)]
    lost = [trial("pinned", 500, "unknown"), trial("pinned", 501, "skipped")]
    broken = [trial("pinned", 502, spoiled="broken on purpose")]
    found = gate([*four(ENOUGH - 1), *weak, *lost, *broken])
    assert found.answer == "not yet"
    (row,) = [one for one in found.arms if one.pinned == "pinned"]
    assert (row.hangs, row.counted) == (0, ENOUGH - 1)
    assert row.left_out == {
        WEAK: 3, "unknown": 1, "skipped": 1, "broken on purpose": 1,
    }  # fmt: skip


@pytest.mark.parametrize("value", VALUES[1:])
def test_a_hang_with_pinned_copies_and_none_without_is_a_no(value: str) -> None:
    hung = [
        replace(one, outcome="hang") if (one.pinned, one.seed) == (value, 7) else one for one in four(ENOUGH)
    ]
    found = gate(hung)
    assert (found.answer, found.exit) == ("no", 1)
    assert f"1 of 299 hung with {value}, 0 of 299 pageable" in need(found, "hangs").found
    assert found.blame.at_fault is None  # one of 299 does not tell what it is
    assert "At fault" not in sentence(found) and "cannot be told" in sentence(found)


@pytest.mark.parametrize("outcome", ["hang", "livelock", "dead", "stopped"])
def test_every_kind_of_stop_is_a_hang_also_without_pressure(outcome: str) -> None:
    assert gate([*four(ENOUGH), trial("pinned", 900, outcome, weak=WEAK)]).answer == "no"


def test_what_hangs_without_pinning_too_is_not_yet_blamed_on_it() -> None:
    found = gate(four(ENOUGH, pageable=1, pinned=1))
    assert found.answer == "not yet"
    assert need(found, "hangs").lacks[0].command == "hangrig report runs/a"


def test_no_number_of_clean_trials_makes_up_for_a_hang() -> None:
    """The bound would hold: at most 1 hang in 473. The rule wants none."""
    assert gate(four(1000, pageable=1, pinned=1)).answer == "not yet"


def test_a_rate_shown_to_be_too_high_is_a_no_whatever_pageable_does() -> None:
    assert gate(four(40, pageable=8, pinned=8)).answer == "no"


def test_a_slow_trial_is_no_hang() -> None:
    slow = [replace(one, outcome="slow") if one.seed == 3 else one for one in four(ENOUGH)]
    assert gate(slow).answer == "yes"


def test_trials_of_other_scenarios_neither_help_nor_hide() -> None:
    other = replace(POOL, scenario="another")
    short = [*four(200), *arm("pinned", 150, pool=other), *arm("pageable", 150, pool=other)]
    found = gate(short)
    assert need(found, "hangs").figures["n"] == 200
    hung = [*four(ENOUGH), *arm("pinned", 5, hangs=1, pool=other), *arm("pageable", 5, pool=other)]
    assert gate(hung).answer == "no"


def test_a_larger_pool_without_pairs_does_not_take_the_place_of_one_that_has_all() -> None:
    assert gate([*four(ENOUGH), *arm("pinned", 400, pool=replace(POOL, scenario="another"))]).answer == "yes"


def test_runs_of_one_pool_are_added_up() -> None:
    first, second = (
        four(200),
        [replace(one, run="runs/b", seed=one.seed + 200) for one in four(99) if one.seed is not None],
    )
    found = decide([run(first), run(second, path="runs/b"), litmus()], USUAL)
    assert found.answer == "yes"


def test_pinned_sync_does_not_count_for_pinned() -> None:
    assert gate([*arm("pageable", ENOUGH), *arm("pinned_sync", ENOUGH)]).answer == "not yet"


def test_the_commands_keep_settings_and_seeds_and_name_a_users_file() -> None:
    pool = replace(POOL, source="my gate.toml", settings=("model.preset=lite", 'arms.pinned=["pinned"]'))
    found = gate([replace(one, pool=pool) for one in four(4)], wish=SMALL)
    assert found.missing[0].command == (
        "hangrig run 'my gate.toml' --device npu --trials 5 --seed 4 --set model.preset=lite "
        "--set 'arms.pinned=[\"pinned\"]'"
    )


# --- litmus ---


def test_a_forbidden_outcome_is_a_no() -> None:
    seen = litmus(change=without("copy-then-kernel", k=2, verdict="fail"))
    found = decide([run(four(ENOUGH)), seen], USUAL)
    assert found.answer == "no"
    assert need(found, "litmus").found == "seen though forbidden: copy-then-kernel 2 of 300"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"power": False, "verdict": "unknown"}, "graph-fenced: no power shown"),
        ({"n": 0, "verdict": "skipped", "why": "one device only"}, "graph-fenced: one device only"),
        ({"verdict": "unknown"}, "graph-fenced: its verdict is unknown"),
    ],
)
def test_silence_without_power_is_not_yet(changes: dict[str, Any], said: str) -> None:
    found = decide([run(four(ENOUGH)), litmus(change=without("graph-fenced", **changes))], USUAL)
    assert found.answer == "not yet"
    (lack,) = found.missing
    assert said in lack.what
    assert lack.command.startswith("hangrig litmus --device npu")
    assert (
        decide(
            [run(four(ENOUGH)), litmus(change=without("graph-fenced", **changes)), litmus(path="b")], Wish()
        ).answer
        == "yes"
    )


def test_a_litmus_result_that_leaves_tests_out_is_not_enough() -> None:
    part = litmus()
    found = decide([run(four(ENOUGH)), replace(part, tests=part.tests[1:])], USUAL)
    assert found.answer == "not yet"
    assert part.tests[0].name in found.missing[0].what


def test_a_seen_outcome_stays_seen_however_many_later_shots_do_not_show_it() -> None:
    seen = litmus(change=without("block-freed", k=1, verdict="fail"))
    assert decide([run(four(ENOUGH)), seen, litmus(path="b"), litmus(path="c")], USUAL).answer == "no"


def test_a_control_that_is_seen_is_allowed_to_be() -> None:
    assert need(gate(four(ENOUGH)), "litmus").verdict == "met"
    silent = litmus(change=without("copy-race", k=0, verdict="unknown"))
    assert decide([run(four(ENOUGH)), silent], USUAL).answer == "yes"  # what it gives power to says so itself


# --- tokens ---


def differing(pageable: int, pinned: int, trials: int = ENOUGH) -> list[Trial]:
    """So many trials of each side with one request that differs, on seeds apart."""
    found = []
    for one in four(trials):
        assert one.seed is not None
        bad = one.seed < pinned if one.pinned == "pinned" else one.seed >= trials - pageable
        hit = bad and one.pinned in ("pinned", "pageable")
        found.append(replace(one, outcome="corrupt", tokens_differ=1) if hit else one)
    return found


@pytest.mark.parametrize(
    ("pageable", "pinned", "answer"),
    [
        (0, 5, "no"),  # p = 1/32
        (0, 4, "not yet"),  # no pageable trial differs, and 4 of 299 exclude no rate of 1 %
        (0, 1, "not yet"),
        (40, 45, "yes"),  # bf16: both flip tokens now and then
        (10, 30, "no"),
        (45, 40, "yes"),
        (12, 0, "yes"),
    ],
)
def test_pinned_may_differ_as_often_as_pageable_does(pageable: int, pinned: int, answer: str) -> None:
    assert gate(differing(pageable, pinned)).answer == answer


def test_where_no_pageable_trial_differs_one_difference_takes_473_pairs() -> None:
    found = gate(differing(0, 1))
    (lack,) = found.missing
    assert lack.what.startswith("174 more pairs")
    assert gate(differing(0, 1, trials=473)).answer == "yes"


def test_how_much_differs_counts_too_where_every_trial_differs() -> None:
    noisy = [replace(one, tokens_differ=5, outcome="corrupt") for one in four(ENOUGH)]
    assert gate(noisy).answer == "yes"
    worse = [replace(one, tokens_differ=6) if one.pinned == "pinned" else one for one in noisy]
    assert gate(worse).answer == "no"


def test_a_pinned_trial_without_a_compared_partner_is_no_pair() -> None:
    alone = [replace(one, tokens_compared=0) if one.pinned == "pageable" else one for one in four(ENOUGH)]
    found = gate(alone)
    assert need(found, "tokens").figures["pairs"] == 0
    assert found.answer == "not yet"


def test_a_foreign_engine_is_asked_for_a_second_pageable_arm() -> None:
    pool = replace(POOL, foreign=True)
    alone = [replace(one, pool=pool, tokens_compared=0) for one in four(ENOUGH)]
    assert "arms.prefix_cache" in gate(alone).missing[0].command


# --- latency ---


def test_a_gain_that_nobody_measured_is_missing_and_one_that_is_a_loss_is_not() -> None:
    assert [lack.command for lack in gate(four(ENOUGH), latency=None).missing] == [
        "hangrig run dp-pinned-gate --device npu --trials 10 --seed 299"
    ]
    foreign = [replace(one, pool=replace(POOL, foreign=True)) for one in four(ENOUGH)]
    assert [lack.command for lack in gate(foreign, latency=None).missing] == [
        "hangrig run dp-pinned-latency --device npu --trials 10"
    ]
    slower = {
        **COMPARED["paths"][0]["ratios"]["pinned"],
        "ratio": 1.4,
        "low": 1.2,
        "high": 1.6,
        "verdict": "slower",
    }
    rows = [{**row, "ratios": {"pinned": slower}} for row in COMPARED["paths"]]
    found = gate(four(ENOUGH), latency={"paths": rows})
    assert found.answer == "yes"
    assert "step takes 1.4 times as long" in sentence(found)


def test_latencies_of_ranks_that_shared_a_device_are_none() -> None:
    shared = [replace(one, run="runs/b", weak=SHARED) for one in four(9)]
    assert (
        decide([run(four(ENOUGH), latency=None), run(shared, path="runs/b"), litmus()], USUAL).answer
        == "not yet"
    )


def test_a_path_without_an_interval_is_named() -> None:
    rows = [dict(row) for row in COMPARED["paths"]]
    rows[1]["ratios"] = {"pinned": {**rows[1]["ratios"]["pinned"], "low": None, "high": None}}
    found = gate(four(ENOUGH), latency={"paths": rows})
    assert found.missing[0].what.endswith("for bitmask_copy")


# --- simulation ---


@pytest.mark.parametrize("pinned", [0, ENOUGH])
def test_a_simulation_neither_opens_nor_shuts_the_gate(pinned: int) -> None:
    facts = {"memory_model": "cann"}
    parts = [run(four(ENOUGH, pinned=pinned), device="sim", facts=facts), litmus(device="sim", facts=facts)]
    found = decide(parts, USUAL)
    assert (found.answer, found.exit, found.simulation) == ("not yet", 3, True)
    assert [lack.command for lack in found.missing] == [
        "hangrig litmus --device npu", "hangrig run dp-pinned-gate --device npu --trials 299",
    ]  # fmt: skip
    assert sentence(found).startswith("In simulation, which says nothing about hardware")
    assert "opens no gate" in render(found)
    for device in ("npu", "cuda"):
        asked = decide(parts, Wish(device=device))
        assert (asked.answer, asked.chosen.counted) == ("not yet", ())
        assert {why for _, why in asked.chosen.others} == {"a simulation is no evidence about hardware"}


def test_blame_by_a_simulation_is_labelled_and_gives_way_to_a_device() -> None:
    simulated = run(four(8, pinned=8, snapshot=8), device="sim", path="runs/sim", facts={})
    asked = decide([simulated], Wish(device="npu"))
    assert (asked.blame.at_fault, asked.blame.simulation) == ("barrier", True)
    assert "at fault (simulation): barrier" in render(asked)
    real = decide([simulated, run(four(ENOUGH)), litmus()], USUAL)
    assert (real.answer, real.chosen.device) == ("yes", "npu")
    assert (real.blame.at_fault, real.blame.simulation) == (None, False)


# --- platforms ---


@pytest.mark.parametrize("fact", ["device_name", "driver", "cann", "torch", "torch_npu"])
def test_platforms_are_never_mixed(fact: str) -> None:
    other = run(four(9), path="runs/b", facts={**NPU, fact: "another"})
    with pytest.raises(GateError) as told:
        decide([run(four(9)), other], SMALL)
    for part in (fact, NPU[fact], "runs/a", "another", "runs/b", f"--for {fact}=another"):
        assert part in str(told.value)
    chosen = decide([run(four(9)), other, litmus()], replace(SMALL, wanted=(f"{fact}={NPU[fact]}",)))
    assert chosen.answer == "yes"
    assert [(one.path, why.split(":")[0]) for one, why in chosen.chosen.others] == [
        ("runs/b", f"not for {fact}={NPU[fact]}")
    ]


@pytest.mark.parametrize("fact", ["device_name", "driver", "cann", "torch", "torch_npu"])
def test_a_platform_that_is_not_recorded_whole_opens_nothing(fact: str) -> None:
    part = {name: value for name, value in NPU.items() if name != fact}
    found = gate(four(ENOUGH), facts=part)
    assert found.answer == "not yet"
    assert found.missing[0].what == f"the platform: runs/a does not record {fact}"
    assert found.missing[0].command == "hangrig doctor --device npu"


def test_words_that_fit_no_platform_are_told_with_those_that_there_are() -> None:
    with pytest.raises(GateError, match=r"--for: no evidence is for 8\.3; there is npu \(Ascend910"):
        gate(four(9), wish=replace(SMALL, wanted=("8.3",)))
    assert gate(four(9), wish=replace(SMALL, wanted=("cann 8.2", "ascend"))).answer == "yes"


def test_two_devices_have_to_be_chosen_from() -> None:
    cuda = run(four(9), device="cuda", path="runs/c", facts={"device_name": "NVIDIA H200"})
    with pytest.raises(GateError, match=r"of cuda \(runs/c\) and of npu \(runs/a\); choose with --device"):
        gate(four(9), cuda)
    assert gate(four(9), cuda, wish=replace(SMALL, device="npu")).answer == "yes"


def test_a_cpu_has_no_gate() -> None:
    cpu = run(four(9), device="cpu")
    with pytest.raises(GateError, match="nothing is pinned"):
        decide([cpu], SMALL)
    with pytest.raises(GateError, match="allowed: npu, cuda, sim"):
        decide([cpu], replace(SMALL, device="cpu"))


@pytest.mark.parametrize(
    ("name", "one", "other", "family", "alike"),
    [
        ("torch", "2.7.1", "2.7.1+cpu", False, True),
        ("torch", "2.7.1+cu126", "2.7.1+cu128", False, False),
        ("torch", "2.7.1", "2.7.10", False, False),
        ("device_name", "Ascend910", "Ascend910_9392", True, True),
        ("device_name", "Ascend910", "Ascend910_9392", False, False),
        ("device_name", "910B4", "Ascend910_9392", True, False),
        ("device_name", "NVIDIA H200", "NVIDIA H200 NVL", False, False),
        ("cann", "8.2.RC1", "8.2.RC2", True, False),
        ("cann", "8.2.RC1", "CANN 8.2.RC1", True, True),
        ("cann", "8.2.RC1", "8.2.RC1.1", False, False),
    ],
)
def test_what_counts_as_one_platform(name: str, one: str, other: str, family: bool, alike: bool) -> None:
    assert same(name, one, other, family=family) is alike
    assert same(name, other, one, family=family) is alike


# --- blame ---


@pytest.mark.parametrize(
    ("hangs", "at_fault", "reuse", "said"),
    [
        ({"pinned": 8, "snapshot": 8}, "barrier", False, "a copied source does not cure it"),
        ({"pinned": 8, "sync": 8, "snapshot": 8}, "pinning", False, "pinned_sync has the barrier back"),
        ({"pinned": 8}, "pinning", True, "the source is reused while its copy is pending"),
        ({}, None, False, "not shown to be worse"),
        ({"pinned": 2, "snapshot": 2}, None, False, "not shown to be worse"),
        ({"pageable": 8, "pinned": 8, "sync": 8, "snapshot": 8}, None, False, "not shown to be worse"),
        ({"pinned": 8, "sync": 3, "snapshot": 8}, None, False, "whether pinned_sync cures it is not decided"),
        ({"pinned": 8, "snapshot": 4}, None, False, "whether pinned_snapshot cures it is not decided"),
    ],
)
def test_blame_by_the_four_arms(hangs: dict[str, int], at_fault: str | None, reuse: bool, said: str) -> None:
    found = blame(four(8, **hangs), 0.95)
    assert (found.at_fault, found.reuse) == (at_fault, reuse)
    assert said in found.why


def test_wrong_tokens_are_a_symptom_too() -> None:
    def tokens(*bad: str) -> list[Trial]:
        return [replace(one, tokens_differ=3) if one.pinned in bad else one for one in four(8)]

    assert blame(tokens("pinned", "pinned_snapshot"), 0.95).at_fault == "barrier"
    assert blame(tokens("pinned", "pinned_sync"), 0.95).at_fault == "pinning"
    assert blame(tokens("pinned"), 0.95).reuse


def test_without_the_fourth_arm_the_barrier_is_blamed_with_a_reserve() -> None:
    found = blame([one for one in four(8, pinned=8) if one.pinned != "pinned_snapshot"], 0.95)
    assert found.at_fault == "barrier"
    assert "which only pinned_snapshot would tell" in found.why


def test_without_pinned_sync_nobody_can_tell() -> None:
    found = blame([one for one in four(8, pinned=8) if one.pinned != "pinned_sync"], 0.95)
    assert found.at_fault is None
    assert "no seed has both a pinned and a pinned_sync trial" in found.why


def test_arms_are_held_against_each_other_on_the_same_seeds_only() -> None:
    """Eight pinned trials hang on seeds that no other arm has: that tells nothing."""
    apart = [
        replace(one, seed=one.seed + 100) if one.pinned == "pinned" and one.seed is not None else one
        for one in four(8, pinned=8)
    ]
    assert blame(apart, 0.95).tests[0].arm == "pinned_sync"
    assert blame(apart, 0.95).at_fault is None


def test_scenarios_that_disagree_blame_nothing() -> None:
    other = replace(POOL, scenario="another")
    sides = [*four(8, pinned=8, snapshot=8), *(replace(one, pool=other) for one in four(8, pinned=8, sync=8))]
    found = blame(sides, 0.95)
    assert found.at_fault is None
    assert "disagree" in found.why


@given(st.lists(st.tuples(st.sampled_from(VALUES), st.integers(0, 12), st.booleans()), max_size=60))
def test_blame_always_has_a_reason_and_tests_that_carry_it(rows: list[tuple[str, int, bool]]) -> None:
    trials = [trial(value, seed, "hang" if hung else "healthy") for value, seed, hung in rows]
    found = blame(trials, 0.95)
    assert found.why
    if found.at_fault is not None:
        assert any(test.shown for test in found.tests)
    if found.at_fault == "barrier":
        shown = {(test.arm, test.against) for test in found.tests if test.shown}
        assert {("pinned", "pageable"), ("pinned", "pinned_sync")} <= shown


# --- what more evidence can change ---

_ROWS = st.lists(
    st.tuples(
        st.sampled_from(VALUES),
        st.integers(0, 30),
        st.sampled_from(["healthy", "healthy", "healthy", "healthy", "slow", "hang", "unknown"]),
        st.sampled_from([True, True, True, False]),
        st.sampled_from([0, 0, 0, 1, 2]),
    ),
    max_size=50,
    unique_by=lambda row: row[:2],
)


def _trials(rows: list[Any]) -> list[Trial]:
    return [
        trial(value, seed, outcome, weak="" if pressed else WEAK, tokens_differ=differ)
        for value, seed, outcome, pressed, differ in rows
    ]


@given(_ROWS, st.integers(1, 12), st.integers(0, 12))
@example([], 9, 9)
def test_clean_trials_never_turn_yes_into_no(rows: list[Any], base: int, more: int) -> None:
    before = [*four(base), *(replace(one, run="runs/b") for one in _trials(rows))]
    clean = [replace(one, run="runs/c") for one in four(more)]
    first, second = gate(before, wish=SMALL).answer, gate([*before, *clean], wish=SMALL).answer
    assert not (first == "yes" and second != "yes")
    assert not (first == "not yet" and second == "no")


@given(_ROWS, st.integers(0, 40), st.sampled_from(VALUES), st.booleans())
@example([], 16, "pageable", True)
def test_a_hang_more_never_turns_no_into_yes_nor_opens_the_gate(
    rows: list[Any], base: int, value: str, pressed: bool
) -> None:
    before = [*four(base), *(replace(one, run="runs/b") for one in _trials(rows))]
    hung = trial(value, 77, "hang", run="runs/d", weak="" if pressed else WEAK)
    first, second = gate(before, wish=SMALL).answer, gate([*before, hung], wish=SMALL).answer
    assert not (second == "yes" and first != "yes")
    if value == "pinned":
        assert second != "yes"


@given(_ROWS, st.integers(0, 12))
def test_a_yes_rests_on_what_the_rule_asks_for(rows: list[Any], base: int) -> None:
    trials = [*four(base), *(replace(one, run="runs/b") for one in _trials(rows))]
    found = gate(trials, wish=SMALL)
    if found.answer == "yes":
        pinned = [one for one in trials if one.pinned == "pinned" and one.known]
        assert sum(not one.weak for one in pinned) >= 9
        assert not any(one.hung for one in pinned)
    else:
        assert found.missing or found.answer == "no"


@pytest.mark.parametrize("test", [LitmusTest("copy-then-kernel", True, 0, 300, True, "pass")])
def test_one_litmus_test_alone_is_not_all_of_them(test: LitmusTest) -> None:
    part = replace(litmus(), tests=(test,))
    assert need(decide([run(four(ENOUGH)), part], USUAL), "litmus").verdict == "missing"
