"""What a benchmark raises when it cannot measure. Nothing else is here: it is imported by processes that must stay
small."""


class BenchError(RuntimeError):
    """A rank or another process failed or did not answer. The message has what it said."""
