"""The version, alone, so that setup.cfg can read it without importing torch."""

__version__ = "0.1.0"
