"""The model that a foreign engine is pointed at: a preset written as a Hugging Face directory, or the user's own.

Not here: the shapes of presets (``serving.model_config``), the flags that name a model (the dialects).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.model_config import CONFIG_FILE, preset

DEFAULT_PRESET = "small"
_WRITTEN = ("tiny", "small")
"""Presets whose weights are written out, of the scenario's seed: the same in every engine and however its ranks are
arranged, so that tokens can be compared, and without the loops of two tokens that an engine's own dummy weights
give, which would hide a damaged cache. Larger ones are the engine's own dummies."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_VOCABULARY = 1024
"""Of a model whose config is not on this machine: prompts use only ids that every published language model has."""


class ModelMissing(ValueError):
    """A model directory that an engine could not read. The message says what to do."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """``path``: a directory, or a name that the engine resolves. ``dummy``: no weights are there.
    ``vocab_size``: prompts use the ids below it."""

    path: str
    dummy: bool
    vocab_size: int


def find_model(model: Mapping[str, Any], folder: Path) -> EngineModel:
    """What ``model`` (a scenario's table) names. A preset will lie in ``folder``, once ``write_model`` has put it
    there. Raises ModelMissing, or ModelError for a preset that does not exist."""
    directory = model.get("directory")
    if not directory:
        name = model.get("preset") or DEFAULT_PRESET
        return EngineModel(str(folder), name not in _WRITTEN, preset(name).vocab_size)
    path = Path(directory).expanduser()
    if not path.is_dir():
        if path.is_absolute() or directory.startswith((".", "~")):
            raise ModelMissing(f"model.directory: {path} is no directory; give one that holds {CONFIG_FILE}")
        return EngineModel(directory, False, _VOCABULARY)
    has_weights = any(next(path.glob(pattern), None) is not None for pattern in _WEIGHTS)
    return EngineModel(str(path.resolve()), not has_weights, _vocab_size(path / CONFIG_FILE))


def write_model(model: Mapping[str, Any], folder: Path) -> EngineModel:
    """As `find_model`; a preset's files are written. Raises OSError too, where they cannot be."""
    found = find_model(model, folder)
    if model.get("directory"):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    config = preset(model.get("preset") or DEFAULT_PRESET)
    (folder / CONFIG_FILE).write_text(json.dumps(config.to_json(), indent=1))
    if not found.dummy:
        # Here, since both load torch, which nobody else in a launcher needs.
        from safetensors.torch import save_file

        from serving.weights import SINGLE_FILE, random_weights

        weights = dict(random_weights(config, model.get("seed") or 0))
        save_file(weights, folder / SINGLE_FILE, metadata={"format": "pt"})
    return found


def _vocab_size(path: Path) -> int:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelMissing(f"{path}: {error}; a model directory needs a readable {CONFIG_FILE}") from None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else _VOCABULARY
