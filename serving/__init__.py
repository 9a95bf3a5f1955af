"""The built-in engine that is stressed: DeepSeek-V2 with DP attention. A map of its rooms is in README.md."""
