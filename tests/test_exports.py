"""What is public: the names behind each door, as they were last agreed on.

After a change on purpose, write the snapshot anew and review its difference: `python tests/test_exports.py`.
"""

import importlib
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import trio_wow

SNAPSHOT = Path(__file__).with_name("exports.txt")
SOURCE = Path(trio_wow.__file__).parent
# The package, its rooms and the rooms in those; nothing behind an underscore.
FOLDERS = [path.parent.relative_to(SOURCE).parts for path in SOURCE.rglob("__init__.py")]
ROOMS = sorted(".".join(("trio_wow", *parts)) for parts in FOLDERS if parts and not any(p[0] == "_" for p in parts))
DOORS = ["trio_wow", *ROOMS, "trio_wow.errors"]


def public_names(door: str) -> list[str]:
    return sorted(getattr(importlib.import_module(door), "__all__", ()))


def snapshot() -> str:
    return "\n".join(line for door in DOORS for line in (door, *(f"    {name}" for name in public_names(door)))) + "\n"


def test_the_public_names_are_those_of_the_snapshot() -> None:
    assert snapshot() == SNAPSHOT.read_text(), "meant? then run: python tests/test_exports.py"


@pytest.mark.parametrize("door", DOORS)
def test_what_a_door_lists_is_there_once(door: str) -> None:
    module, names = importlib.import_module(door), public_names(door)
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


def test_every_name_has_one_home() -> None:
    homes = defaultdict(list)
    for door in DOORS[1:]:
        for name in public_names(door):
            homes[name].append(door)
    assert {name: doors for name, doors in homes.items() if len(doors) > 1} == {}
    # What the package itself exports is the very thing that its room exports.
    for name in public_names("trio_wow"):
        (home,) = homes[name]
        assert getattr(trio_wow, name) is getattr(importlib.import_module(home), name)


@pytest.mark.parametrize("door", DOORS[1:])
def test_what_a_room_exports_is_made_in_it(door: str) -> None:
    module = importlib.import_module(door)
    for name in public_names(door):
        made_in = getattr(getattr(module, name), "__module__", door)
        assert f"{made_in}.".startswith(f"{door}."), f"{door}.{name} is from {made_in}"


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
    sys.stdout.write(f"wrote {SNAPSHOT}\n")
