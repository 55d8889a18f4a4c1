"""How many CPUs this process may use: affinity, and the quotas of its cgroups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trio_wow.execution._cpus import usable_cpus

V1 = {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight CPUs, all for this process."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 8, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(root: Path, cgroup: str, quotas: dict[str, str]) -> None:
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in quotas.items()}}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("cgroup", "quotas", "expected"),
    [
        pytest.param("0::/\n", {}, 8, id="no quota"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n"}, 3, id="version 2"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 2, id="rounded up"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "1000 100000\n"}, 1, id="less than one"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "9900000 100000\n"}, 8, id="more than there are"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "4 1\n"}, 4, id="of an ancestor"),
        pytest.param(
            "0::/a/b\n", {"a/b/cpu.max": "5 1\n", "a/cpu.max": "6 1\n", "cpu.max": "7 1"}, 5, id="least of all"
        ),
        pytest.param("0::/a\n", {"b/cpu.max": "1 1\n"}, 8, id="of another group"),
        pytest.param(
            "0::/docker/a\n", {"cpu.max": "2 1\n"}, 2, id="version 2 in a container that sees the host's path"
        ),
        pytest.param("4:cpu,cpuacct:/\n", V1, 3, id="version 1"),
        pytest.param("4:cpu,cpuacct:/docker/a\n", V1, 3, id="version 1 in a container that sees the host's path"),
        pytest.param(
            "5:memory:/b\n4:cpuacct,cpu:/a/b\n0::/c\n",
            {"cpuacct,cpu/a/cpu.cfs_quota_us": "2\n", "cpuacct,cpu/a/cpu.cfs_period_us": "1\n"},
            2,
            id="version 1 without a link, an ancestor, among others",
        ),
        pytest.param("4:cpu:/\n", {**V1, "cpu/cpu.cfs_quota_us": "-1\n"}, 8, id="version 1 without a limit"),
        pytest.param("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000\n"}, 8, id="version 1 without a period"),
        pytest.param("4:cpuset:/\n", V1, 8, id="version 1 of other controllers"),
        pytest.param("0::/a\n", {"a/cpu.max": "100000 0\n"}, 8, id="no period"),
        pytest.param("0::/a\n", {"a/cpu.max": "0 100000\n"}, 8, id="zero"),
        pytest.param("0::/a\n", {"a/cpu.max": "-5 100000\n"}, 8, id="negative"),
        pytest.param("0::/a\n", {"a/cpu.max": "nan 1.5\n"}, 8, id="no integers"),
        pytest.param("0::/a\n", {"a/cpu.max": "100000\n"}, 8, id="one number"),
        pytest.param("0::/a\n", {"a/cpu.max": ""}, 8, id="empty"),
        pytest.param("0::/a\n", {"a/cpu.max/file": ""}, 8, id="a folder"),
        pytest.param("0::/a\0b\nnonsense\n\n", {"a/cpu.max": "1 1\n"}, 8, id="a malformed list"),
    ],
)
def test_quotas(cgroup: str, quotas: dict[str, str], expected: int, tmp_path: Path) -> None:
    write(tmp_path, cgroup, quotas)
    assert usable_cpus(_root=tmp_path) == expected


@pytest.mark.usefixtures("eight")
def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    write(tmp_path, "0::/\n", {})
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff 1\n")
    assert usable_cpus(_root=tmp_path) == 8


@pytest.mark.usefixtures("eight")
def test_where_there_is_nothing_to_read_the_least_count_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cpus(_root=tmp_path) == 6
    monkeypatch.setattr(os, "process_cpu_count", lambda: None, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus(_root=tmp_path) == 8
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cpus(_root=tmp_path) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_the_affinity_of_a_real_process() -> None:
    script = """
import os
from trio_wow.execution._cpus import usable_cpus

assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0)), usable_cpus()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
assert usable_cpus() == 1, usable_cpus()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
