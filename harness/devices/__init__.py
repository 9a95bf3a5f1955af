"""Accelerators behind one protocol: ``base.py`` has the protocol, each other module one device.

Nothing is imported here, so that asking for one device does not load what another needs.
"""
