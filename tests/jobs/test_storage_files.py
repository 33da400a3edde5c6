"""What happens to the files of a study: cut and broken records, full disks, network file systems,
permissions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import StudyError
from autoshard.search.study.journal import Journal
from autoshard.search.study.passwords import without_password
from autoshard.search.study.storage import file_system_of, open_storage
from autoshard.search.study.task_queue import TaskQueue
from tests.jobs.crew import claims_of, evaluations, tasks_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "study.log"


def run(path: Path, count: int) -> dict[str, Any]:
    with TaskQueue(f"journal:{path}", "s", lease_s=1.0) as queue:
        records = queue.run(tasks_of(count, 0.0, path.with_suffix(".evaluations")))
    return {str(task_id): record for task_id, record in records.items()}


def test_a_record_cut_short_at_the_end_is_skipped_and_the_rest_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(path, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[:-17])  # the last result was being written
    assert len(claims_of(f"journal:{path}").results) == 3
    found = run(path, 5)
    assert len(found) == 5
    assert "skipped a broken record" in caplog.text
    assert len(claims_of(f"journal:{path}").results) == 5
    assert sorted(evaluations(path.with_suffix(".evaluations"))) == [0, 1, 2, 3, 3, 4]


@pytest.mark.parametrize(
    "broken", [b"", b"\x00" * 64, b"{", b"[1]", b'{"a": 1}', b"[" * 100_000], ids=range(6)
)
def test_blank_and_broken_lines_in_the_middle_hide_nothing(broken: bytes, path: Path) -> None:
    before = run(path, 4)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], broken, *lines[3:]]))
    assert run(path, 4) == before
    assert evaluations(path.with_suffix(".evaluations")) == [0, 1, 2, 3]


def test_a_full_disk_is_waited_for_and_what_it_cut_is_skipped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(path, 2)
    real, full = os.write, [3]

    def write(file: int, data: bytes) -> int:
        if full[0] and os.fstat(file).st_ino == path.stat().st_ino:
            full[0] -= 1
            return real(file, data[: len(data) // 2])
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    run(path, 4)
    assert not full[0]
    assert len(claims_of(f"journal:{path}").results) == 4
    assert evaluations(path.with_suffix(".evaluations")) == [0, 1, 2, 3]


def test_a_lock_left_by_a_killed_worker_is_broken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.search.study.journal_lock.LOCK_GRACE_S", 0.2)
    journal = Journal(path, 60.0)
    os.symlink(path, f"{path}.lock")
    journal.append_logs([{"op_code": 0, "study_name": "s"}])
    assert [record["study_name"] for record in journal.read_logs(0)] == ["s"]
    assert sorted(os.listdir(path.parent)) == [path.name]


MOUNTS = """
/dev/sda1 / ext4 rw 0 0
server:/export /shared nfs4 rw 0 0
//server/x /smb\\040share cifs rw 0 0
tmpfs /shared/local tmpfs rw 0 0
fs /fast lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/shared/a/x.db", "nfs4"),
        ("/shared/local/x.db", "tmpfs"),
        ("/smb share/x", "cifs"),
        ("/sharedx", "ext4"),
    ],
)
def test_the_file_system_of_a_path(place: str, kind: str) -> None:
    assert file_system_of(Path(place), MOUNTS) == kind


@pytest.mark.parametrize("place", ["/shared/x.db", "/fast/x.db"])
def test_sqlite_on_a_network_file_system_is_refused_with_the_alternative(place: str) -> None:
    with pytest.raises(
        StudyError, match=rf"network file system.*journal:{place.removesuffix('.db')}.log"
    ):
        open_storage(f"sqlite:///{place}", mounts=MOUNTS)


def test_sqlite_elsewhere_works(tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path / 'x.db'}"
    with TaskQueue(where, "s") as queue:
        assert len(queue.run(tasks_of(3, 0.0, tmp_path / "log"))) == 3
    assert (tmp_path / "x.db").stat().st_mode & 0o007 == 0


def test_a_journal_is_not_open_to_others(path: Path) -> None:
    before = os.umask(0)
    try:
        Journal(path, 60.0)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:pa%40ss@host/db", "could not connect to 'postgresql+psycopg://me:pa%40ss@host:5/db?x=1'",
        "host=h password=pa%40ss user=me", "mysql://me@host/db?password=pa%40ss&ssl=1", "SSLPASSWORD=pa%40ss",
    ],
)  # fmt: skip
def test_passwords_are_cut_out(text: str) -> None:
    assert "pa%40ss" not in without_password(text)
    assert "***" in without_password(text)


@pytest.mark.parametrize(
    "where", ["http://x", "grpc://host", "grpc://host:port", "postgres", "sqlite+x://", "redis://h"]
)
def test_odd_storages_are_clear_errors_or_files(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "://" not in where:
        open_storage(where)
        assert (tmp_path / where).exists()
        return
    with pytest.raises(StudyError, match="Write"):
        open_storage(where, patience_s=1)
