"""What a scenario file may say: one frozen model a table, one docstring a key.

Here: names, units, types, defaults and the limits of one key. Not here: reading files and wording errors
(`scenario.py`), rules that span several keys (`scenario_rules.py`), arms and trials (`arms.py`).

The workload tables mirror the parameters of ``serving.workload``, which harness may not import.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny

from harness.scenario_faults import FaultTable
from harness.scenario_table import Table

Device = Literal["sim", "cpu", "cuda", "npu"]
Pinned = Literal["pageable", "pinned", "pinned_sync", "pinned_snapshot"]
Switch = Literal["off", "on"]
Defect = Literal["none", "D1", "D2", "D3", "D4"]
FaultSwitch = Literal["off", "on", "twin"]
Kind = Literal["hang", "slow", "dead", "stopped", "livelock", "none"]
Stream = Literal["compute", "copy", "comm", "update", "host"]
Hang = Literal["never", "sometimes", "always", "any"]
Tokens = Literal["equal", "differ", "any"]
Mechanism = Literal[
    "collective-skipped", "collective-mismatch", "decision-divergence", "stream-order", "collective-order",
    "registration-stall", "rank-dead", "rank-stopped", "rank-slow", "host-blocked", "livelock", "unknown",
]  # fmt: skip
Site = Literal[
    "copy.h2d", "copy.d2h", "event.record", "event.wait", "graph.update", "graph.replay", "host.reuse",
    "comm.before", "comm.after", "rank.step",
]  # fmt: skip


def _ordered(span: tuple[int, int]) -> tuple[int, int]:
    low, high = span
    if not 0 <= low <= high:
        raise ValueError(f"[{low}, {high}] is no range: write [lowest, highest], both 0 or more")
    return span


def _positive(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] < 1:
        raise ValueError(f"[{span[0]}, {span[1]}] begins below 1")
    return span


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if list(values) != sorted(set(values)) or any(value < 1 for value in values):
        raise ValueError("must ascend, without repetition, from 1 or more")
    return values


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Span = Annotated[tuple[int, int], AfterValidator(_ordered)]
PositiveSpan = Annotated[Span, AfterValidator(_positive)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Devices = Annotated[tuple[Device, ...], BeforeValidator(_as_list), Field(min_length=1)]
Ranks = tuple[Annotated[int, Field(ge=0)], ...]


class Target(Table):
    """The engine under test."""

    name: str = "builtin"
    """A registered target: builtin, sglang, vllm."""
    ranks: Annotated[int, Field(ge=1, le=64)] = 2
    """Worker processes: ranks of the built-in engine, tensor-parallel ranks of sglang, tensor times data parallel
    ranks of vllm."""
    dp: Annotated[int, Field(ge=1, le=64)] | None = None
    """Attention data-parallel groups among the ranks; where nothing is said every rank is one (built-in, sglang),
    or all ranks are one (vllm)."""
    device: Device | None = None
    """Where the scenario runs when no ``--device`` is given; sim where neither says."""
    python: str | None = None
    """The engine's own interpreter; the one that runs hangrig where none is named."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Nodes over which the ranks are spread evenly."""
    args: tuple[str, ...] = ()
    """Further flags of the server, as they are; they come last and win."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further variables of the server's environment; they win."""
    start_s: Seconds = 900.0
    """Deadline of the start, until a first generation has been answered."""
    engine_watchdog_s: Seconds | None = None
    """Setting of the engine's own watchdog; its default where nothing is said."""
    after_capture: Literal["end", "let"] = "end"
    """What becomes of a hung server once the evidence is on disk: ended, or let alone until its own watchdog has
    ended it, so that the report can say what the engine said and when."""
    let_s: Seconds = 240.0
    """The longest that ``after_capture = "let"`` waits."""


class Model(Table):
    """The model that the engine serves. A directory holds config.json and safetensors files."""

    preset: Literal["tiny", "small", "lite"] | None = None
    """A shape with random weights; where neither it nor a directory is given ``tiny``, and ``small`` for sglang and
    vllm, whose kernels want DeepSeek-V2's own head sizes."""
    directory: str | None = None
    """Of a model for sglang or vllm: a directory, or a name that the engine resolves. Without weights in it the
    engine makes random ones."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Fixes the random weights of a preset; the same in all arms and trials."""


class Engine(Table):
    """How the engine schedules and pads."""

    kv_tokens: Count = 4500
    """Size of each rank's key-value pool, in tokens."""
    page_size: Count = 1
    """Tokens a page of that pool."""
    chunk_tokens: Count = 256
    """Most prompt tokens that one prefill step of a rank computes; longer prompts take several steps."""
    max_running: Count = 128
    """Most requests that run at once on a rank."""
    admission_ratio: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Share of a running request's remaining output that admission sets aside, at the start."""
    retract_every: Annotated[int, Field(ge=0)] = 0
    """Forces a retraction at each decode step whose number is a multiple of this; 0 never does."""
    graph_buckets: Annotated[tuple[int, ...], AfterValidator(_ascending)] = (1, 2, 4, 8, 16)
    """Batch sizes for which a decode graph is captured, ascending."""
    padding: Literal["auto", "max_len", "sum_len"] = "auto"
    """How tokens of all ranks meet around the experts; auto chooses as sglang does. A prefill with more than
    one rank packs them whatever this says."""
    step_timeout_s: Seconds = 300.0
    """Deadline of each host wait and of each collective; above the watchdog's whole time."""
    check_steps: bool = True
    """Of the built-in engine, as those below: the agreement of each step ends a rank that is at another step
    than its peers. Off: it goes unnoticed, as in engines whose agreement says nothing of the step."""
    sync_every: Annotated[int, Field(ge=0)] = 0
    """Steps of a rank, by its own count, between two questions to all whether there is work left anywhere (group
    ``sync``); between them the last answer stands, as in vLLM's data-parallel loop. 0 asks in every step."""
    cache_sync_every: Annotated[int, Field(ge=0)] = 0
    """Prefills of an attention group between two agreements of its ranks on the pages in the prefix cache (group
    ``attention_host``), as in SGLang's hierarchical cache. 0 never agrees."""
    control_broadcast: bool = False
    """Each step begins with a message of rank 0 to all (group ``world``), which is how SGLang hands on requests."""
    expert_stats: bool = False
    """The ranks add up in every step how many tokens each expert got (group ``stats``), beside the data path, as
    recorders of the experts' load do."""
    stats_group: Literal["stats", "experts"] = "stats"
    """Whose communicator carries that sum: one of its own, or the experts', in line with their collectives."""
    output_parallel: bool = False
    """The output projection of the attention is spread over all ranks (group ``output``), as vllm-ascend's tensor
    parallel output projection: an idle rank takes part too. Every rank must be its own attention group."""
    exit_barrier: bool = False
    """All ranks meet at the end of a trial, after the drain (group ``world``)."""
    symm_growth_bytes: Count | None = None
    """Of the symmetric heap: the host makes room in it before each launch that needs more, as an allocator of
    symmetric memory does, by multiples of so many bytes a member. Where nothing is said, the heap grows by
    megabytes when a collective does not fit."""
    check_copies: bool = False
    """Of the built-in engine: each copy between host and device is held against what it was to bring. A difference
    goes into the decision file and names the rank of a corruption."""
    sample_ahead: bool = False
    """Of the built-in engine: a step without a grammar is sampled before the result of the step before is awaited,
    as SGLang's overlap loop does, into one device buffer that all steps share."""
    attention_backend: str | None = None
    """Of sglang and vllm; the engine chooses where nothing is said."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of sglang and vllm. Equal tokens under another batch need float32."""
    quantization: str | None = None
    """Of sglang and vllm."""
    context_tokens: Count | None = None
    """Of sglang and vllm: longest prompt and output together; the model's own limit where nothing is said."""


class PrefixTree(Table):
    """Requests whose prompts are paths from the root of a tree: the retraction test of HANGS.md."""

    kind: Literal["prefix_tree"]
    requests: Count = 64
    root_tokens: Count = 117
    """Tokens that every prompt begins with."""
    child_tokens: Span = (0, 256)
    """Tokens that each further node adds to a prompt: lowest, highest."""
    decode_tokens: Span = (0, 256)
    """Tokens that a request generates: lowest, highest; 0 counts as 1."""
    grammar_share: Share = 0.0
    """Share of requests whose output is held to a grammar."""
    grammar: str = "digits"
    rank: Annotated[int, Field(ge=0)] | None = None
    """The rank that gets all requests, modulo their number; they are dealt out where nothing is said."""


class Bursts(Table):
    """Groups of requests that arrive at once, with idle gaps between, and one long prompt."""

    kind: Literal["bursts"]
    bursts: Count = 4
    requests_per_burst: Count = 8
    gap_steps: Annotated[int, Field(ge=0)] = 30
    """Idle steps, at the least, between the end of a burst and the next one."""
    prompt_tokens: PositiveSpan = (16, 128)
    decode_tokens: Span = (4, 32)
    long_prompt_tokens: Annotated[int, Field(ge=0)] = 0
    """Length of one more request's prompt, in the middle burst; 0 for none."""
    grammar_share: Share = 0.0
    grammar: str = "digits"
    rank: Annotated[int, Field(ge=0)] | None = None
    """The rank that gets all requests, modulo their number; they are dealt out where nothing is said."""


class Alternating(Table):
    """Short prefills on one rank after the other while all ranks decode, with decode steps between."""

    kind: Literal["alternating"]
    requests: Count = 16
    every_steps: Count = 6
    """Steps between two arrivals."""
    prompt_tokens: PositiveSpan = (8, 32)
    decode_tokens: Span = (8, 24)
    """Tokens that the short requests generate."""
    grammar_share: Share = 0.5
    grammar: str = "digits"
    rank: Annotated[int, Field(ge=0)] | None = None
    """The rank that gets all requests, modulo their number; they are dealt out where nothing is said."""
    long_decodes: Annotated[int, Field(ge=0)] = 4
    """The first requests: they arrive at once and decode until after the last arrival; one a rank or more."""


class Client(Table):
    """How requests reach an engine that serves over HTTP."""

    parallelism: Count | None = None
    """Most requests in flight at once; without it each is sent when it arrives."""
    step_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    """Seconds that one step of the workload stands for: arrivals of a foreign engine go by the clock."""
    deadline_s: Seconds = 180.0
    """A request that brings no further token for so long is given up; above the watchdog's whole time."""


Workload = Annotated[PrefixTree | Bursts | Alternating, Field(discriminator="kind")]


class Toggles(Table):
    """One value for each toggle that is named; the others are left to the platform."""

    probe: Switch | None = None
    """Of sglang and vllm: hangrig's probe inside the engine's processes."""
    pinned: Pinned | None = None
    symm_mem: Switch | None = None
    graph: Switch | None = None
    overlap: Switch | None = None
    prefix_cache: Switch | None = None
    defect: Defect | None = None
    fault: FaultSwitch | None = None
    """Of the built-in engine: the scenario's ``[[faults]]``; ``twin`` has the same ones, absent or repaired."""

    def values(self) -> dict[str, str]:
        """The toggles that are named, with their value."""
        return {name: value for name, value in self if value is not None}


class Arms(Table):
    """The toggles that vary, each with its values; the arms are all their combinations but ``exclude``."""

    probe: Annotated[tuple[Switch, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    pinned: Annotated[tuple[Pinned, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    symm_mem: Annotated[tuple[Switch, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    graph: Annotated[tuple[Switch, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    overlap: Annotated[tuple[Switch, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    prefix_cache: Annotated[tuple[Switch, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    defect: Annotated[tuple[Defect, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    fault: Annotated[tuple[FaultSwitch, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    exclude: tuple[Toggles, ...] = ()
    """Combinations to leave out: an arm is excluded when it has all values of one entry."""

    def varied(self) -> dict[str, tuple[str, ...]]:
        """The toggles that vary, with their values, in the order of the file format."""
        return {name: values for name, values in self if name != "exclude" and values is not None}


class Trials(Table):
    count: Count = 5
    """Trials of each arm."""
    interleaved: bool = True
    """Runs a seed in every arm before the next seed, so that drift of the machine meets all arms alike."""


class Watchdog(Table):
    """When a silence is suspicious. HANGS.md: deadlines inside the engine lie above all this together."""

    sample_period_s: Seconds = 0.1
    """How often an agent reads the ledgers."""
    floor_s: Seconds = 1.5
    """The least that a phase's learned budget may be."""
    ceiling_s: Seconds = 30.0
    """The most, and the budget of a phase that nobody has left yet."""
    startup_s: Seconds = 60.0
    """Budget of a cold rank's first steps: compilation, capture."""
    idle_s: Seconds = 3.0
    """Budget of a rank that all others wait for while it neither computes nor has work on its device."""
    budget_multiple: Annotated[float, Field(ge=1)] = 8.0
    """A learned budget is this multiple of the pauses' 99th percentile."""
    confirm_after_s: Seconds = 0.5
    """Least time between the two samples that confirm a suspicion."""
    livelock_s: Seconds = 10.0
    """Steps that move for this long without a finished token may be a livelock."""
    capture_s: Seconds = 20.0
    """Deadline of a whole capture, shared by all ranks."""
    trial_timeout_s: Seconds = 300.0
    """Longest a trial may take, hang or no hang."""

    def longest_s(self) -> float:
        """From the last progress to the end of a capture, at worst."""
        return max(self.ceiling_s, self.startup_s) + self.confirm_after_s + self.capture_s

    def trial_s(self) -> float:
        """The longest trial, with the capture that its timeout makes."""
        return self.trial_timeout_s + self.confirm_after_s + self.capture_s


class Jitter(Table):
    """Seeded delays where a site is passed, log-uniform in length. They break nothing."""

    probability: Share = 0.0
    """Share of passes that are delayed."""
    low_us: Annotated[float, Field(gt=0)] = 1.0
    high_us: Annotated[float, Field(gt=0, le=2e6)] = 2000.0
    longest_share: Share = 0.2
    """At most this share of a rank's time is spent in delays; what would exceed it is left out."""
    sites: tuple[Site, ...] = ("copy.h2d", "copy.d2h", "event.wait", "graph.update", "comm.before")


class SimDefect(Table):
    """A platform defect that the simulated device shows on some ranks."""

    name: Literal["D1", "D2", "D3", "D4"]
    ranks: Ranks = ()
    """Where; none named means all ranks."""


class Sim(Table):
    """The simulated device. Ignored, and recorded as ignored, on a real one."""

    memory_model: Literal["cuda", "cann"] = "cann"
    """Whose rules copies follow (PLATFORMS.md)."""
    copy_latency_us: Annotated[float, Field(ge=0)] = 20.0
    copy_gbps: Annotated[float, Field(gt=0)] = 10.0
    """Bandwidth of a copy, in 10^9 bytes a second."""
    cores: Annotated[int, Field(ge=0)] = 0
    """Cores of the device, as far as they are modelled (``harness/devices/sim_cores.py``); 0: not at all."""
    collective_cores: Count = 4
    """Those that a collective outside graphs holds while it is in flight."""
    collective_part_us: Annotated[float, Field(ge=0)] = 1000.0
    """From the start of one part of a collective to that of the next; each part holds a core."""
    cooperative: tuple[str, ...] = ()
    """Labels of the operations that need all cores at once, such as ``sample``."""
    defects: tuple[SimDefect, ...] = ()
    """Present in every arm."""
    defect_ranks: Ranks = ()
    """Ranks that have the defect of an arm's ``defect`` toggle; none named means all."""


class Require(Table):
    """The least pressure; a trial that had less says nothing, and is unknown."""

    retractions: Annotated[int, Field(ge=0)] = 0
    """Requests that lost their place to others; vllm calls them preemptions."""
    aborted: Annotated[int, Field(ge=0)] = 0
    """Requests of the workload that can never be served and that the engine has to give up: no more, no fewer."""


class Expect(Table):
    """What is expected of the arms that have all values of ``arm``; the most specific entry wins."""

    device: Devices = ("sim", "cpu", "cuda", "npu")
    arm: Toggles = Toggles()
    hang: Hang = "never"
    min_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """The least rate worth the name *sometimes*."""
    kind: Kind | None = None
    """The kind that its diagnosis must have. ``slow`` or ``none`` (corrupt) beside ``hang = "never"``: every trial
    must be diagnosed so."""
    mechanism: Mechanism | None = None
    """The diagnosis that a hang must have."""
    culprits: Ranks | Literal["all"] | None = None
    """The ranks that it must name, no more and no fewer."""
    stream: Stream | None = None
    group: str | None = None
    """Group of the collective that it must name."""
    tokens: Tokens = "equal"
    """Against the undisturbed reference."""


class Corpus(Table):
    """The scenario's place in the hang corpus (HANGS.md; ``hangrig corpus``)."""

    id: Annotated[str, Field(pattern=r"^[A-Z][0-9]+$")] | None = None
    """Row of HANGS.md; none for a control."""
    row: Toggles = Toggles(fault="on")
    """The arm that must be found and explained."""
    twin: Toggles = Toggles(fault="twin")
    """The healthy twin."""
    ranks: tuple[Count, ...] = (2,)
    """Numbers of ranks to run it with; ``target.dp`` keeps its share of them."""
    quick: bool = True
    """In the subset that fits into five minutes."""


class Scenario(Table):
    """A whole scenario file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    summary: Annotated[str, Field(min_length=1)]
    reports: tuple[str, ...] = ()
    """Links to the public reports behind it."""
    target: Target = Target()
    model: Model = Model()
    engine: Engine = Engine()
    workload: Workload
    client: Client = Client()
    faults: tuple[SerializeAsAny[FaultTable], ...] = ()
    """What is broken on purpose in the engine: of the built-in one ``fault_model.Fault``, registered by name; of a
    foreign one ``scenario_faults.ForeignFault``."""
    toggles: Toggles = Toggles()
    """Fixed in every arm."""
    arms: Arms = Arms()
    trials: Trials = Trials()
    watchdog: Watchdog = Watchdog()
    jitter: Jitter = Jitter()
    sim: Sim = Sim()
    require: Require = Require()
    corpus: Corpus | None = None
    expect: tuple[Expect, ...] = ()
    """Where nothing is said of an arm on a device, it must never hang and its tokens must be equal."""
