"""Stand-in for SGLang's compiled kernels (distribution sglang-kernel): no build of them fits this environment."""

from hangrig_standin import stand_in

stand_in(__name__)
