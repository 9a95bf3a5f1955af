"""Litmus tests of a device: small stream programs, run many times under stress, and what came out of each."""
