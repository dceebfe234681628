"""hoist trains language models whose states do not fit in memory: from NVMe, layer by layer, exactly.

This module holds the public names only; see docs/architecture.md for what lies where.
"""

from pathlib import Path as _Path

from hoist._version import __version__

# In a checkout the sub-packages lie beside this folder (setup.cfg maps them into it when it is installed).
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "setup.cfg").is_file() and (_checkout / "tiers" / "py.typed").is_file():
    __path__.append(str(_checkout))

__all__ = ["__version__"]
