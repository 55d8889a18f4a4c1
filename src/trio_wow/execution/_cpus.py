"""How many CPUs this process may use."""

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["usable_cpus"]


def usable_cpus(*, _root: Path = Path("/")) -> int:
    """Return the CPUs that this process may use: by its affinity, and by its cgroups' quotas, rounded up.

    A quota that cannot be read, or makes no sense, is none.
    """
    counts = [os.cpu_count(), *_quotas(_root)]
    if hasattr(os, "process_cpu_count"):  # from Python 3.13 on; heeds PYTHON_CPU_COUNT
        counts.append(os.process_cpu_count())
    if hasattr(os, "sched_getaffinity"):
        counts.append(len(os.sched_getaffinity(0)))
    return min(filter(None, counts), default=1)


def _quotas(root: Path) -> Iterator[int]:
    """Give the quotas, in CPUs, of this process's cgroups and of those that they are in."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        group = Path(path.lstrip("/"))  # in a container perhaps the host's path; the container's own group is then "."
        for folder in (group, *group.parents):
            if not controllers:  # version 2
                yield from _cpus(_read(mounts / folder / "cpu.max"))
            elif "cpu" in controllers.split(","):
                for mount in (mounts / "cpu" / folder, mounts / controllers / folder):
                    yield from _cpus(f"{_read(mount / 'cpu.cfs_quota_us')} {_read(mount / 'cpu.cfs_period_us')}")


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _cpus(quota_and_period: str) -> Iterator[int]:
    try:
        quota, period = map(int, quota_and_period.split())
    except ValueError:  # such as "max"
        return
    if quota > 0 and period > 0:
        yield -(-quota // period)
