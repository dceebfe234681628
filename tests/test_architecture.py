"""The shape of the code, checked on its syntax trees: imports go one way, __init__ files only re-export."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: What each package may import of the others.
ALLOWED = {
    "optim": set[str](),
    "tiers": set[str](),
    "scheduler": {"tiers", "optim"},
    "tools": {"scheduler", "tiers", "optim"},
}
MODULES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 30


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    packages = {name.split(".")[1] for name in imported(path) if name.startswith("hoist.")}
    wrong = packages & ALLOWED.keys() - ALLOWED[package] - {package}
    assert not wrong, f"{relative(path)} imports {wrong}; not allowed in {package}"


@pytest.mark.parametrize("package", ["tiers", "optim"])
def test_tiers_and_optim_know_nothing_of_models(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not [name for name in imported(path) if name.split(".")[0] == "transformers"], relative(path)


#: Modules of `scheduler/` that write, order, link and price a plan.
PURE = ("activation_slots", "link", "ops", "plan", "plan_builder", "plan_records", "simulate", "visits")


@pytest.mark.parametrize("name", PURE)
def test_plans_are_pure(name: str) -> None:
    """They import no torch, no os, no threads: nothing but what data and arithmetic need, and each other."""
    allowed = {"__future__", "collections", "dataclasses", "enum", "heapq", "typing"}
    outside = {other for other in imported(ROOT / "scheduler" / f"{name}.py") if other.split(".")[0] not in allowed}
    assert all(other.startswith(tuple(f"hoist.scheduler.{one}" for one in PURE)) for other in outside)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_nothing_pins_or_pickles_tensors_one_by_one(path: Path) -> None:
    """torch's pinned allocator rounds each up to a power of two, and a pickle runs what is in it."""
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert not [name for name in called if name.endswith(".pin_memory")], relative(path)
    assert not called & {"torch.save", "torch.load", "pickle.dump", "pickle.dumps"}, relative(path)


@pytest.mark.parametrize("path", [path for path in MODULES if path.name == "__init__.py"], ids=relative)
def test_init_files_only_re_export(path: Path) -> None:
    """A docstring, imports from the package itself, and an ``__all__`` of exactly these names."""
    package = ".".join(("hoist", *path.parent.relative_to(ROOT).parts))
    body = ast.parse(path.read_text()).body
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)
    names: list[str] = []
    listed: list[str] = []
    for node in body[1:]:
        if isinstance(node, ast.ImportFrom):
            assert node.module == "__future__" or str(node.module).startswith(package)
            names += [alias.asname or alias.name for alias in node.names if node.module != "__future__"]
        else:
            assert isinstance(node, ast.Assign), f"{relative(path)}: line {node.lineno} is no import"
            assert [ast.unparse(target) for target in node.targets] == ["__all__"]
            listed = ast.literal_eval(node.value)
    assert len(listed) == len(set(listed))  # their order is ruff's business (RUF022)
    assert set(listed) == set(names)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{relative(path)} has no docstring"
