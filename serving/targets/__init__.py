"""Engines as targets of the harness; the only place in ``serving`` that sees ``harness.target``."""
