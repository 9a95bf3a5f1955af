"""SGLang's releases know what ``serving/targets/sglang.py`` says of them: read from the source of their wheels.

Here: flags and values against the declared options; variables, titles of processes, metrics, fields of requests;
and the two divisions that the target undoes. Not here: which word makes which flag (``test_engine_commands.py``).

The wheels are downloaded once, into the engines' cache (``docs/engines.md``); nothing of them is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from engine_specs import RECIPES, argv, env, recipe, spec, spec_of
from sglang_options import ParseFailed, divisors, options, parser, strings, variables
from sglang_wheels import RELEASES, Wheel, WheelMissing, wheel

from serving.targets.sglang import SglangDialect
from serving.workload import RequestSpec

pytestmark = pytest.mark.network

DIALECT = SglangDialect()
SGLANG_RECIPES = [name for name in RECIPES if name.startswith("sglang")]
READ_ELSEWHERE = {
    "SGLANG_USE_CPU_ENGINE": "srt/platforms/__init__.py",
    "SGLANG_CPU_OMP_THREADS_BIND": "srt/utils/numa_utils.py",
}
"""Variables that ``environ.py`` does not declare, and where they are read."""
EVERY_WORD = {
    "target": {"ranks": 4, "dp": 2, "nodes": 2, "engine_watchdog_s": 100},
    "model": {"directory": "owner/model", "seed": 3},
    "engine": {
        "page_size": 64, "chunk_tokens": 128, "context_tokens": 1024, "retract_every": 3, "dtype": "float16",
        "quantization": "fp8", "attention_backend": "triton", "admission_ratio": 0.5,
    },
}  # fmt: skip
TOGGLES = [
    {"graph": "on", "overlap": "on", "prefix_cache": "on", "symm_mem": "on"},
    {"graph": "off", "overlap": "off", "prefix_cache": "off", "symm_mem": "off"},
]


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Iterator[Wheel]:
    try:
        opened = wheel(request.param)
    except WheelMissing as error:
        pytest.fail(str(error))
    yield opened
    opened.close()


@pytest.mark.parametrize("name", SGLANG_RECIPES)
def test_it_takes_the_command_of_a_recipe(release: Wheel, name: str) -> None:
    chosen = recipe(name)
    for arm in range(2 if chosen.arms.varied() else 1):
        taken = parser(options(release)).parse_args(as_numbers(argv(spec_of(chosen, arm))))
        assert taken.tp_size == 2


@pytest.mark.parametrize("toggles", TOGGLES)
def test_it_takes_every_word(release: Wheel, toggles: dict[str, str]) -> None:
    chosen = spec("sglang", "cuda", **EVERY_WORD, toggles=toggles)
    for node in (0, 1):
        taken = parser(options(release)).parse_args(as_numbers(argv(chosen, node)))
        assert taken.node_rank == node
    made_up = spec("sglang", model={"preset": "lite"}, toggles=toggles)
    taken = parser(options(release)).parse_args(as_numbers(argv(made_up)))
    assert taken.load_format == "dummy"
    assert taken.skip_tokenizer_init


def test_the_newest_takes_the_flags_of_later_releases(release: Wheel) -> None:
    later = as_numbers(argv(spec("sglang", toggles={"graph": "off"}), version="0.5.24"))
    if release.release == RELEASES[-1]:
        assert parser(options(release)).parse_args(later).attn_dp_size == 2
    else:
        with pytest.raises(ParseFailed, match="--attn-dp-size"):
            parser(options(release)).parse_args(later)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--no-such-flag"], "unrecognized arguments"),
        (["--attention-backend", "none_such"], "invalid choice"),
        (["--page-size", "many"], "invalid int"),
        (["--cuda-graph-bs", "2"], "unrecognized arguments"),
        (["--disable-radix-cache", "yes"], "unrecognized arguments"),
    ],
)
def test_the_parser_refuses_what_the_release_would(release: Wheel, arguments: list[str], why: str) -> None:
    with pytest.raises(ParseFailed, match=why):
        parser(options(release)).parse_args(["--model-path", "m", *arguments])


@pytest.mark.parametrize("name", SGLANG_RECIPES)
def test_it_knows_the_variables(release: Wheel, name: str) -> None:
    declared = variables(release)
    for variable in env(spec_of(recipe(name))):
        if variable in READ_ELSEWHERE:
            assert variable in strings(release.tree(READ_ELSEWHERE[variable]))
        elif variable.startswith("SGLANG_"):
            assert variable in declared


def test_it_divides_what_the_target_multiplies(release: Wheel) -> None:
    groups = {"dp_size", "attn_dp_size"}
    chunks = divisors(release.tree("srt/arg_groups/parallel_hook.py"), "chunked_prefill_size")
    running = divisors(release.tree("srt/mem_cache/kv_cache_configurator.py"), "max_num_reqs")
    assert chunks
    assert running
    assert chunks | running <= groups
    pool = divisors(release.tree("srt/mem_cache/kv_cache_configurator.py"), "max_total_tokens")
    assert not pool & groups


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("srt/managers/scheduler.py", "sglang::scheduler"),
        ("srt/managers/detokenizer_manager.py", "sglang::detokenizer"),
        ("srt/managers/data_parallel_controller.py", "sglang::data_parallel_controller"),
        ("srt/managers/scheduler.py", "#retracted_reqs: "),
        ("srt/managers/tokenizer_manager.py", "num_retractions"),
        ("srt/managers/tokenizer_manager.py", "output_ids"),
        ("srt/managers/tokenizer_manager.py", "dp_rank"),
        ("srt/entrypoints/http_server.py", "/generate"),
        *(("srt/entrypoints/http_server.py", call.path) for call in (DIALECT.health, DIALECT.flush)),
        *(
            ("srt/observability/metrics_collector.py", name)
            for names in DIALECT.samples.values()
            for name in names
        ),
    ],
)
def test_it_says_what_the_target_reads(release: Wheel, path: str, said: str) -> None:
    assert any(said in text for text in strings(release.tree(path)))


def test_its_requests_have_the_fields_that_are_sent(release: Wheel) -> None:
    request = RequestSpec(id="r0", prompt=(1,), max_new_tokens=1, grammar="digits")
    sent = DIALECT.call(request, 1, spec("sglang")).body
    assert sent is not None
    assert set(sent) <= fields(release, "srt/managers/io_struct.py", "GenerateReqInput")
    assert set(sent["sampling_params"]) <= fields(
        release, "srt/sampling/sampling_params.py", "SamplingParams"
    )


def as_numbers(arguments: list[str]) -> list[str]:
    """Ports as the launch fills them in: the placeholders of a shown command are no numbers."""
    return [word.replace("PORT+1", "20001").replace("PORT", "20000") for word in arguments]


def fields(release: Wheel, path: str, name: str) -> set[str]:
    """Names with a type in the body of a class, in that file."""
    found = next(
        node for node in ast.walk(release.tree(path)) if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        statement.target.id
        for statement in found.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
