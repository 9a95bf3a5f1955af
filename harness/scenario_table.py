"""What all tables of a scenario file have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """No key that it does not know, no change once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
