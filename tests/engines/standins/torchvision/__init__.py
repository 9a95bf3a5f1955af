"""Stand-in for torchvision: no build of it fits this torch. transformers reads its version from the metadata."""

from hangrig_standin import stand_in

__version__ = "0.28.0+standin"

stand_in(__name__)
