"""Opens the storage of a study: a journal file, a database, or Optuna's gRPC proxy.

A storage that is away for a while is waited for. Passwords are cut out of every message.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import optuna
from optuna.exceptions import DuplicatedStudyError, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection

from autoshard.errors import ExtraError, StorageAwayError, StudyError
from autoshard.search.study.journal import FILE_MODE, Journal, SharedJournalStorage
from autoshard.search.study.passwords import (
    check_readable,
    remember_password,
    without_password,
)

log = logging.getLogger("autoshard.jobs")

PATIENCE_S = 600.0
"""How long a storage may be away before a worker gives up. Chosen by hand: restarts of database
servers take minutes at most; tests set their own."""

FIRST_PAUSE_S = 0.1
"""Before a storage that is away is asked again; doubled each time. Chosen by hand."""

LONGEST_PAUSE_S = 5.0
"""Between two tries, at the longest. Chosen by hand: a worker is back soon after its storage is."""

REASON_CHARS = 300
"""What a server says is cut here in messages: drivers add the statement that failed. Chosen by
hand; no test depends on it."""

HOPELESS = re.compile(
    r"authentication failed|no password supplied|(?:database|role) .* does not exist|"
    r"readonly database"
)
"""What says the same later (PostgreSQL's words, and SQLite's)."""

REFUSALS = frozenset(
    {
        errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR,
        errno.ELOOP, errno.ENAMETOOLONG,
    }
)  # fmt: skip
"""Errors of a file system that asking again does not change."""

FORMS = (
    "journal:/shared/study.log, sqlite:///study.db, postgresql://user@host/database or "
    "grpc://host:port"
)

NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs|cifs|smb|lustre|gpfs|ceph|beegfs|afs|9p|glusterfs|panfs|orangefs|pvfs|"
    r"fuse\.(sshfs|glusterfs|ceph|s3fs|juicefs)"
)
"""Types in /proc/mounts on which the locks that SQLite relies on are broken or missing
(sqlite.org/faq.html#q5)."""

_NO_TABLE = re.compile(r"version_info\b.* (does not|doesn't) exist|no such table: version_info")
"""Optuna's first table is missing (PostgreSQL's and MySQL's words, and SQLite's)."""

_T = TypeVar("_T")


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that a path is on, as Linux names it; "" where that cannot be said.

    Args:
        path: Need not exist.
        mounts: Text of /proc/mounts; by default this machine's.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    place, longest, kind = str(path.resolve()), "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest):  # of two at one point, the later hides the other
            longest, kind = point, fields[2]
    return kind


def open_storage(
    where: str,
    *,
    patience_s: float = PATIENCE_S,
    mounts: str | None = None,
    read_only: bool = False,
) -> BaseStorage:
    """Connects to a storage, and waits for it while it is away.

    Args:
        where: A journal file (`journal:PATH` or a plain path), `sqlite:///x.db`,
            `postgresql://...`, `mysql://...`, or `grpc://host:port`.
        patience_s: How long to wait.
        mounts: Text of /proc/mounts; by default this machine's.
        read_only: Create neither files nor tables.

    Raises:
        StorageAwayError: If it cannot be reached.
        StudyError: If it is of no such form, is not there to be read, cannot be written, is SQLite
            on a network file system, or what of it is the password cannot be told.
        ExtraError: If the driver of the database is not installed.
    """
    remember_password(where)
    check_readable(where)
    scheme = where.split("://", 1)[0] if "://" in where else ""
    if scheme == "grpc":
        return _open_proxy(where, patience_s)
    if not scheme or scheme == "journal":
        path = where.removeprefix("journal://").removeprefix("journal:")
        return _open_journal(Path(path), patience_s, read_only=read_only)
    if scheme.startswith("sqlite"):
        _check_sqlite(where, mounts, read_only=read_only)
    elif not scheme.startswith(("postgresql", "mysql")):
        raise StudyError(f"storage {without_password(where)!r} has no known form. Write {FORMS}.")
    return _open_database(where, scheme, patience_s, read_only=read_only)


def _open_database(where: str, scheme: str, patience_s: float, *, read_only: bool) -> BaseStorage:
    from sqlalchemy.exc import ArgumentError as UrlError  # slow to import, and no journal needs it

    shown = without_password(where)
    if scheme == "postgresql":  # SQLAlchemy's default for it is psycopg2, which is another package
        where = where.replace("postgresql://", "postgresql+psycopg://", 1)
    try:
        return patiently(
            lambda: _connected(where, read_only=read_only), patience_s, f"storage {shown}"
        )
    except ImportError as error:
        raise ExtraError(
            f"no driver for {scheme}: {without_password(str(error))}. "
            f"Run: pip install 'autoshard[postgres]'."
        ) from None
    except StudyError:
        raise
    except (ValueError, UrlError) as error:
        raise StudyError(
            f"storage {shown!r}: {without_password(str(error))}. Write {FORMS}."
        ) from None


def _open_proxy(where: str, patience_s: float) -> BaseStorage:
    parts = urlsplit(where)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path.strip("/"):
        raise StudyError(
            f"storage {without_password(where)!r} has no host and port. Write grpc://host:port."
        )
    try:
        proxy = optuna.storages.GrpcStorageProxy(host=host, port=port)
    except ImportError as error:
        raise ExtraError(f"no gRPC here: {error}. Run: pip install grpcio protobuf.") from None
    patiently(proxy.get_all_studies, patience_s, f"storage {without_password(where)}")
    return proxy


def _connected(where: str, *, read_only: bool) -> BaseStorage:
    """A database; where it is only to be read its tables must be there."""
    if not read_only:
        return optuna.storages.get_storage(where)
    try:
        return optuna.storages.get_storage(RDBStorage(where, skip_table_creation=True))
    except StorageInternalError as error:
        if not _NO_TABLE.search(str(error)):
            raise
        raise StudyError(f"{without_password(where)} has no studies; check its name.") from None


def _open_journal(path: Path, patience_s: float, *, read_only: bool) -> BaseStorage:
    try:
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(
            f"the journal {path} cannot be made: {error.strerror}. Name a directory you may write."
        ) from None
    if path.is_dir():
        raise StudyError(
            f"the journal {path} is a directory. Name a file, such as {path / 'study.log'}."
        )
    if read_only and not path.exists():
        raise StudyError(f"there is no journal {path}; check its name.")
    path = path.resolve()
    return patiently(
        lambda: SharedJournalStorage(Journal(path, patience_s, read_only=read_only)),
        patience_s,
        f"journal {path}",
    )


def resolved(where: str) -> str:
    """The same storage under a name that does not depend on the working directory."""
    scheme, separator, text = where.partition(":///")
    if separator and scheme.startswith("sqlite") and text and not text.startswith(":memory:"):
        path, mark, query = text.partition("?")
        return f"{scheme}:///{Path(path).absolute()}{mark}{query}"
    if "://" in where.removeprefix("journal://"):
        return where
    path = where.removeprefix("journal://").removeprefix("journal:")
    return f"journal:{Path(path).resolve()}"


def _check_sqlite(where: str, mounts: str | None, *, read_only: bool) -> None:
    _, _, text = where.partition(":///")
    path = Path(text.split("?")[0])
    if not text or text.startswith(":memory:"):
        return
    kind = file_system_of(path, mounts)
    if NETWORK_FILE_SYSTEMS.match(kind):
        raise StudyError(
            f"{without_password(where)} is on a network file system ({kind}), where SQLite's locks "
            f"do not work and the study would be damaged. Use journal:{path.with_suffix('.log')}, "
            f"which is made for that, or postgresql://."
        )
    if read_only:
        if not path.exists():
            raise StudyError(f"there is no database {path}; check its name.")
    elif path.parent.is_dir() and not path.exists():  # SQLite itself would leave it open to others
        os.close(os.open(path, os.O_CREAT, FILE_MODE))


def is_away(error: BaseException) -> bool:
    """True for errors that pass: no connection, a full disk, a lock of another, a restart."""
    if isinstance(error, OSError):
        return error.errno not in REFUSALS
    if isinstance(error, StorageInternalError):
        return True
    module = type(error).__module__.split(".")[0]
    if "ArgumentError" in (kind.__name__ for kind in type(error).__mro__):
        return False  # SQLAlchemy cannot read the URL, and will not later
    return module in ("sqlalchemy", "psycopg", "grpc", "pymysql", "MySQLdb") and not isinstance(
        error, ImportError
    )


def patiently(ask: Callable[[], _T], patience_s: float, what: str) -> _T:
    """The answer of a storage, asked again while it is away.

    Raises:
        StorageAwayError: If it stays away for longer than `patience_s`.
        StudyError: If it refuses.
    """
    start_s, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            answer = ask()
        except (UpdateFinishedTrialError, DuplicatedStudyError):
            raise  # answers, not failures
        except Exception as error:
            if isinstance(error, OSError) and error.errno in REFUSALS:
                raise StudyError(
                    f"{what} cannot be used: {error.strerror} ({error.filename}). Name a file in a "
                    f"directory that can be written."
                ) from None
            if not is_away(error):
                raise
            reason = without_password(f"{type(error).__name__}: {error}")
            reason = " ".join(reason.split())[:REASON_CHARS]
            _check_hope(what, reason, time.monotonic() - start_s, patience_s)
            if pause_s == FIRST_PAUSE_S:
                log.warning(
                    "%s is away, asking again for up to %.0f s (%s)", what, patience_s, reason
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            if pause_s > FIRST_PAUSE_S:
                log.info("%s is back after %.1f s", what, time.monotonic() - start_s)
            return answer


def _check_hope(what: str, reason: str, away_s: float, patience_s: float) -> None:
    """Gives up a storage that refuses, or has been away for too long.

    Raises:
        StorageAwayError: If it was away for too long.
        StudyError: If there is no hope.
    """
    if HOPELESS.search(reason):
        raise StudyError(
            f"{what} refuses: {reason}. Check the user, password and database."
        ) from None
    if away_s > patience_s:
        raise StorageAwayError(
            f"{what} was away for {away_s:.0f} s ({reason}). What was recorded before is kept; "
            f"start the worker again once the storage is back."
        ) from None


def study_id_of(
    storage: BaseStorage, name: str, *, create: bool, patience_s: float = PATIENCE_S
) -> int | None:
    """The storage's number of a study; None where it is not there and not to be made."""

    def find() -> int | None:
        try:
            return storage.get_study_id_from_name(name)
        except KeyError:
            if not create:
                return None
        try:
            return storage.create_new_study([StudyDirection.MINIMIZE], name)
        except DuplicatedStudyError:
            return storage.get_study_id_from_name(name)

    return patiently(find, patience_s, "the storage")


def close_storage(storage: BaseStorage) -> None:
    """Closes the connections of a storage, if it has any."""
    storage.remove_session()
    engine = getattr(getattr(storage, "_backend", storage), "engine", None)
    if engine is not None:
        engine.dispose()


def study_names(storage: BaseStorage) -> list[str]:
    """Names of the studies in a storage."""
    studies: list[Any] = storage.get_all_studies()
    return sorted(study.study_name for study in studies)
