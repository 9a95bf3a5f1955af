"""Metrics and health of a server over HTTP: real sockets, and the text formats of both engines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from harness.process_control import identify
from harness.watch.activity import Activity, busy_share, read_activity, wakes_per_s
from harness.watch.metrics import HealthCheck, base_url, get, listening, read_metrics

WAIT_S = 30.0

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="small"} 4.0
vllm:num_requests_waiting{engine="0",model_name="small"} 8.0
vllm:kv_cache_usage_perc{engine="0",model_name="small"} 0.93
vllm:num_preemptions_total{engine="0",model_name="small"} 13.0
vllm:generation_tokens_total{engine="0",model_name="small"} 2620.0
vllm:generation_tokens_created{engine="0",model_name="small"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="small"} 100.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="small"} 3.0
process_cpu_seconds_total 12.5
http_requests_total{method="GET"} 7.0
"""
SGLANG = """
sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1",tp_rank="1"} 2.0
sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 0.0
sglang:realtime_tokens_total{mode="decode",dp_rank="0"} 70.0
sglang:realtime_tokens_total{mode="prefill_compute",dp_rank="1"} 30.0
sglang:max_total_num_tokens{dp_rank="0"} 1024.0
sglang:scheduler_process_cpu_seconds_total{dp_rank="0"} 70.5
sglang:http_requests_total{path="/metrics"} 9.0
"""


def test_metrics_of_vllm() -> None:
    traffic = read_metrics(VLLM)
    assert (traffic.running, traffic.waiting, traffic.tokens, traffic.owed) == (4.0, 8.0, 2720.0, True)
    assert {mark.partition("{")[0] for mark in traffic.marks} == {
        "vllm:num_preemptions_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
    }  # fmt: skip
    assert traffic.words() == "4 running, 8 waiting, 2720 tokens so far"


def test_metrics_of_sglang() -> None:
    traffic = read_metrics(SGLANG)
    assert (traffic.running, traffic.waiting, traffic.tokens) == (5.0, 0.0, 100.0)
    assert len(traffic.marks) == 2  # not what a spinning process uses, nor what asking for metrics counts


def test_what_a_request_for_metrics_changes_is_no_progress() -> None:
    again = SGLANG.replace('{path="/metrics"} 9.0', '{path="/metrics"} 10.0').replace("70.5", "71.5")
    assert read_metrics(again).marks == read_metrics(SGLANG).marks
    more = SGLANG.replace("70.0", "71.0")
    assert read_metrics(more).marks != read_metrics(SGLANG).marks


def test_an_idle_server_owes_nothing_and_foreign_metrics_say_nothing() -> None:
    assert read_metrics("vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0").owed is False
    assert read_metrics("vllm:num_requests_running 0.0\nvllm:num_requests_waiting 2.0").owed is True
    foreign = read_metrics("go_goroutines 12\nnot a sample\nnan_sample NaN\nbad x\n")
    assert (foreign.owed, foreign.marks, foreign.words()) == (None, {}, "requests not counted")


# --- a real server


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Answers every connection in a thread of its own; gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield port
        listener.shutdown(socket.SHUT_RDWR)


def says(status: str, body: str = "") -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(4096)
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    return answer


def silent(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.recv(4096)  # until the other side has had enough


def drips(connection: socket.socket) -> None:
    """An answer that never ends, each byte within any deadline."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    try:
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)
    except OSError:
        connection.close()


def test_answers_are_read_with_their_status() -> None:
    with server(says("200 OK", "a 1")) as port:
        answer = get(f"http://127.0.0.1:{port}/metrics", WAIT_S)
        assert (answer.status, answer.text) == (200, "a 1")
    with server(says("503 Service Unavailable")) as port:
        assert get(f"http://127.0.0.1:{port}/health", WAIT_S).status == 503


@pytest.mark.parametrize("answer", [silent, drips])
def test_a_server_that_does_not_come_to_an_end_is_given_up(answer: Callable[[socket.socket], None]) -> None:
    with server(answer) as port:
        found = get(f"http://127.0.0.1:{port}/", 0.3)
        assert (found.status, found.why) == (None, "no answer within 0.3 s")


def test_what_is_no_server_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "refused" in get(f"http://127.0.0.1:{port}/", 1.0).why
    with server(lambda connection: connection.sendall(b"garbage\r\n\r\n")) as port:
        assert get(f"http://127.0.0.1:{port}/", 1.0).status is None
    assert get("nonsense", 1.0).why


def test_where_a_process_listens() -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
        "t = socket.create_server(('', 0)); print(s.getsockname()[1], t.getsockname()[1], flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        ports = [int(port) for port in child.stdout.readline().split()]
        assert sorted(listening(child.pid)) == sorted(("127.0.0.1", port) for port in ports)
        assert base_url(child.pid, ["--port", str(ports[1])], 30000, 0.1) == f"http://127.0.0.1:{ports[1]}"
        assert base_url(child.pid, [f"--port={ports[0]}"], 30000, 0.1) == f"http://127.0.0.1:{ports[0]}"
        assert base_url(child.pid, [], ports[0], 0.1) == f"http://127.0.0.1:{ports[0]}"
        assert base_url(child.pid, [], 1, 0.1) is None


def test_a_server_on_an_unusual_port_is_found_by_its_answer() -> None:
    with server(says("404 Not Found")) as port:
        assert base_url(os.getpid(), [], 1, WAIT_S) == f"http://127.0.0.1:{port}"


def wait_until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_health_is_asked_again_and_again_without_waiting_for_it() -> None:
    answers = iter([says("200 OK"), says("503 Service Unavailable"), silent])

    def next_answer(connection: socket.socket) -> None:
        next(answers)(connection)

    with server(next_answer) as port:
        health = HealthCheck(f"http://127.0.0.1:{port}/health", deadline_s=WAIT_S, pause_s=0.05)
        try:
            wait_until(lambda: health.well_s is not None)
            wait_until(lambda: health.state == "unwell")
            assert health.why == "answered 503"
            wait_until(lambda: health.asked_for_s() > 0.2)  # the third is never answered
        finally:
            health.close()


# --- what the kernel says of a thread


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("import time; time.sleep(600)", "clock_nanosleep"),
        ("import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", "futex"),
        ("import os; r, w = os.pipe(); [os.write(w, b'x' * 4096) for _ in range(99)]", "write"),
        ("import sys; sys.stdin.read()", "read"),
        ("import subprocess; subprocess.Popen(['sleep', '600']).wait()", "wait4"),
    ],
)
def test_the_call_that_a_thread_waits_in(code: str, call: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            process = identify(child.pid)
            assert process is not None
            wait_until(lambda: (found := read_activity(process)) is not None and found.call == call)
        finally:
            os.killpg(child.pid, 9)
    assert read_activity(process) is None


def test_a_call_is_still_known_after_a_tracer_stopped_it() -> None:
    code = "import threading; threading.Lock(); lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=600)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            process = identify(child.pid)
            assert process is not None
            waits = lambda: (found := read_activity(process)) is not None and found.call == "futex"  # noqa: E731
            wait_until(waits)
            py_spy = os.path.join(os.path.dirname(sys.executable), "py-spy")  # noqa: PTH118, PTH120
            subprocess.run([py_spy, "dump", "--pid", str(child.pid)], check=True, capture_output=True)
            wait_until(waits)
        finally:
            child.kill()


def test_a_busy_thread_wants_to_run_and_a_sleeping_one_does_not() -> None:
    found = {}
    for name, code in (("busy", "while True: pass"), ("asleep", "import time; time.sleep(600)")):
        with subprocess.Popen([sys.executable, "-c", code]) as child:
            try:
                process = identify(child.pid)
                assert process is not None
                wait_until(lambda p=process: (a := read_activity(p)) is not None and a.runnable_s > 0.0)  # type: ignore[misc]
                time.sleep(0.3)  # past the start
                before = read_activity(process)
                time.sleep(0.5)  # what is measured
                after = read_activity(process)
                assert before is not None and after is not None
                found[name] = busy_share(before, after)
            finally:
                child.kill()
    assert found["busy"] is not None and found["asleep"] is not None
    assert found["busy"] > 0.8
    assert found["asleep"] < 0.2


def test_shares_and_rates_want_some_time_between() -> None:
    first = Activity(0, 1.0, 10, None)
    assert busy_share(first, Activity(500_000_000, 1.25, 60, None)) == 0.5
    assert wakes_per_s(first, Activity(500_000_000, 1.25, 60, None)) == 100.0
    assert busy_share(first, Activity(1_000_000, 1.001, 10, None)) is None
    assert wakes_per_s(first, Activity(1_000_000, 1.001, 10, None)) is None
