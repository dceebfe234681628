"""Stores with what runs leave in them: of a real short run, and of a long one over many stages, made up by rule.

What the files mean is said in `scheduler/status.py` and docs/status.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.support.commands import Job, process_arguments  # noqa: F401
