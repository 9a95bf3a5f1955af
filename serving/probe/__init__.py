"""The probe that runs inside a foreign engine's processes. To hangrig this folder is data.

``hangrig_probe`` is the package as an engine imports it, ``hangrig_probe-1.dist-info`` what makes its entry points
known; ``serving/targets/probe_path.py`` puts copies of both, and of the ledger's modules, where an engine finds
them. Nothing of hangrig imports the package outside tests.
"""
