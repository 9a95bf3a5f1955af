"""Puts the probe where a foreign engine finds it: one folder, to be first on the engine's PYTHONPATH.

It holds the package ``hangrig_probe`` with its metadata, and of hangrig itself only the ledger: the engine's own
Python has none of hangrig's dependencies. Not here: the configuration, and the variable that turns the probe on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import harness
from serving import probe

PACKAGE = "hangrig_probe"
METADATA = "hangrig_probe-1.dist-info"
_HARNESS = '''"""Of hangrig's harness, the ledger: what its probe needs inside a foreign engine."""
'''


def assemble(folder: Path) -> None:
    """Makes ``folder`` anew. Raises OSError when it cannot be written."""
    ours = Path(probe.__file__).parent
    shutil.rmtree(folder, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ours / PACKAGE, folder / PACKAGE, ignore=skip)
    shutil.copytree(ours / METADATA, folder / METADATA)
    ledger = folder / "harness"
    ledger.mkdir()
    (ledger / "__init__.py").write_text(_HARNESS)
    for module in sorted(Path(harness.__file__).parent.glob("ledger*.py")):
        shutil.copy(module, ledger)
