"""The model that the tests serve with real engines: the preset ``small`` of the built-in one, weights from a seed.

With these weights and float32 every engine gives the same tokens, whatever its parallelism and whether it
retracts. Dummy weights (``--load-format dummy``) give loops of two tokens, which hide a corrupted cache.
Not here: the preset (``serving/model_config.py``), the values of the weights (``serving/weights.py``).
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from serving.model_config import CONFIG_FILE, preset
from serving.weights import SINGLE_FILE, random_weights

PRESET = "small"


def write_model(folder: Path, seed: int = 1) -> Path:
    """Makes ``folder`` a Hugging Face model directory (9 MB) that SGLang and vLLM load. Returns it."""
    config = preset(PRESET)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")
    save_file(dict(random_weights(config, seed)), folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder
