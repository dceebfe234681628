"""Type-checks the package and the tests, strictly: ``python -m tests.check_types [MYPY-OPTIONS]``.

mypy cannot follow setup.cfg's mapping of folders to packages, so it is shown a tree that is laid out as an installed
hoist is: links, in `build/types`. The settings are in setup.cfg.
"""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link_packages(tree: Path) -> None:
    """Make ``tree`` anew: the packages of setup.cfg's ``package_dir``, and the tests, each a link to its folder."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pairs = (line.split("=") for line in setup["options"]["package_dir"].strip().splitlines())
    folders = {package.strip(): ROOT / folder.strip() for package, folder in pairs}
    if tree.exists():
        shutil.rmtree(tree)  # removes links, not what they lead to
    (tree / "hoist").mkdir(parents=True)
    for path in folders.pop("hoist").iterdir():
        if path.is_file():
            (tree / "hoist" / path.name).symlink_to(path)
    for package, folder in folders.items():
        (tree / package.replace(".", "/")).symlink_to(folder)
    (tree / "tests").symlink_to(ROOT / "tests")


def main() -> int:
    """Run mypy; returns its exit code."""
    tree = ROOT / "build" / "types"
    link_packages(tree)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "setup.cfg"), "-p", "hoist", "-p", "tests"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), *sys.argv[1:]]
    return subprocess.run(command, cwd=tree).returncode


if __name__ == "__main__":
    sys.exit(main())
