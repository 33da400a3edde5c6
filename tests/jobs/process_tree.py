"""Which processes there are below one, from /proc."""

from __future__ import annotations

from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Processes below one, zombies left out."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(status.parent.name)] = int(fields[1])
    found, below = [], [pid]
    while below:
        below = [child for child, parent in parents.items() if parent in below]
        found += below
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    """The command line of a process; "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
