"""Verdicts for people and machines, from a stored run. ``write_all`` is the way in."""

from reports.model import Result
from reports.write import write_all

__all__ = ["Result", "write_all"]
