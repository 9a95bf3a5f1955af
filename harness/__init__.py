"""Runs trials of a distributed LLM engine and finds out why they stop. No engine is imported here."""
