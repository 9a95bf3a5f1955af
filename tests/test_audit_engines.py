"""The audit on the wheels of two releases of SGLang: the safe platform class from the unsafe one, read in place."""

from __future__ import annotations

from collections import Counter

import pytest
from sglang_wheels import WheelMissing, wheel_path

from harness.audit.findings import Finding
from harness.audit.rules import RULES
from harness.audit.scan import scan
from harness.audit.source import locate

pytestmark = pytest.mark.network


def audited(release: str) -> list[Finding]:
    try:
        path = wheel_path(release)
    except WheelMissing as error:
        pytest.fail(str(error))
    return scan(locate(str(path)), RULES)


@pytest.fixture(scope="module")
def safe() -> list[Finding]:
    return audited("0.5.20")


@pytest.fixture(scope="module")
def unsafe() -> list[Finding]:
    return audited("0.5.23")


def platforms(findings: list[Finding]) -> dict[str, str]:
    return {one.path: one.message for one in findings if one.rule == "HG102"}


def test_the_safe_platform_class_is_told_from_the_unsafe_one(
    safe: list[Finding], unsafe: list[Finding]
) -> None:
    npu = "sglang/srt/platforms/npu.py"
    assert npu not in platforms(safe)
    assert platforms(unsafe)[npu].startswith("NPUDeviceMixin answers is_pin_memory_available")
    assert "sglang/srt/platforms/cuda.py" not in platforms(safe) | platforms(unsafe)


def test_private_names_of_the_pool_allocator_are_looked_up_at_the_call_there(unsafe: list[Finding]) -> None:
    """CASES.md, case 2: what 0.5.23 does is the repair."""
    allocator = "sglang/srt/distributed/device_communicators/pynccl_allocator.py"
    assert allocator not in {one.path for one in unsafe if one.rule == "HG101"}


def test_all_of_it_could_be_read_and_no_rule_floods(safe: list[Finding], unsafe: list[Finding]) -> None:
    for findings in (safe, unsafe):
        counts = Counter(one.rule for one in findings)
        assert counts["HG001"] == 0 and counts["HG103"] > 0 and counts["HG101"] > 0
        assert max(counts.values()) < 100, counts
