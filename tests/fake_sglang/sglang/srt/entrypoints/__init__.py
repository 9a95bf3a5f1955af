"""See the package above."""
