"""What is measured: one file a comparison, run as `python -m hoist.tools.bench.step`, and what they share."""
