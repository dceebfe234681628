"""`hoist inspect --svg`: the view as a picture, as a terminal of a given width would show it.

What is in it is `view.py`'s business. The file needs nothing from the network: no fonts are fetched.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from hoist.tools.inspection.looking import Inspection
from hoist.tools.inspection.view import render

#: Columns of a picture.
WIDTH = 110


def write_picture(found: Inspection, path: Path, *, every: bool = False, width: int = WIDTH) -> None:
    """Write the view as SVG, over a file that may be there. Raises OSError."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in render(found, width=width, every=every):
        console.print(line, soft_wrap=True)
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    title = f"hoist inspect {found.view.directory.name}"
    svg = console.export_svg(title=title, code_format=without_fonts, unique_id="hoist")
    path.write_text(svg.replace("Fira Code", "ui-monospace"), encoding="utf-8")
