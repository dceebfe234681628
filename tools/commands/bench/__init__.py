"""`hoist bench`: a file for what each benchmark takes; `measuring.py` has what they share, `app.py` puts them together.

What they do is in `hoist.tools.bench`.
"""

from __future__ import annotations

from hoist.tools.commands.bench.app import app

__all__ = ["app"]
