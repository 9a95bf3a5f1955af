"""Redaction: what is found, what stays readable, and that nothing found is left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.redact import Redactor, placeholders_in
from harness.redact_rules import KINDS, private_folder, secret_name


def redacted(*texts: str, **settings: Any) -> list[str]:
    """As a bundle does it: all texts learnt from, then all replaced."""
    redactor = Redactor(taken=placeholders_in(texts), **settings)
    for text in texts:
        redactor.text(text)
    return [redactor.text(text) for text in texts]


# --- what is found ---

FOUND = {
    "a variable": ("HF_TOKEN=abc-123-def", "HF_TOKEN=secret-1"),
    "a quoted variable": ("export DB_PASSWORD='it\\'s long', x", "export DB_PASSWORD='secret-1', x"),
    "a repr": ("{'WANDB_API_KEY': 'q1w2e3', 'N': '3'}", "{'WANDB_API_KEY': 'secret-1', 'N': '3'}"),
    "JSON in JSON in text": (r'env {\"SESSION_COOKIE\": \"q1w2e3\"}', r'env {\"SESSION_COOKIE\": \"secret-1\"}'),
    "behind another name": ("env: GIT_TOKEN=q1w2e3r4", "env: GIT_TOKEN=secret-1"),
    "an option": ("serve --api-key q1w2e3r4 --port 3", "serve --api-key secret-1 --port 3"),
    "a query": ("GET /x?access_token=q1w2e3&y=1", "GET /x?access_token=secret-1&y=1"),
    "camel case": ("clientSecret: q1w2e3", "clientSecret: secret-1"),
    "digits": ("PASSWORD=424242, pid 424242", "PASSWORD=secret-1, pid 424242"),
    "an address with credentials": ("https://bob:pw@github.com/a/b", "https://secret-1@github.com/a/b"),
    "a header": ("Authorization: Bearer q1w2e3.r4-t5", "Authorization: Bearer secret-1"),
    "a bearer token": ("sent bearer q1w2e3r4t5", "sent bearer secret-1"),
    "AWS": ("id AKIAIOSFODNN7EXAMPLE.", "id secret-1."),
    "Hugging Face": ("login hf_AbCdEfGhIjKlMnOpQrStUvWx", "login secret-1"),
    "GitHub": ("ghp_0123456789abcdefghij0123456789abcdef", "secret-1"),
    "a JSON web token": ("t eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0", "t secret-1"),
    "a private key": ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\n", "secret-1\n"),
    "mail": ("by Bob <bob.smith+x@mail.acme.io>", "by Bob <email-1>"),
    "IPv4": ("tcp://10.1.2.3:29500", "tcp://ip-1:29500"),
    "IPv6": ("http://[fe80::21a:4bff:1]:80/x", "http://[ip-1]:80/x"),
    "a network card": ("eth0 0a:1b:2c:3d:4e:5f up", "eth0 machine-1 up"),
    "a GPU": ("GPU-01234567-89ab-cdef-0123-456789abcdef", "GPU-machine-1"),
    "a host in an address": ("http://gpu17:30000/health", "http://host-1:30000/health"),
    "a host by its domain": ("joined gpu17.rack2.internal now", "joined host-1 now"),
    "a host in a variable": ("MASTER_ADDR=trainer7 gloo", "MASTER_ADDR=host-1 gloo"),
    "a prompt": ("[10.0s] user@gpu17:~$ top", "[10.0s] user@host-1:~$ top"),
    "a home": ("cd /home/alice", "cd /home/user-1"),
    "a user": ("USER=alice SHELL=/bin/sh", "USER=user-1 SHELL=/bin/sh"),
    "a request's text": ("Req(text='buy \\'it\\' all', rid=3)", "Req(text='prompt-1', rid=3)"),
    "token ids": ("input_ids=[1, 22, 333], rid=3", "input_ids=[prompt-1], rid=3"),
    "a prompt that was cut": ('prompt: "once upon a ti', 'prompt: "prompt-1'),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name: str) -> None:
    text, expected = FOUND[name]
    assert redacted(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "eos_token='</s>' pad_token: '<pad>' max_tokens=128 next_token_copy: 5 tokens=480",
        "token_count_copy, metadata_copy, embed; key=lambda x: x, cache_key=blocks, sort_key: name",
        "RAY_AUTH_MODE=token TOKENIZERS_PARALLELISM=false HF_TOKEN= API_KEY=None api_key=api_key",
        "signature hang/stream-order/compute/graph.replay/-/serving, author: nobody",
        "nvidia-cublas-cu12==12.8.4.1, driver 550.54.15, CANN 8.0.RC1, 12:34:56.789, 127.0.0.1 ::1 0.0.0.0",
        "x[1::2] y[::2] z[10::20] api_key: Optional[str] = None",
        "c10::Backend std::vector at::native::add_out ::operator() memcpy@plt malloc@@GLIBC_2.2.5",
        "threading.local self.local torch.internal 4.5/5 tokens/s N/A and/or a/b/c ./x/y ../x/y/z",
        "POST /v1/chat/completions HTTP/1.1 200 OK, /health, http://localhost:30000/v1/models",
        "https://github.com/sgl-project/sglang/issues/39423 git@github.com:a/b.git",
        '  File "/usr/lib/python3.11/threading.py", line 331, in wait',
        "rank 1: all_reduce #1125 of group tp, waiting [0, 1], missing [], shape [31, 128]",
        "/proc/4711/status /dev/shm/x/y /tmp/a.log root ubuntu localhost",
    ],
)
def test_what_stays(text: str) -> None:
    assert redacted(text) == [text]


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/opt/env/lib/python3.11/site-packages/torch/cuda/graphs.py", "/opt/env/lib/python3.11"),
        ("/root/miniforge3/envs/serve/lib/python3.11/threading.py", "/root/miniforge3/envs/serve"),
        ("/home/al/sglang/python/sglang/srt/managers/scheduler.py", "/home/al"),
        ("/home/vllm/plan/secret.py", "/home/vllm/plan"),
        ("/data/ray/acme/weights.bin", "/data/ray/acme"),
        ("/srv/acme/harness/devices/sim.py", "/srv/acme"),
        ("/acme/x", "/acme"),
        ("/tmp/x", ""),
        ("/usr/local/Ascend/driver/version.info", ""),
        ("/v1/chat/completions", ""),
    ],
)
def test_the_private_part_of_a_path(path: str, folder: str) -> None:
    assert private_folder(path) == folder
    shown = f"path-1{path.removeprefix(folder)}" if folder else path
    assert re.sub(r"\b/?user-\d", "user-1", redacted(path, keep_kinds=("user",))[0]) == shown


def test_frames_of_the_engine_keep_their_place_and_line() -> None:
    frame = 'File "/home/alice/src/sglang/python/sglang/srt/managers/scheduler.py", line 88, in event_loop'
    assert redacted(frame) == [
        'File "path-1/sglang/python/sglang/srt/managers/scheduler.py", line 88, in event_loop'
    ]


@pytest.mark.parametrize(
    ("name", "secret"),
    [("AWS_ACCESS_KEY_ID", True), ("HF_TOKEN_2", True), ("x-api-key", True), ("accessToken", True),
     ("MY_KEY", True), ("Cookie", True), ("DB_PASS", True), ("key", False), ("kv_key", False), ("pass", False),
     ("max_new_tokens", False), ("eos_token_id", False), ("tokenizer", False), ("AUTH_MODE", False),
     ("monkey", False), ("signature", False), ("", False)],
)  # fmt: skip
def test_names_that_look_secret(name: str, secret: bool) -> None:
    assert secret_name(name) is secret


# --- the same value everywhere ---


def test_what_one_text_gives_away_is_taken_out_of_all() -> None:
    texts = ["plain q1w2e3r4 and ALICE on GPU17", "API_KEY=q1w2e3r4", "/home/alice/x", "MASTER_ADDR=gpu17"]
    assert redacted(*texts)[0] == "plain secret-1 and user-1 on host-1"


def test_placeholders_are_the_same_for_the_same_and_differ_for_others() -> None:
    clean = redacted("A_TOKEN=aaaa1111 B_TOKEN=bbbb2222", "bbbb2222 aaaa1111")
    assert clean == ["A_TOKEN=secret-1 B_TOKEN=secret-2", "secret-2 secret-1"]


def test_a_host_that_is_called_like_a_placeholder() -> None:
    assert redacted("host='host-1' then host='gpu17'")[0] == "host='host-2' then host='host-3'"


def test_users_called_like_kinds_do_not_eat_placeholders() -> None:
    names = ["secret", "path", "email", "prompt"]
    texts = [" ".join(f"/home/{name}/x" for name in names), "X_TOKEN=abcd1234 secret"]
    redactor = Redactor(taken=placeholders_in(texts))
    clean = [redactor.text(text) for text in texts]
    assert [redactor.text(text) for text in clean] == clean
    assert clean[1].endswith("secret-1 user-1")


def test_what_is_plain_is_replaced_only_in_its_place() -> None:
    assert redacted("Req(text='error')", "an error")[1] == "an error"
    assert redacted("PASSWORD=424242", "pid 424242")[1] == "pid 424242"
    assert redacted("def f(token: Sequence, x)", "Sequence")[1] == "Sequence"
    assert redacted("http://frontend/x", "the frontend")[1] == "the frontend"


def test_what_is_plain_in_one_place_and_not_in_another_is_replaced_everywhere() -> None:
    assert redacted("a swordfish", "password: swordfish", "DB_PASSWORD=swordfish")[0] == "a secret-1"
    assert redacted("a swordfish", '{"password": "swordfish"}')[0] == "a secret-1"


def test_keep() -> None:
    text = "/home/alice/x/y.bin on gpu17: MASTER_ADDR=gpu17 A_TOKEN=abcd1234"
    assert redacted(text, keep=["alice", "gpu17"])[0].endswith("on gpu17: MASTER_ADDR=gpu17 A_TOKEN=secret-1")
    kept = redacted(text, keep_kinds=("path", "host", "user", "secret"))[0]
    assert kept == "/home/alice/x/y.bin on gpu17: MASTER_ADDR=gpu17 A_TOKEN=secret-1"


def test_learnt_names() -> None:
    redactor = Redactor()
    redactor.learn("host", "gpu17.acme.net")
    redactor.learn("host", "localhost")
    assert redactor.text("gpu17 gpu17.acme.net gpu170 localhost") == "host-2 host-1 gpu170 localhost"


# --- JSON ---


def test_documents_stay_documents() -> None:
    document = {
        "node": "vm",
        "argv": ["--api-key", "abc123x", "run", "--token=q1w2e3r4"],
        "text": '{"target":{"env":{"X_TOKEN":"qwerty12"},"ranks":2}}',
        "env": [{"name": "A_SECRET", "value": "foo!bar"}],
        "files": {"/home/alice/a/b.bin": 1},
        "boot_id": "92565100-922b-4caa-b5de-acdae3129d3b",
        "user": "bob", "tokens": 480, "ok": True, "none": None, "x": [1.5, "vm abc123x"],
    }  # fmt: skip
    redactor = Redactor()
    redactor.document(document)
    clean = redactor.document(document)
    assert json.loads(json.dumps(clean)) == {
        "node": "host-1",
        "argv": ["--api-key", "secret-1", "run", "--token=secret-2"],
        "text": '{"target":{"env":{"X_TOKEN":"secret-3"},"ranks":2}}',
        "env": [{"name": "A_SECRET", "value": "secret-4"}],
        "files": {"path-1/b.bin": 1},
        "boot_id": "machine-1",
        "user": "user-2", "tokens": 480, "ok": True, "none": None, "x": [1.5, "host-1 secret-1"],
    }  # fmt: skip


def test_keys_that_become_equal_both_stay() -> None:
    redactor = Redactor(keep_kinds=("host",))
    assert len(redactor.document({"10.0.0.1": 1, "ip-1": 2})) == 2


def test_counts_are_of_what_was_replaced() -> None:
    redactor = Redactor()
    redactor.text("A_TOKEN=abcd1234 and abcd1234")
    redactor.counts.clear()
    for _ in range(2):  # the second answer comes from memory
        redactor.text("A_TOKEN=abcd1234 and abcd1234 on 10.0.0.1")
    assert redactor.counts == {"secret": 4, "ip": 2}


# --- properties ---

_WORD = st.text("abcdefgxyz0123456789_-.@:/='\"\\ \n", min_size=0, max_size=12)
_NAMES = st.sampled_from(
    ["HF_TOKEN", "PASSWORD", "api_key", "host", "USER", "text", "input_ids", "path", "x", "MASTER_ADDR"]
)
_PIECES = st.one_of(
    _WORD,
    st.tuples(_NAMES, st.sampled_from(["=", ": ", "='", '="', "=[", " "]), _WORD).map("".join),
    st.sampled_from(
        ["/home/alice/x/y.bin", "10.0.0.7", "https://a:b@c.io/d", "bob@mail.acme.io", "alice", "fe80::1:2",
         "secret-1", "hf_AbCdEfGhIjKlMnOpQrStUvWx", "/srv/acme/lib/python3.11/os.py", "host-2",
         "--api-key q1w2", "Bearer abcdefg"]
    ),
)  # fmt: skip
_TEXTS = st.lists(_PIECES, max_size=8).map("".join)


@settings(deadline=None, max_examples=400)
@given(st.lists(_TEXTS, min_size=1, max_size=3))
@example(["HF_TOKEN=secret-1", "secret-1"])
@example(["USER=path /home/path/path/x.bin"])
@example(["PASSWORD=/srv/acme/x/y MASTER_ADDR=acme"])
def test_redaction_is_idempotent_and_leaves_no_original(texts: list[str]) -> None:
    redactor = Redactor(taken=placeholders_in(texts))
    known = -1
    while known != redactor.known:
        known = redactor.known
        clean = [redactor.text(text) for text in texts]
    assert [redactor.text(text) for text in clean] == clean
    assert [redactor.left(text) for text in clean] == [[] for _ in clean]


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NO_SECRET = re.compile(rf"(?i)x+|-+|bearer.*|undefined|redacted|(?:{'|'.join(KINDS)})-.*|[^a-z]*")
_SECRETS = st.text(f"{_LETTERS}0123456789_+-", min_size=8, max_size=30).filter(
    lambda text: not _NO_SECRET.fullmatch(text)
)
_CARRIERS: Iterable[str] = (
    "HF_TOKEN={}", "api_key='{}'", '{{"client_secret": "{}"}}', "--password {} x", "x {} y", "https://u:{}@h.io/",
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(_SECRETS, st.lists(st.sampled_from(list(_CARRIERS)), min_size=1, max_size=4), _TEXTS)
def test_a_planted_secret_is_gone_from_everything(secret: str, carriers: list[str], noise: str) -> None:
    texts = [f"SERVICE_PASSWORD={secret}\n", *(carrier.format(secret) for carrier in carriers), noise]
    assert not [text for text in redacted(*texts)[: len(carriers) + 1] if secret.lower() in text.lower()]
