"""What the tests with real engines need: their environments, a model to serve, what their packages lack on a CPU.

Not here: the targets (``serving/targets``) and the tests themselves (``tests/test_engine_*.py``).
"""
