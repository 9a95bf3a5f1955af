"""Rules that span several keys of a scenario: combinations that cannot work, refused before anything starts.

Here: pure checks of a valid `Scenario`, each answering with problems that name the key. Not here: the limits
of one key (`scenario_model.py`) and the platform's own refusals (`toggles.py`), which resolve and never fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from harness.arms import arm_string, has_all, matching, requested_arms
from harness.fault_model import Fault
from harness.scenario_faults import OUTSIDE, ForeignTable
from harness.scenario_model import Scenario
from harness.toggles import BUILTIN, DEVICES, toggles_of


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a scenario. ``where`` is the file, or ``--set`` where a setting is the cause."""

    where: str
    key: str  # dotted
    value: str | None  # as it is written in TOML; None where the key is missing
    what: str
    remedy: str

    def __str__(self) -> str:
        named = self.key if self.value is None else f"{self.key}={self.value}"
        separator = " " if self.where == "--set" else ": "
        return f"{self.where}{separator}{named}: {self.what}; {self.remedy}"


Finding = tuple[str, object, str, str]  # key, value, what, remedy


def broken_rules(scenario: Scenario, *, narrowed: bool = False) -> Iterator[Finding]:
    """Everything that cannot work. ``narrowed``: settings chose the arms; an expectation may match none."""
    for rule in _RULES:
        yield from rule(scenario)
    if not narrowed:
        yield from _idle_expectations(scenario)


def _asked_values(scenario: Scenario, toggle: str) -> set[str]:
    fixed = scenario.toggles.values()
    return {value for arm in requested_arms(scenario) if (value := (fixed | arm).get(toggle)) is not None}


def _pool(scenario: Scenario) -> Iterator[Finding]:
    engine = scenario.engine
    for key in ("chunk_tokens", "page_size"):
        value = getattr(engine, key)
        if value > engine.kv_tokens:
            yield (
                f"engine.{key}", value, f"does not fit into engine.kv_tokens = {engine.kv_tokens}",
                f"use {engine.kv_tokens} at most, or a larger pool",
            )  # fmt: skip
    if engine.kv_tokens % engine.page_size and not _foreign(scenario):  # the engines round down
        yield (
            "engine.kv_tokens", engine.kv_tokens, f"is no multiple of engine.page_size = {engine.page_size}",
            f"use {engine.kv_tokens // engine.page_size * engine.page_size}",
        )  # fmt: skip
    if engine.retract_every and engine.max_running == 1:
        yield (
            "engine.retract_every", engine.retract_every,
            "can retract nothing: engine.max_running is 1 and one request is always kept",
            "raise engine.max_running or set engine.retract_every = 0",
        )  # fmt: skip


_BUILTIN_ALONE = (
    "check_steps",
    "sync_every",
    "cache_sync_every",
    "control_broadcast",
    "expert_stats",
    "stats_group",
    "output_parallel",
    "exit_barrier",
    "symm_growth_bytes",
    "check_copies",
    "sample_ahead",
)
"""Keys of [engine] that another engine has no counterpart for, or sets by flags of its own."""


def _builtin_alone(scenario: Scenario) -> Iterator[Finding]:
    dp, ranks = scenario.target.dp, scenario.target.ranks
    if not _foreign(scenario):
        if scenario.engine.output_parallel and dp not in (None, ranks):
            yield (
                "engine.output_parallel", True,
                f"needs every rank to be its own attention group, and target.dp is {dp} of {ranks} ranks",
                f"set target.dp = {ranks}, or leave it off",
            )  # fmt: skip
        return
    for key in _BUILTIN_ALONE:
        value = getattr(scenario.engine, key)
        if value != type(scenario.engine).model_fields[key].default:
            yield (
                f"engine.{key}", value, f"is the built-in engine's, and the target is {scenario.target.name}",
                "remove it, or say it in target.args if the engine has such a flag",
            )  # fmt: skip


def _model(scenario: Scenario) -> Iterator[Finding]:
    model = scenario.model
    if model.preset is not None and model.directory is not None:
        yield (
            "model.directory", model.directory, f"stands beside model.preset = {model.preset}",
            "keep one of them",
        )  # fmt: skip


def _graph(scenario: Scenario) -> Iterator[Finding]:
    engine = scenario.engine
    if _foreign(scenario):
        return  # a batch beyond the largest bucket runs eager there
    if "on" in _asked_values(scenario, "graph"):
        largest = max(engine.graph_buckets, default=0)
        if largest < engine.max_running:
            yield (
                "engine.graph_buckets", list(engine.graph_buckets),
                f"has no bucket for engine.max_running = {engine.max_running} requests while graph is on",
                f"add a bucket of {engine.max_running} or lower engine.max_running to {largest}",
            )  # fmt: skip
        if engine.padding == "sum_len":
            yield (
                "engine.padding", engine.padding, "needs eager steps, and graph is on in some arm",
                'use "auto" or "max_len", or leave graph off',
            )  # fmt: skip
    elif "D1" in _asked_values(scenario, "defect"):
        yield (
            "arms.defect" if scenario.arms.defect else "toggles.defect", "D1",
            "can do nothing: it is a missing fence before a graph update and no arm has graph on",
            'set toggles.graph = "on" or leave D1 out',
        )  # fmt: skip
    elif any(defect.name == "D1" for defect in scenario.sim.defects):
        yield (
            "sim.defects", "D1",
            "can do nothing: it is a missing fence before a graph update and no arm has graph on",
            'set toggles.graph = "on" or remove the defect',
        )  # fmt: skip


def _foreign(scenario: Scenario) -> bool:
    return scenario.target.name != BUILTIN


def _target(scenario: Scenario) -> Iterator[Finding]:
    target = scenario.target
    alone = {"cpu"} if not _foreign(scenario) else {"sim"}
    if target.device in alone:
        which = "the built-in engine runs on sim, cuda and npu" if not _foreign(scenario) else (
            f"{target.name} is a real engine, and the simulated device is none"
        )  # fmt: skip
        yield (
            "target.device", target.device, f"cannot be: {which}",
            'use "sim"' if not _foreign(scenario) else 'use "cpu", "cuda" or "npu"',
        )  # fmt: skip
    if target.dp is not None and target.ranks % target.dp:
        yield (
            "target.dp", target.dp, f"does not divide target.ranks = {target.ranks}",
            "use a divisor: every attention group has the same number of ranks",
        )  # fmt: skip
    if target.ranks % target.nodes:
        yield (
            "target.nodes", target.nodes, f"does not divide target.ranks = {target.ranks}",
            "use a divisor: every node has the same number of ranks",
        )  # fmt: skip
    unknown = sorted(_asked(scenario) - set(toggles_of(target.name)))
    for name in unknown:
        why = (
            "the built-in engine writes its ledger itself" if name == "probe"
            else f"defects are modelled on the simulated device, and the target is {target.name}"
        )  # fmt: skip
        yield (
            f"arms.{name}" if name in scenario.arms.varied() else f"toggles.{name}", None,
            f"means nothing for target {target.name}: {why}", "remove it",
        )  # fmt: skip


def _asked(scenario: Scenario) -> set[str]:
    return scenario.arms.varied().keys() | scenario.toggles.values().keys()


def _faults(scenario: Scenario) -> Iterator[Finding]:
    probed = _asked_values(scenario, "probe")
    for number, fault in enumerate(scenario.faults):
        key = f"faults.{number}"
        outside = [rank for rank in fault.ranks if rank >= scenario.target.ranks]
        if outside:
            yield (
                f"{key}.ranks", list(fault.ranks),
                f"names ranks {outside}, and target.ranks is {scenario.target.ranks}",
                f"use ranks 0 to {scenario.target.ranks - 1}",
            )  # fmt: skip
        if isinstance(fault, Fault):
            yield from _twin(key, fault)
        if not isinstance(fault, ForeignTable):
            continue
        if fault.name not in OUTSIDE and "off" in probed:
            yield (
                f"{key}.name", fault.name, "is made by the probe, and an arm has probe off",
                f"set toggles.probe = \"on\", or use {' or '.join(OUTSIDE)}",
            )  # fmt: skip
        if fault.role != "rank" and fault.ranks:
            yield (
                f"{key}.ranks", list(fault.ranks), f"names ranks, and the role is {fault.role}",
                'remove it, or set role = "rank"',
            )  # fmt: skip


def _twin(key: str, fault: Fault) -> Iterator[Finding]:
    try:
        fault.repaired()
    except ValidationError as error:
        detail = error.errors()[0]
        name = ".".join(map(str, ("twin", *detail["loc"])))
        yield (f"{key}.{name}", detail.get("input"), f"cannot be: {detail['msg']}", "mend the twin's values")


def _fault_toggle(scenario: Scenario) -> Iterator[Finding]:
    if _foreign(scenario):
        return
    if not scenario.faults and "fault" in _asked(scenario):
        key = "arms.fault" if scenario.arms.fault else "toggles.fault"
        yield (key, None, "switches nothing: the scenario has no [[faults]]", "add a fault or remove it")


def _client(scenario: Scenario) -> Iterator[Finding]:
    longest_s = scenario.watchdog.longest_s()
    if _foreign(scenario) and scenario.client.deadline_s <= longest_s:
        yield (
            "client.deadline_s", scenario.client.deadline_s,
            f"gives a request up before the watchdog is done, which takes up to {longest_s:g} s",
            f"use more than {longest_s:g}",
        )  # fmt: skip


def _ranks(scenario: Scenario) -> Iterator[Finding]:
    world = scenario.target.ranks
    if world == 1 and "on" in _asked_values(scenario, "symm_mem"):
        key = "arms.symm_mem" if scenario.arms.symm_mem else "toggles.symm_mem"
        yield (
            key, "on", "needs peers to share memory with, and target.ranks is 1",
            "set target.ranks to 2 or more, or leave symm_mem off",
        )  # fmt: skip
    named = [(f"sim.defects.{i}.ranks", defect.ranks) for i, defect in enumerate(scenario.sim.defects)]
    named += [
        (f"expect.{i}.culprits", expect.culprits)
        for i, expect in enumerate(scenario.expect)
        if isinstance(expect.culprits, tuple)
    ]
    for key, ranks in [*named, ("sim.defect_ranks", scenario.sim.defect_ranks)]:
        outside = [rank for rank in ranks if rank >= world]
        if outside:
            yield (
                key, list(ranks), f"names ranks {outside}, and target.ranks is {world}",
                f"use ranks 0 to {world - 1}",
            )  # fmt: skip


def _defects(scenario: Scenario) -> Iterator[Finding]:
    names = [defect.name for defect in scenario.sim.defects]
    asked = _asked_values(scenario, "defect") - {"none"}
    for name in sorted({name for name in names if names.count(name) > 1} | (asked & set(names))):
        yield (
            "sim.defects", name, "is there twice: in sim.defects again, or as a value of the defect toggle",
            "keep it in one place",
        )  # fmt: skip
    if scenario.sim.defect_ranks and not asked:
        yield (
            "sim.defect_ranks", list(scenario.sim.defect_ranks),
            "applies to no arm: the defect toggle is not used",
            "use sim.defects, or give the defect toggle a value",
        )  # fmt: skip


def _deadlines(scenario: Scenario) -> Iterator[Finding]:
    watchdog, engine = scenario.watchdog, scenario.engine
    if watchdog.sample_period_s > watchdog.floor_s:
        yield (
            "watchdog.sample_period_s", watchdog.sample_period_s,
            f"lies above watchdog.floor_s = {watchdog.floor_s}", "sample more often or raise the floor",
        )  # fmt: skip
    if watchdog.floor_s > watchdog.ceiling_s:
        yield (
            "watchdog.floor_s", watchdog.floor_s, f"lies above watchdog.ceiling_s = {watchdog.ceiling_s}",
            "lower the floor or raise the ceiling",
        )  # fmt: skip
    longest_s = watchdog.longest_s()
    parts = "the larger of watchdog.ceiling_s and startup_s, confirm_after_s and capture_s together are"
    for key, value in (
        ("engine.step_timeout_s", engine.step_timeout_s),
        ("watchdog.trial_timeout_s", watchdog.trial_timeout_s),
    ):
        if value <= longest_s:
            yield (
                key, value, f"ends a wait before the watchdog is done: {parts} {longest_s:g} s",
                f"use more than {longest_s:g}",
            )  # fmt: skip


def _jitter(scenario: Scenario) -> Iterator[Finding]:
    jitter = scenario.jitter
    if jitter.low_us > jitter.high_us:
        yield ("jitter.low_us", jitter.low_us, f"lies above jitter.high_us = {jitter.high_us}", "swap them")
    if jitter.probability > 0 and not jitter.sites:
        yield (
            "jitter.sites",
            [],
            "is empty while jitter.probability is above 0",
            "name a site or remove [jitter]",
        )


def _arms(scenario: Scenario) -> Iterator[Finding]:
    varied = scenario.arms.varied()
    for name in sorted(varied.keys() & scenario.toggles.values().keys()):
        fixed = scenario.toggles.values()[name]
        yield (
            f"toggles.{name}", fixed, f"is fixed here and varied in arms.{name}",
            f'keep one; arms.{name} = ["{fixed}"] runs that arm alone',
        )  # fmt: skip
    for name, values in varied.items():
        if len(set(values)) != len(values):
            yield (f"arms.{name}", list(values), "names a value twice", "name each value once")
    for number, entry in enumerate(scenario.arms.exclude):
        unknown = sorted(entry.values().keys() - varied.keys())
        if unknown or not entry.values():
            named = f"names {', '.join(unknown)}, which [arms] does not vary"
            yield (
                f"arms.exclude.{number}", arm_string(entry.values()),
                named if unknown else "is empty and excludes all",
                "exclude combinations of the toggles in [arms]",
            )  # fmt: skip
    if varied and not requested_arms(scenario):
        yield ("arms.exclude", len(scenario.arms.exclude), "leaves no arm", "remove an entry")


def _expectations(scenario: Scenario) -> Iterator[Finding]:
    for number, expect in enumerate(scenario.expect):
        key = f"expect.{number}"
        if expect.hang == "sometimes" and expect.min_rate is None:
            yield (
                f"{key}.min_rate",
                None,
                "is missing while hang is sometimes",
                "give the least rate, such as 0.5",
            )
        if expect.hang != "sometimes" and expect.min_rate is not None:
            yield (
                f"{key}.min_rate", expect.min_rate, f"means nothing while hang is {expect.hang}",
                'remove it or set hang = "sometimes"',
            )  # fmt: skip
        told = expect.kind in ("slow", "none")
        if expect.hang == "never" and expect.mechanism is not None and not told:
            yield (
                f"{key}.mechanism", expect.mechanism, "names the diagnosis of a hang that must never be",
                "remove it, expect a hang, or say kind = slow or none",
            )  # fmt: skip
    for device in DEVICES:
        for arm in requested_arms(scenario):
            found = matching(scenario, device, arm)
            if len(found) > 1 and len(found[0].arm.values()) == len(found[1].arm.values()):
                first, second = (scenario.expect.index(expect) for expect in found[:2])
                yield (
                    f"expect.{second}.arm", arm_string(found[1].arm.values()),
                    f"is as specific as expect.{first} for the arm {arm_string(arm)} on {device}",
                    "name one more toggle in one of them",
                )  # fmt: skip
                return


def _idle_expectations(scenario: Scenario) -> Iterator[Finding]:
    fixed = scenario.toggles.values()
    full = [fixed | arm for arm in requested_arms(scenario)]
    for number, expect in enumerate(scenario.expect):
        wanted = expect.arm.values()
        if full and not any(has_all(arm, wanted) for arm in full):
            yield (
                f"expect.{number}.arm", arm_string(wanted), "matches no arm of this scenario",
                "use toggles and values of [arms] or [toggles]",
            )  # fmt: skip


_RULES: tuple[Callable[[Scenario], Iterator[Finding]], ...] = (
    _target, _faults, _fault_toggle, _client, _builtin_alone, _pool, _model, _graph, _ranks, _defects, _deadlines,
    _jitter, _arms,
    _expectations,
)  # fmt: skip
