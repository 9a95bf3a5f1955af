"""HG102: platform classes against their bases, found through imports, re-exports and mixins."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_rig import audit, write_tree

BASE = """
class DeviceMixin:
    def is_pin_memory_available(self, device=None) -> bool:
        return False
    def use_custom_allreduce(self) -> bool:
        raise NotImplementedError
"""
NPU = """
from engine.platforms.base import DeviceMixin
class NPUDeviceMixin(DeviceMixin):
    device_type: str = "npu"
    def is_pin_memory_available(self, device=None) -> bool:
        if device is not None and str(device) == "cpu":
            return False
        return True
"""


def found(tmp_path: Path, files: dict[str, str]) -> list[tuple[str, int, str]]:
    packages = {f"{name}/__init__.py": "" for name in ("engine", "engine/platforms")}
    findings = audit(write_tree(tmp_path, {**packages, **files}), ["HG102"])
    return [(Path(one.path).name, one.line, one.message) for one in findings]


def platform(body: str, imports: str = "from engine.platforms.base import DeviceMixin") -> str:
    return f"{imports}\nclass NPUPlatform(DeviceMixin):\n{body}\n"


def test_case_1_yes_but_for_cpu_over_a_base_that_says_no(tmp_path: Path) -> None:
    files = {"engine/platforms/base.py": BASE, "engine/platforms/npu.py": NPU}
    ((name, line, message),) = found(tmp_path, files)
    assert (name, line) == ("npu.py", 4)
    assert "NPUDeviceMixin answers is_pin_memory_available with no in some cases only" in message
    assert "engine.platforms.base.DeviceMixin with no;" in message and "barrier" in message


@pytest.mark.parametrize(
    "body",
    [
        "    def is_pin_memory_available(self, device=None):\n        return False",
        "    def is_pin_memory_available(self, device=None):\n"
        "        return super().is_pin_memory_available(device)",
        "    def is_pin_memory_available(self, device=None):\n"
        "        return super().is_pin_memory_available(device) and self.ready",
        "    def is_pin_memory_available(self, device=None):\n        raise NotImplementedError",
        "    def use_custom_allreduce(self):\n        return True",  # the base gives no answer to compare with
        "    def something_else(self):\n        return True",
        "    is_pin_memory_available = False",
    ],
)
def test_no_less_safe_than_the_base(tmp_path: Path, body: str) -> None:
    assert (
        found(tmp_path, {"engine/platforms/base.py": BASE, "engine/platforms/npu.py": platform(body)}) == []
    )


@pytest.mark.parametrize(
    "answer",
    [
        "    def is_pin_memory_available(self, device=None):\n        return True",
        "    @classmethod\n    def is_pin_memory_available(cls, device=None):\n        return True",
        "    def is_pin_memory_available(self, device=None):\n        return self.device_type != 'cpu'",
        "    is_pin_memory_available: bool = True",
        "    if SOMETHING:\n        def is_pin_memory_available(self, device=None):\n            return True",
    ],
)
@pytest.mark.parametrize(
    "imports",
    [
        "from engine.platforms.base import DeviceMixin",
        "from .base import DeviceMixin",
        "from engine.platforms import DeviceMixin",
        "try:\n    from engine.platforms.base import DeviceMixin\nexcept ImportError:\n    raise",
    ],
)
def test_every_way_to_say_yes_and_to_import_the_base(tmp_path: Path, answer: str, imports: str) -> None:
    files = {
        "engine/platforms/base.py": BASE,
        "engine/platforms/__init__.py": "from .base import DeviceMixin\n",
        "engine/platforms/npu.py": platform(answer, imports),
    }
    ((name, _, message),) = found(tmp_path, files)
    assert name == "npu.py" and "NPUPlatform answers is_pin_memory_available" in message


def test_a_dotted_base_and_one_in_between_that_says_nothing(tmp_path: Path) -> None:
    between = "import engine.platforms.base as b\nclass Middle(b.DeviceMixin):\n    pass\n"
    yes = "    def is_pin_memory_available(self):\n        return True"
    npu = f"from .middle import *\nclass Npu(Middle):\n{yes}\n"
    files = {
        "engine/platforms/base.py": BASE,
        "engine/platforms/middle.py": between,
        "engine/platforms/npu.py": npu,
    }
    ((name, line, _),) = found(tmp_path, files)
    assert (name, line) == ("npu.py", 3)


def test_a_mixin_of_its_own_is_found_where_it_meets_the_base(tmp_path: Path) -> None:
    mixin = "class Fast:\n    def is_pin_memory_available(self, device=None):\n        return True\n"
    both = "from .fast import Fast\nfrom .base import DeviceMixin\nclass Npu(Fast, DeviceMixin):\n    pass\n"
    files = {
        "engine/platforms/base.py": BASE,
        "engine/platforms/fast.py": mixin,
        "engine/platforms/npu.py": both,
    }
    ((name, line, message),) = found(tmp_path, files)
    assert (name, line) == ("npu.py", 3) and "through Fast" in message
    files["engine/platforms/npu.py"] = both.replace("Fast, DeviceMixin", "DeviceMixin, Fast")
    assert found(tmp_path / "safe", files) == []


def test_an_heir_of_an_unsafe_class_is_not_told_again(tmp_path: Path) -> None:
    heir = NPU + "\nclass NPUSRTPlatform(NPUDeviceMixin, DeviceMixin):\n    pass\n"
    assert len(found(tmp_path, {"engine/platforms/base.py": BASE, "engine/platforms/npu.py": heir})) == 1


@pytest.mark.parametrize(
    "evidence",
    [
        NPU.replace(
            "        return True", "        # Evidence: gate of run 2026-11-02, CANN 9.1\n        return True"
        ),
        NPU.replace("    def is_pin", "    # evidence: litmus on 910C, 300 trials\n    def is_pin"),
        NPU.replace("bool:\n", 'bool:\n        """Yes.\n\n        Evidence: gate report 12.\n        """\n'),
        NPU.replace("-> bool:", "-> bool:  # hangrig: allow HG102 -- the fence of #41111 makes it safe"),
    ],
)
def test_a_subclass_that_names_its_evidence_is_accepted(tmp_path: Path, evidence: str) -> None:
    files = {"engine/__init__.py": "", "engine/platforms/base.py": BASE, "engine/platforms/npu.py": evidence}
    assert [one for one in audit(write_tree(tmp_path, files), ["HG102"]) if not one.suppressed] == []


@pytest.mark.parametrize("empty", ["# Evidence:", "# no evidence yet"])
def test_evidence_without_words_is_none(tmp_path: Path, empty: str) -> None:
    npu = NPU.replace("    def is_pin", f"    {empty}\n    def is_pin")
    assert len(found(tmp_path, {"engine/platforms/base.py": BASE, "engine/platforms/npu.py": npu})) == 1


@pytest.mark.parametrize(("device", "told"), [("cuda", 0), ("rocm", 0), ("npu", 1), ("xpu", 1)])
def test_where_the_vendor_documents_it_yes_needs_no_evidence(tmp_path: Path, device: str, told: int) -> None:
    other = NPU.replace('"npu"', f'"{device}"').replace("NPUDeviceMixin", "Device")
    files = {"engine/platforms/base.py": BASE, "engine/platforms/other.py": other}
    assert len(found(tmp_path, files)) == told


def test_a_base_in_another_package_is_found_through_a_reference(tmp_path: Path) -> None:
    write_tree(tmp_path / "host", {"engine/__init__.py": "", "engine/platforms/base.py": BASE})
    plugin = write_tree(tmp_path / "plugin", {"engine_npu/__init__.py": "", "engine_npu/platform.py": NPU})
    assert audit(plugin, ["HG102"]) == []
    (one,) = audit(plugin, ["HG102"], [tmp_path / "host"])
    assert one.path.endswith("engine_npu/platform.py")


def test_sources_below_another_folder_are_found_by_the_end_of_their_names(tmp_path: Path) -> None:
    files = {"python/engine/platforms/base.py": BASE, "python/engine/platforms/npu.py": NPU}
    assert len(audit(write_tree(tmp_path, files), ["HG102"])) == 1


def test_bases_in_a_circle_end(tmp_path: Path) -> None:
    a = NPU.replace("engine.platforms.base", "engine.platforms.b")
    b = "from engine.platforms.a import NPUDeviceMixin\nclass DeviceMixin(NPUDeviceMixin):\n    pass\n"
    assert found(tmp_path, {"engine/platforms/a.py": a, "engine/platforms/b.py": b}) == []
