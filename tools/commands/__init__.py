"""One file a command, for `hoist bench` one a benchmark: what it takes, and how its result is printed.

`hoist.tools.cli` puts them together.
"""
