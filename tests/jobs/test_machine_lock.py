"""The lock by which one worker at a time measures lies where nobody else can put anything."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autoshard.errors import StudyError
from autoshard.search.study.machine_lock import MachineLock, runtime_folder
from tests.jobs.crew import ROOT


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a runtime folder: its folder for temporary files is this one."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    nobody = os.geteuid() + 77_000
    monkeypatch.setattr(os, "geteuid", lambda: nobody)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return shared / f"autoshard-{nobody}"


def test_the_runtime_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    lock = MachineLock()
    assert lock.take()
    (file,) = tmp_path.iterdir()
    assert lock.path == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    script = (
        "from autoshard.search.study.machine_lock import MachineLock; print(MachineLock().take())"
    )
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == "False\n"
    lock.release()
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == "True\n"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_runtime_folder_that_others_may_use_is_passed_over(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder() != tmp_path
    tmp_path.chmod(0o700)
    assert runtime_folder() == tmp_path
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(link))
    assert runtime_folder() != link


def test_a_folder_of_the_users_own_among_the_temporary_files(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = MachineLock()
    monkeypatch.undo()  # the folder is made as this user again
    lock.path = alone / "lock"
    assert lock.take()
    assert stat.S_IMODE(alone.stat().st_mode) == 0o700
    lock.release()


def test_what_somebody_else_put_there_is_refused(alone: Path) -> None:
    alone.mkdir(mode=0o700)
    with pytest.raises(
        StudyError, match=r"belongs to user \d+\. Remove it, or set XDG_RUNTIME_DIR"
    ):
        MachineLock().take()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder, other = tmp_path / "own", tmp_path / "other"
    folder.mkdir(mode=0o700)
    other.write_text("another's")
    (folder / "lock").symlink_to(other)
    with pytest.raises(StudyError, match="cannot be used"):
        MachineLock(folder / "lock").take()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(StudyError, match="perhaps a link"):
        MachineLock(tmp_path / "link" / "file").take()


def test_a_file_that_others_may_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    (folder / "lock").chmod(0o666)
    with pytest.raises(StudyError, match=r"others may use it \(mode 0666\)"):
        MachineLock(folder / "lock").take()
    (folder / "folder").mkdir()
    with pytest.raises(StudyError, match="cannot be used"):
        MachineLock(folder / "folder").take()
