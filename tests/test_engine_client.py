"""The client of a foreign engine against a server of its own kind: tokens, failures, deadlines."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import fake_dialect as fake
import fake_engine
import pytest
from cluster_rig import DEADLINE_S, until

from harness.ledger import LedgerReader, LedgerWriter
from serving.journal import Journal
from serving.targets import engine_metrics
from serving.targets.dialect import Count
from serving.targets.engine_client import ClientOptions, EngineClient, generate_once
from serving.targets.engine_metrics import Metrics
from serving.workload import Arrival, RequestSpec, generate, workload

TABLE = {"kind": "alternating", "requests": 10, "grammar_share": 0.0, "decode_tokens": [4, 9]}


@pytest.fixture(scope="module")
def server() -> Iterator[fake.FakeServer]:
    found = fake.FakeServer("client-tests", "--retract-every", "3")
    yield found
    found.end()


class Rig:
    """A client in a thread, as a launcher has it."""

    def __init__(self, folder: Path, base_url: str, world: int = 2, **options: Any) -> None:
        self.seen: list[int] = []
        self.ledger = LedgerWriter.create(
            folder / "client.ledger", rank=0, world=world, node="here", device="client"
        )
        self.journal = folder / "rank0.jsonl"
        self.client = EngineClient(
            fake.FakeDialect(),
            fake.spec(world),
            ClientOptions(base_url, **{"step_s": 0.0, "deadline_s": DEADLINE_S, **options}),
            self.ledger,
            Journal(self.journal),
            self.seen.append,
        )

    def start(self, arrivals: list[Arrival] | tuple[Arrival, ...]) -> Thread:
        thread = Thread(target=self.client.run, args=(arrivals,), daemon=True)
        thread.start()
        return thread

    def run(self, arrivals: list[Arrival] | tuple[Arrival, ...]) -> None:
        thread = self.start(arrivals)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()

    @property
    def phase(self) -> tuple[str, int]:
        host = LedgerReader.open(self.ledger.path).snapshot().host
        return host.phase, host.step


def ask(name: str, *prompt: int, count: int = 3, rank: int | None = None) -> Arrival:
    return Arrival(0, RequestSpec(name, prompt or (7, 8), count, rank=rank))


def expected(request: RequestSpec) -> list[int]:
    return [fake_engine.token(list(request.prompt), place) for place in range(request.max_new_tokens)]


def test_every_request_brings_its_tokens_from_its_group(server: fake.FakeServer, tmp_path: Path) -> None:
    arrivals = generate(workload(TABLE), seed=3, vocab_size=500)
    rig = Rig(tmp_path, server.base_url)
    rig.run(arrivals)
    outcomes = {outcome.id: outcome for outcome in rig.client.outcomes()}
    assert {name: o.tokens for name, o in outcomes.items()} == {
        arrival.request.id: expected(arrival.request) for arrival in arrivals
    }
    assert [outcomes[a.request.id].rank for a in arrivals] == [index % 2 for index in range(10)]
    assert {outcome.finish for outcome in outcomes.values()} == {"length"}
    view = rig.client.view()
    total = sum(arrival.request.max_new_tokens for arrival in arrivals)
    assert (view.sent, view.finished, view.failed, view.in_flight) == (10, 10, 0, 0)
    assert (view.tokens, view.over, view.gave_up) == (total, True, "")
    assert rig.seen == list(range(1, total + 1))
    assert sum(outcome.retractions or 0 for outcome in outcomes.values()) > 0


def test_a_pinned_request_goes_where_it_is_pinned(server: fake.FakeServer, tmp_path: Path) -> None:
    rig = Rig(tmp_path, server.base_url)
    rig.run([ask("a", rank=1), ask("b", rank=3), ask("c"), ask("d", rank=0)])
    assert {outcome.id: outcome.rank for outcome in rig.client.outcomes()} == {"a": 1, "b": 1, "c": 0, "d": 0}


def test_latencies_are_counted_by_token(server: fake.FakeServer, tmp_path: Path) -> None:
    rig = Rig(tmp_path, server.base_url)
    rig.run([ask("a", count=5)])
    (outcome,) = rig.client.outcomes()
    latency = outcome.latency_us()
    assert {name: len(values) for name, values in latency.items()} == {"ttft": 1, "itl": 4, "e2e": 1}
    assert latency["e2e"][0] >= latency["ttft"][0] + sum(latency["itl"]) > 0


def test_tokens_are_written_as_they_come(server: fake.FakeServer, tmp_path: Path) -> None:
    rig = Rig(tmp_path, server.base_url)
    arrival = ask("a", count=4)
    rig.run([arrival])
    lines = fake.load(rig.journal)
    assert [line["tokens"]["a"] for line in lines] == expected(arrival.request)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_never_more_requests_in_flight_than_asked_for(server: fake.FakeServer, tmp_path: Path) -> None:
    limited = fake.FakeServer("client-limited")
    try:
        rig = Rig(tmp_path, limited.base_url, parallelism=2)
        rig.run([ask(f"r{index}", count=6) for index in range(9)])
        assert rig.client.view().finished == 9
        metrics = engine_metrics.read_metrics(limited.base_url, _Peak())
        assert metrics.samples["fake_peak"] in (1.0, 2.0)
    finally:
        limited.end()


class _Peak(fake.FakeDialect):
    samples: Mapping[Count, Sequence[str]] = {"running": ("fake_peak",)}


def test_the_ledger_says_when_nothing_is_in_flight(server: fake.FakeServer, tmp_path: Path) -> None:
    rig = Rig(tmp_path, server.base_url)
    thread = rig.start([ask("stuck", fake_engine.STUCK), ask("other", count=2)])
    until(lambda: rig.client.view().finished == 1, "the other request")
    assert rig.phase == ("serve", 2)
    rig.client.stop("the test is over")
    thread.join(DEADLINE_S)
    assert rig.phase == ("parked", 2)
    assert rig.client.view().gave_up == "the test is over"
    assert rig.client.view().over


def test_a_refused_request_ends_and_the_others_go_on(server: fake.FakeServer, tmp_path: Path) -> None:
    rig = Rig(tmp_path, server.base_url)
    rig.run([ask("no", fake_engine.REFUSED), ask("luck", fake_engine.BROKEN), ask("yes")])
    finish = {outcome.id: outcome.finish for outcome in rig.client.outcomes()}
    assert finish == {
        "no": "aborted: HTTP 400: I do not like this prompt",
        "luck": "aborted: out of luck",
        "yes": "length",
    }
    assert rig.client.view().gave_up == ""


def test_an_engine_that_is_broken_ends_the_workload(server: fake.FakeServer, tmp_path: Path) -> None:
    rig = Rig(tmp_path, server.base_url)
    rig.run([ask("stuck", fake_engine.STUCK), ask("fatal", fake_engine.FATAL)])
    view = rig.client.view()
    assert view.gave_up == (
        "the server was lost at request fatal, after 0 tokens of it: HTTP 500: the engine is dead"
    )
    assert (view.failed, view.in_flight, view.over) == (2, 0, True)
    assert rig.client.outcomes()[0].failure == "given up with the others"


def test_an_answer_that_cannot_be_read_ends_the_workload(server: fake.FakeServer, tmp_path: Path) -> None:
    rig = Rig(tmp_path, server.base_url)
    rig.run([ask("garbled", fake_engine.GARBLED)])
    assert "request garbled" in rig.client.view().gave_up
    assert "cannot be read" in rig.client.view().gave_up


def test_a_request_without_a_token_is_given_up_at_its_deadline(
    server: fake.FakeServer, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, server.base_url, deadline_s=1.5)
    rig.run([ask("stuck", fake_engine.STUCK), ask("fine", count=250)])
    assert rig.client.view().gave_up == (
        "1 of 2 requests did not end: request stuck got no token for 1.5 s, after 0 tokens of it"
    )
    # It took longer than the deadline, which each token renews.
    assert {outcome.id: outcome.finish for outcome in rig.client.outcomes()} == {
        "stuck": None,
        "fine": "length",
    }


def test_a_killed_server_is_known_at_once(tmp_path: Path) -> None:
    victim = fake.FakeServer("client-killed")
    try:
        rig = Rig(tmp_path, victim.base_url)
        thread = rig.start([ask("long", count=100_000)])
        until(lambda: rig.client.view().tokens > 3, "some tokens")
        victim.process.send_signal(signal.SIGKILL)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert rig.client.view().gave_up.startswith("the server was lost at request long, after ")
    finally:
        victim.end()


def test_nobody_listens(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "http://127.0.0.1:9")
    rig.run([ask("a"), ask("b")])
    assert "the server was lost at request a, after 0 tokens of it: ConnectError" in rig.client.view().gave_up


def test_one_generation(server: fake.FakeServer) -> None:
    dialect, spec = fake.FakeDialect(), fake.spec()
    fine, bad = RequestSpec("one", (1, 2), 2), RequestSpec("two", (fake_engine.REFUSED,), 2)
    assert generate_once(dialect, spec, server.base_url, fine, 0, DEADLINE_S) is None
    assert (
        generate_once(dialect, spec, server.base_url, bad, 0, DEADLINE_S)
        == "HTTP 400: I do not like this prompt"
    )
    stuck = RequestSpec("three", (fake_engine.STUCK,), 2)
    assert "ReadTimeout" in (generate_once(dialect, spec, server.base_url, stuck, 0, 0.5) or "")


def test_metrics_are_told_in_our_words() -> None:
    text = (
        "# TYPE fake_running gauge\n"
        'fake_running{dp_rank="0"} 2\nfake_running{dp_rank="1"} 3\n'
        "# TYPE fake_steps counter\nfake_steps_total 7\n"
        "# TYPE fake_foreign gauge\nfake_foreign 1\n"
    )
    metrics = engine_metrics.parse(text, fake.FakeDialect())
    assert metrics.values == {"running": 5.0, "steps": 7.0}
    assert metrics.by_rank["running"] == {0: 2.0, 1: 3.0}
    assert metrics.samples == {"fake_running": 5.0, "fake_steps_total": 7.0}
    assert metrics.since(Metrics({"steps": 4.0}), "steps") == 3
    assert metrics.since(Metrics(), "retractions") == 0


def test_an_engine_without_metrics_has_none(server: fake.FakeServer) -> None:
    assert engine_metrics.read_metrics("http://127.0.0.1:9", fake.FakeDialect()) == Metrics()
    values = engine_metrics.read_metrics(server.base_url, fake.FakeDialect()).values
    assert set(values) == {"running", "used_tokens", "retractions", "tokens_out", "steps"}
