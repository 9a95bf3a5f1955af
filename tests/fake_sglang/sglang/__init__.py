"""A package shaped like SGLang where the probe hooks it, for tests of the probe without the engine.

Here: the names, calls and order of calls of 0.5.20 and 0.5.23 (which one: the environment variable FAKE_SGLANG).
Not here: what an engine does in between. Each scheduler follows a script and takes part in real collectives.
"""
