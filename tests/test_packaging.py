"""What a user installs: the wheel's content and metadata, the command, the public names, and the pinned versions."""

from __future__ import annotations

import email
import email.message
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import hoist
from tests.check_types import ROOT
from tests.support.groups import memory_controller

#: Package and its folder, as setup.cfg maps them.
FOLDERS = {
    "hoist": ROOT / "hoist",
    "hoist/tiers": ROOT / "tiers",
    "hoist/scheduler": ROOT / "scheduler",
    "hoist/optim": ROOT / "optim",
    "hoist/tools": ROOT / "tools",
}


def _setup() -> ConfigParser:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def copy_checkout(target: Path) -> Path:
    """The project's own files, without what builds, tests and runs leave behind."""
    left = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info", "hoist-store*")
    shutil.copytree(ROOT, target, ignore=left)
    return target


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_checkout(folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def _metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


class TestWheel:
    def test_holds_every_module_and_nothing_else(self, wheel: zipfile.ZipFile) -> None:
        expected = {"hoist/py.typed", *(f"{package}/py.typed" for package in FOLDERS)}
        for package, folder in FOLDERS.items():
            # sub-packages that have a line of their own in FOLDERS lie elsewhere: folders never overlap
            expected |= {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert found == expected

    def test_modules_are_the_checkouts(self, wheel: zipfile.ZipFile) -> None:
        for package, folder in FOLDERS.items():
            for path in folder.rglob("*.py"):
                name = f"{package}/{path.relative_to(folder).as_posix()}"
                assert wheel.read(name) == path.read_bytes(), name

    def test_needs_no_compiler(self, wheel: zipfile.ZipFile) -> None:
        assert wheel.filename is not None
        assert wheel.filename.endswith("-py3-none-any.whl")

    def test_metadata(self, wheel: zipfile.ZipFile) -> None:
        metadata = _metadata(wheel)
        assert metadata["Name"] == "hoist-engine"
        assert metadata["Version"] == hoist.__version__
        assert metadata["Requires-Python"] == ">=3.11"
        assert metadata["License-Expression"] == "Apache-2.0"
        assert set(metadata.get_all("Provides-Extra", [])) == {
            "bench", "data", "dev", "gds", "gds-cu13", "gguf", "lora", "report", "tensorboard", "test",
        }  # fmt: skip
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
        plain = {
            re.split(r"[<>=!~ ;\[]", requirement, maxsplit=1)[0]
            for requirement in metadata.get_all("Requires-Dist", [])
            if "extra ==" not in requirement
        }
        assert plain == {
            "google-crc32c", "numpy", "psutil", "rich", "safetensors", "torch", "transformers", "typer", "zarr",
        }  # fmt: skip

    def test_runs_from_anywhere(self, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
        """The unpacked wheel, in front of whatever else is installed."""
        packages = tmp_path / "packages"
        wheel.extractall(packages)
        (point,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert "hoist = hoist.tools.cli:main" in wheel.read(point).decode()
        program = (
            "import hoist, hoist.tiers.layout, sys\n"
            "from hoist.tools.cli import main\n"
            "print(hoist.__file__, hoist.tiers.layout.__file__)\n"
            "sys.argv = ['hoist', '--help']\n"
            "main()\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(packages), "COLUMNS": "120", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        first, help_text = ran.stdout.split("\n", 1)
        assert first == f"{packages}/hoist/__init__.py {packages}/hoist/tiers/layout.py"
        for command in ("train", "export", "doctor"):
            assert command in help_text


class TestPublicNames:
    def test_each_is_there_and_documented(self) -> None:
        for name in hoist.__all__:
            assert getattr(hoist, name).__doc__, name

    def test_the_three_lists_agree(self) -> None:
        assert [*hoist._HOMES] == [name for name in hoist.__all__ if name != "__version__"]
        for name, home in hoist._HOMES.items():
            assert getattr(hoist, name) is getattr(importlib.import_module(home), name)
        assert set(hoist.__all__) <= set(dir(hoist))

    def test_importing_hoist_loads_nothing_heavy(self, tmp_path: Path) -> None:
        program = "import hoist, sys; print({'torch', 'transformers', 'zarr'} & set(sys.modules))"
        ran = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == "set()"

    def test_an_unknown_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'trainer_of_everything'"):
            getattr(hoist, "trainer_of_" + "everything")

    def test_tests_run_on_this_checkout(self) -> None:
        """One hoist, one place: a module that is loaded twice would have two of every class."""
        modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "hoist"}
        for name, module in modules.items():
            assert module.__file__ is not None
            assert Path(module.__file__).resolve().is_relative_to(ROOT), name
        top_levels = {folder.name for folder in FOLDERS.values()} - {"hoist"}
        assert not top_levels & set(sys.modules)


class TestSetup:
    def test_every_package_is_listed(self) -> None:
        """setuptools must be told: it finds no packages in this layout, and must not pick up tests."""
        listed = set(_setup()["options"]["packages"].split())
        found = {
            package.replace("/", ".") + "".join(f".{part}" for part in path.parent.relative_to(folder).parts)
            for package, folder in FOLDERS.items()
            for path in folder.rglob("*.py")
        }
        assert listed == found

    def test_constraints_pin_what_is_required(self) -> None:
        pins = {}
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            name, version = line.split("==")
            assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{line}: one exact public version"
            pins[name.lower().replace("_", "-")] = version
        options = _setup()["options"]
        extras = _setup()["options.extras_require"]
        required = options["install_requires"].split("\n")
        for extra in ("gds", "data", "lora", "gguf", "report", "test", "dev"):
            required += extras[extra].split("\n")
        names = {re.split(r"[<>=;%]", line, maxsplit=1)[0].strip() for line in required} - {""}
        assert names <= set(pins)
        assert pins["torch"] == "2.13.0"

    def test_pyproject_only_builds_and_lints(self) -> None:
        document = tomllib.loads((ROOT / "pyproject.toml").read_text())
        assert set(document) == {"build-system", "tool"}
        assert set(document["tool"]) == {"ruff"}

    @pytest.mark.skipif("CI" not in os.environ, reason="CI alone must have everything")
    def test_ci_has_what_tests_would_skip_without(self) -> None:
        assert importlib.util.find_spec("kvikio") is not None
        assert shutil.which("gcc") is not None
        assert shutil.which("chromium") is not None
        assert importlib.util.find_spec("playwright") is not None
        assert os.geteuid() == 0
        assert memory_controller() is not None
