"""Limits of control groups, read from folders like the kernel's."""

from __future__ import annotations

from pathlib import Path

from hoist.tiers.cgroups import cgroup_free_bytes, cgroup_limit_bytes


def test_the_tightest_cgroup_limits(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    assert cgroup_limit_bytes(membership, root) is None
    membership.write_text("0::/a/b\n")
    assert cgroup_limit_bytes(membership, root) is None
    (inner / "memory.max").write_text("max\n")
    assert cgroup_limit_bytes(membership, root) is None
    (root / "a" / "memory.max").write_text("1000\n")
    assert cgroup_limit_bytes(membership, root) == 1000
    (inner / "memory.max").write_text("2000\n")
    assert cgroup_limit_bytes(membership, root) == 1000
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    (root / "memory" / "job").mkdir(parents=True)
    (root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (root / "memory" / "job" / "memory.limit_in_bytes").write_text("3000\n")
    assert cgroup_limit_bytes(membership, root) == 3000


def test_what_the_tightest_group_leaves(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    assert cgroup_free_bytes(membership, root) is None
    (inner / "memory.max").write_text("1000\n")
    assert cgroup_free_bytes(membership, root) is None  # what is used is not told
    (inner / "memory.current").write_text("700\n")
    assert cgroup_free_bytes(membership, root) == 300
    (inner / "memory.stat").write_text("anon 500\ninactive_file 200\nactive_file 0\n")
    assert cgroup_free_bytes(membership, root) == 500
    (root / "a" / "memory.max").write_text("2000\n")
    (root / "a" / "memory.current").write_text("1900\n")
    assert cgroup_free_bytes(membership, root) == 100  # a bigger limit that more have used up
    (root / "a" / "memory.current").write_text("2100\n")
    assert cgroup_free_bytes(membership, root) == 0


def test_what_a_group_of_version_1_leaves(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("4:memory:/job\n")
    group = root / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("3000\n")
    (group / "memory.usage_in_bytes").write_text("2500\n")
    (group / "memory.stat").write_text("cache 900\ntotal_inactive_file 600\n")
    assert cgroup_free_bytes(membership, root) == 1100
