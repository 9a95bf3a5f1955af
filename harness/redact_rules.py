"""What must not leave the house, and how it is recognised in text. Pure: patterns and predicates.

Kinds, each with its own placeholders (``host-1``, ``secret-2``):

    secret    values of variables and options whose names look secret, credentials in addresses, bearer tokens,
              tokens with the shape that a known issuer gives them, private keys
    prompt    what users asked and were answered: in logs, values of ``text=``, ``prompt=``, ``input_ids=``
    email     mail addresses
    machine   MAC addresses, UUIDs of devices, boot ids
    ip        IP addresses, but for loopback and unspecified ones
    user      user names, from home directories and variables
    host      host names, from addresses and variables
    path      the private part of absolute paths. What lies below site-packages, the standard library, a package of
              engine or harness, or the system's own folders stays; of other paths the last name does

Rules find a value where its surroundings give it away; `harness.redact` then replaces the same value everywhere.
A rule errs on the side of too much: what it takes wrongly can be kept by name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["secret", "prompt", "email", "machine", "ip", "user", "host", "path"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PUBLIC_NAMES = _words(
    "root user users admin administrator ubuntu debian centos ec2-user nobody daemon runner worker server node "
    "host head master main localhost local localdomain unknown none null container docker kubernetes ray torch "
    "sglang vllm hangrig python cpu cuda npu sim home test tests default"
)
"""Names of users and hosts that name nobody, and are words of code and prose besides."""

PUBLIC_HOSTS = (
    "localhost", "github.com", "githubusercontent.com", "github.io", "gitlab.com", "gitee.com", "gitcode.com",
    "huggingface.co", "hf.co", "modelscope.cn", "pytorch.org", "python.org", "pypi.org", "pythonhosted.org",
    "readthedocs.io", "ray.io", "vllm.ai", "sglang.ai", "nvidia.com", "amd.com", "hiascend.com", "kernel.org",
    "wikipedia.org", "json-schema.org", "apache.org", "example.com", "example.org",
    "stackoverflow.com", "kubernetes.io", "docker.com", "microsoft.com", "gnu.org", "ietf.org", "pytest.org",
    "man7.org",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """``pattern`` has a group ``value``: what is taken. ``accept`` may refuse a match, and the search goes on
    behind its group ``name``, where it has one. What ``weak`` says yes to is replaced in its place only: it may be
    a word of code, and would be taken out of every line."""

    kind: Kind
    pattern: re.Pattern[str]
    accept: Callable[[re.Match[str]], bool] = lambda match: True
    weak: Callable[[re.Match[str]], bool] = lambda match: False


# --- secrets -----------------------------------------------------------------------------------------------

_STRONG = _words(
    "password passwd passphrase secret secrets credential credentials cookie cookies apikey authkey authtoken "
    "authorization webhook dsn sessionid csrftoken"
)
_TAIL = _words("id value header str string b 64 base")
_PLAIN_TOKENS = _words(
    "eos bos pad unk sep cls mask stop special next new first last prev prompt output input image per num max min "
    "total count decode prefill draft is no end start of on"
)
"""``eos_token`` is a word of the vocabulary."""
_KEY_OWNERS = _words(
    "api access secret private auth encryption ssh license signing master account storage service ssl tls gpg host "
    "client server public deploy"
)
_TRIVIAL = re.compile(
    r"(?i)(?:none|null|nil|true|false|on|off|yes|no|auto|default|unset|undefined|n/a|unknown|empty|redacted"
    r"|bearer|basic|digest|str|int|float|bool|bytes|any|optional|union|list|dict|tuple|set|object|callable|await"
    r"|\*+|x{3,}|-?[\d.]+(?:e[+-]?\d+)?|\.{2,}|-+|)"
)
_EXPRESSION = re.compile(r"\$\{?\w+\}?|(?:self|cls|args|config|cfg|os|server_args|kwargs)\.[\w.]+")


def secret_name(name: str) -> bool:
    """Whether a variable, option or key of that name holds a secret, in any spelling: ``HF_TOKEN``, ``api-key``,
    ``accessToken``. ``key`` alone, ``cache_key``, ``eos_token``, ``max_tokens`` and ``RAY_AUTH_MODE`` do not."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    if any(word in _STRONG for word in words):
        return True
    while len(words) > 1 and (words[-1] in _TAIL or words[-1].isdecimal()):
        words.pop()
    if not words:
        return False
    *before, last = words
    owner = before[-1] if before else ""
    if last in ("pass", "pwd"):
        return bool(before)
    if last in ("token", "auth"):
        return owner not in _PLAIN_TOKENS
    return last in ("key", "keys") and bool(owner) and (name.isupper() or owner in _KEY_OWNERS)


def secret_value(name: str, value: str) -> bool:
    """Whether ``value`` could be the secret itself, and not its absence, a number or an expression."""
    if value == name or _EXPRESSION.fullmatch(value):
        return False
    if _TRIVIAL.fullmatch(value):
        strong = re.search(r"(?i)pass|secret", name) is not None
        return strong and len(value) >= 4 and value.isdecimal()
    return True


def _assigned(match: re.Match[str]) -> bool:
    value, name = match["value"], match["name"]
    if match.string[match.start("value") - 1].isspace() and re.match(r"[A-Z_][A-Z0-9_]*=(?!=)", value):
        return False  # ``HF_TOKEN= NEXT=3``: it is empty
    called = match.string[match.end("value") : match.end("value") + 1] == "("
    return (
        secret_name(name) and secret_value(name, value) and not (called and re.fullmatch(r"[a-z_.]+", value))
    )


def _word_of_code(match: re.Match[str]) -> bool:
    """``token: Sequence`` in a line of source; a variable of the environment is none."""
    return not match["name"].isupper() and re.fullmatch(r"[A-Za-z_.]+", match["value"]) is not None


_NAME = r"(?<![\w.-])(?P<name>-{0,2}[A-Za-z_][\w.-]{0,80})"
_NAMED = _NAME + r"\\*[\"']?[ \t]{0,4}(?:=>|=|:)[ \t]{0,4}"
_QUOTED = r"(?P<quote>[\"'])(?P<value>(?:\\.|(?!(?P=quote))[^\\\n])*)(?P=quote)"
_ESCAPED = r"(?P<quote>\\+[\"'])(?P<value>[^\n]*?)(?P=quote)"
_BARE = r"(?:\\*[\"'])?(?P<value>[^\s,;&\"'()\[\]{}<>|\\]+)"
_UNCLOSED = r"(?P<quote>\\*[\"'])(?P<value>(?:(?!(?P=quote))[^\n])+)$"

_SHAPES = "|".join(
    (
        r"(?:AKIA|ASIA)[0-9A-Z]{16}",
        r"hf_[A-Za-z0-9]{20,}",
        r"gh[oprsu]_[A-Za-z0-9]{20,}",
        r"github_pat_\w{20,}",
        r"glpat-[\w-]{16,}",
        r"sk-(?:[A-Za-z]+-)?[\w-]{16,}",
        r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
        r"nvapi-[\w-]{20,}",
        r"npm_[A-Za-z0-9]{30,}",
        r"pypi-[\w-]{30,}",
        r"AIza[\w-]{30,}",
        r"wandb_v1_\w{20,}",
        r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",
    )
)

_SECRETS = (
    Rule("secret", re.compile(
        r"(?P<value>-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----|[\s\S]*))")),
    Rule("secret", re.compile(r"(?<=://)(?P<value>[^\s/@\"'<>]+)(?=@)"), lambda m: m["value"] != "git"),
    Rule("secret", re.compile(
        r"(?i)\bauthorization\\*[\"']?[ \t]{0,4}[:=][ \t]{0,4}\\*[\"']?(?:(?:bearer|basic|digest|token)\s+)?"
        r"(?P<value>[^\s,;\"'\\]+)"),
        lambda m: secret_value("authorization", m["value"])),
    Rule("secret", re.compile(r"\b[Bb]earer\s+(?P<value>[\w.~+/=-]{6,})")),
    Rule("secret", re.compile(rf"(?<![A-Za-z0-9])(?P<value>{_SHAPES})(?![A-Za-z0-9])")),
    Rule("secret", re.compile(_NAMED + _QUOTED), _assigned),
    Rule("secret", re.compile(_NAMED + _ESCAPED), _assigned),
    Rule("secret", re.compile(_NAMED + _BARE), _assigned, _word_of_code),
    Rule("secret", re.compile(r"(?<![\w-])--(?P<name>[a-z][\w-]{0,80})\s+" + _BARE), _assigned),
)  # fmt: skip

# --- what users said ---------------------------------------------------------------------------------------

_ASKED = (
    r"(?<![\w.-])(?P<name>text|prompts?|input_text|inputs|output_text|generated_text|completion|content|messages"
    r"|question|answer|(?:\w{1,30}_)?(?:input|output|token)_ids)\\*[\"']?[ \t]{0,4}[=:][ \t]{0,4}"
)
_PROMPTS = (
    Rule("prompt", re.compile(_ASKED + _QUOTED), lambda m: bool(m["value"])),
    Rule("prompt", re.compile(_ASKED + _ESCAPED), lambda m: bool(m["value"])),
    Rule("prompt", re.compile(_ASKED + r"\[(?P<value>[\d\s,]{2,})(?:\]|$)", re.MULTILINE)),
    Rule("prompt", re.compile(_ASKED + _UNCLOSED, re.MULTILINE), lambda m: bool(m["value"])),
)

# --- people and machines -----------------------------------------------------------------------------------


def public_name(name: str) -> bool:
    return name.lower() in PUBLIC_NAMES or not re.search(r"[A-Za-z]", name) or len(name) < 2


def _public_host(host: str) -> bool:
    host = host.lower().rstrip(".")
    return public_name(host) or any(host == known or host.endswith(f".{known}") for known in PUBLIC_HOSTS)


def _private_name(match: re.Match[str]) -> bool:
    return not public_name(match["value"])


def _private_host(match: re.Match[str]) -> bool:
    return not _public_host(match["value"])


def _private_ip(match: re.Match[str]) -> bool:
    try:
        address = ipaddress.ip_address(match["value"].partition("%")[0])
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified or match["value"] == "255.255.255.255":
        return False
    # ``x[1::2]`` and ``::add`` read as addresses too.
    real = re.search(r"\d", match["value"]) and re.search(r"[0-9A-Fa-f]{3}", match["value"])
    return address.version == 4 or (real is not None and not match["value"].endswith("::"))


_HOST = r"(?P<value>[A-Za-z0-9][A-Za-z0-9_.-]{0,120}[A-Za-z0-9]|[A-Za-z])"
_USER = r"(?P<value>[A-Za-z_][\w.+-]{0,60})"

_PEOPLE = (
    Rule("email", re.compile(r"(?<![\w.+-])(?<!://)(?P<value>(?!git@)[\w.+-]{1,64}@(?:[\w-]+\.)+[A-Za-z]{2,24})"
        r"(?![\w@-])")),
    Rule("machine", re.compile(r"(?<![\w:])(?P<value>(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2})(?![\w:])")),
    Rule("machine", re.compile(r"\b(?:GPU|MIG|NPU)-(?P<value>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b")),
    Rule("ip", re.compile(
        r"(?<![\w.])(?<!==)(?<!version )(?P<value>(?:\d{1,3}\.){3}\d{1,3})(?![\w])(?!\.\d)"), _private_ip),
    Rule("ip", re.compile(
        r"(?<![\w:.])(?P<value>[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{0,40}(?:%\w{1,15})?)(?![\w:])"),
        _private_ip),
    Rule("user", re.compile(r"(?:(?<![\w.-])|(?<=-[IL]))(?:/\w+)?/(?:home|Users)/" + _USER), _private_name),
    Rule("user", re.compile(r"\b(?:USER|LOGNAME|USERNAME|SUDO_USER)=" + _USER), _private_name),
    Rule("user", re.compile(
        r"(?<![\w.-])(?:user|username|owner|login)\\*[\"']?[ \t]{0,4}[=:][ \t]{0,4}\\*[\"']" + _USER + r"\\*[\"']"),
        _private_name),
    Rule("user", re.compile(r"(?<![\w.@/-])" + _USER + r"@[A-Za-z0-9][\w.-]*:[~/]"), _private_name),
    Rule("host", re.compile(r"(?<![\w.@/-])[A-Za-z_][\w.-]{0,60}@" + _HOST + r"(?=:[~/])"), _private_host),
    Rule("host", re.compile(r"(?<=://)(?:[^\s/@]+@)?" + _HOST + r"(?![\w.@-])"), _private_host,
         lambda match: match["value"].isalpha()),
    Rule("host", re.compile(
        r"\b(?:MASTER_ADDR|HOST|HOSTNAME|NODENAME|NODE_NAME|SLURMD_NODENAME|RAY_ADDRESS)=\\*[\"']?" + _HOST),
        _private_host),
    Rule("host", re.compile(
        r"(?<![\w.-])(?:host|hostname|nodename|node_name|master_addr|dist_init_addr|server_name)"
        r"\\*[\"']?[ \t]{0,4}[=:][ \t]{0,4}\\*[\"']" + _HOST), _private_host),
    Rule("host", re.compile(r"(?<![\w-])--(?:host|dist-init-addr|master-addr)[ =]" + _HOST), _private_host),
    Rule("host", re.compile(r"\b(?:hostname|nodename)[ \t]{0,4}[:=][ \t]{0,4}" + _HOST), _private_host),
    Rule("host", re.compile(
        r"(?<![\w.@-])(?P<value>(?=[\w-]*[\d-])[A-Za-z][\w-]*(?:\.[\w-]+)*"
        r"\.(?:internal|lan|corp|intranet|localdomain|svc\.cluster\.local|local))(?![\w-])")),
    Rule("host", re.compile(r"(?<![\w-])(?P<value>ip-(?:\d{1,3}-){3}\d{1,3})(?![\w-])")),
)  # fmt: skip

# --- paths -------------------------------------------------------------------------------------------------

_SYSTEM = ("/usr/", "/lib/", "/lib64/", "/bin/", "/sbin/", "/proc/", "/sys/", "/dev/", "/etc/", "/opt/conda/")
_PLAIN_FOLDERS = frozenset(("", "/home", "/Users", "/tmp", "/var/tmp", "/var/log", "/run", "/var/run"))
_ROUTES = _words("v1 v2 api health health_generate metrics generate docs openapi")
_PACKAGES = _words(
    "harness serving reports scenarios bench tests sglang vllm vllm_ascend sgl_kernel torch torch_npu ray xgrammar "
    "triton aten c10 caffe2 third_party"
)
_CODE = re.compile(r"\.(?:py|pyx|pyi|so(?:\.[\d.]+)?|c|cc|cpp|cxx|cu|h|hpp|rs|go|toml)$")
_PART = r"[^\s/:\"'`,;()\[\]{}<>|*?\\=&]+"
_PATH = re.compile(
    rf"(?:(?<![\w.~/<>)\]-])|(?<=file://)|(?<=-[IL]))(?P<value>/(?:{_PART}/)+)(?P<rest>{_PART})?"
)


def _whole(match: re.Match[str]) -> str:
    return match["value"] + (match["rest"] or "")


def private_folder(path: str) -> str:
    """The part of an absolute path that says where somebody keeps things, without a slash at its end; empty where
    the path has none. ``/opt/env/lib`` of ``/opt/env/lib/python3.11/site-packages/torch/cuda.py`` is not it:
    ``/opt/env/lib/python3.11`` is."""
    parts = path.split("/")[1:]
    if path.startswith(_SYSTEM) or parts[0] in _ROUTES:
        return ""
    first = 2 if parts[0] in ("home", "Users") else 1 if parts[0] == "root" else 0
    cut = next((i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")), None)
    if cut is None:
        pairs = pairwise(parts)
        cut = next(
            (i for i, (a, b) in enumerate(pairs) if a == "lib" and re.fullmatch(r"python3\.\d+", b)), None
        )
    if cut is None and _CODE.search(path):
        cut = next((i for i, part in enumerate(parts[:-1]) if i >= first and part in _PACKAGES), None)
    if cut is None:
        cut = len(parts) - 1
    folder = "/" + "/".join(parts[:cut]) if cut else ""
    return "" if folder in _PLAIN_FOLDERS else folder


PATHS = Rule("path", _PATH, lambda match: bool(private_folder(_whole(match).rstrip("/"))))
"""Its value is the whole folder; the private part of it is what is replaced (`private_folder`)."""

RULES: tuple[Rule, ...] = (*_SECRETS, *_PROMPTS, *_PEOPLE)

NODE_KEYS = _words("node nodes host hostname nodename node_name master_addr driver_node")
USER_KEYS = _words("user username owner logname login")
MACHINE_KEYS = _words("boot_id machine_id uuid serial")
"""Keys of JSON documents whose texts are of that kind."""


def kind_of_key(key: str, value: str) -> Kind | None:
    """The kind that a text in a JSON document has by its key; None: look at the text itself."""
    lower = key.lower()
    if secret_name(key) and secret_value(key, value):
        return "secret"
    if lower in NODE_KEYS and not _public_host(value) and re.fullmatch(r"[\w.-]+", value):
        return "host"
    if lower in USER_KEYS and not public_name(value) and re.fullmatch(r"[\w.+-]+", value):
        return "user"
    return "machine" if lower in MACHINE_KEYS and len(value) >= 8 else None
