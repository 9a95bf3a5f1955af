"""The scenario files that come with hangrig, found by name. README.md is their catalogue."""
