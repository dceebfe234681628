"""One file a command: what it takes, and how its result is printed. `hoist.tools.cli` puts them together."""
