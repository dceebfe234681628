"""What `hoist bench` measures, one file a command, and what they share; and benchmarks for hoist's developers.

The latter say so in their first line and are run as `python -m hoist.tools.bench.NAME`. docs/architecture.md lists all.
"""
