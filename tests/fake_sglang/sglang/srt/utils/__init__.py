"""Everything of ``common``, as there."""

from .common import *  # noqa: F403
