"""Checks of our code against facts that live elsewhere, run by hand or in a job of their own (Makefile)."""
