"""The parts of `python -m hoist.tools.bench.gpu`: what is tried and measured on a device with memory of its own."""
