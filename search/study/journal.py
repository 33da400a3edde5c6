"""A journal file that many processes append to, and that survives what happens to files.

Optuna's journal stops every reader for good at a record that a kill, a full disk or a crashed node
cut short, and one that is missing gives all later trials another number. Here lines are numbered
and have digests (`journal_lines`). What is damaged is skipped with one warning, what is cut at the
end is left for the next append, and a file that shrank or was replaced is read again.

An append is one write at the end of the file, whoever else wrote meanwhile, so nothing is ever
overwritten. The lock only spares work: of two lines with one number the first counts, and the
writer of the other appends it again.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.storages.journal._storage import JournalStorageReplayResult

from autoshard.errors import StudyError
from autoshard.search.study.journal_lines import (
    History,
    Line,
    Record,
    parse_line,
    placeholder_of,
)
from autoshard.search.study.journal_lock import JournalLock

log = logging.getLogger("autoshard.jobs")

FILE_MODE = 0o660
"""Of a new journal, less the umask: never open to others. `test_a_journal_is_not_open_to_others`
checks it."""

LONGEST_LINE = 2**26
"""Bytes of a line; what is longer is no journal and not held in memory. Chosen by hand: a record
comes in parts of 60,000 characters; no test depends on it."""

TAIL = 32
"""Bytes before the place up to which the file was read, which tell whether it was rewritten: they
hold the digest of the last line."""


class Journal(BaseJournalBackend):
    """Optuna's journal format in a file, tolerant of damage; one per process and file."""

    def __init__(self, path: Path, limit_s: float, *, read_only: bool = False) -> None:
        """Makes the file where there is none, unless it is only read.

        Args:
            path: Of the journal; beside it comes the lock. Later changes of the working directory
                do not matter.
            limit_s: How long the lock is waited for.
            read_only: Append nothing, create nothing.
        """
        self.path = str(path.resolve())
        self._read_only = read_only
        if not read_only:
            os.close(os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, FILE_MODE))
        self._lock = JournalLock(f"{self.path}.lock", limit_s)
        self._history = History()
        self._rewritten = False
        self._offset, self._tail = 0, b""
        self._file_id: tuple[int, int] | None = None
        self._warned: set[int] = set()
        self._written: Record = {}

    # Reading --------------------------------------------------------------------------------------

    def read_logs(self, log_number_from: int) -> Iterator[Record]:
        """The records from a number on, placeholders of lost ones counted."""
        self._refresh()
        yield from self._history.records[log_number_from:]

    def rewritten(self) -> bool:
        """Reads on; True, once, where the records are no longer those that were read before."""
        self._refresh()
        was, self._rewritten = self._rewritten, False
        return was

    def is_own_last(self, record: Record) -> bool:
        """True for the record that was last appended here."""
        return record.get("at") == self._written.get("at") is not None

    def _refresh(self) -> None:
        """Reads what was added; the whole file where it is not only that."""
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            file_id = status.st_dev, status.st_ino
            same = file_id == self._file_id and self._is_continued(file, status.st_size)
            if not same or not self._read_added(file):
                self._read_again(file)
            self._file_id = file_id

    def _is_continued(self, file: BinaryIO, size: int) -> bool:
        """True where the file still has what was read of it, at its end at least."""
        if size < self._offset:
            return False
        return os.pread(file.fileno(), len(self._tail), self._offset - len(self._tail)) == (
            self._tail
        )

    def _read_added(self, file: BinaryIO) -> bool:
        """Takes lines that follow; False where one does not."""
        for line in self._lines(file, self._offset):
            if line is not None and not self._history.follows(line):
                return False
            if line is not None:
                self._history.add(line)
        return True

    def _read_again(self, file: BinaryIO) -> None:
        """Reads the whole file, and notes whether it tells another history."""
        before = self._history
        self._tail = b""
        lines = [line for line in self._lines(file, 0) if line is not None]
        self._history = History.of(lines)
        if self._history.lost > before.lost:
            log.warning(
                "%s: damaged, %d of its %d records are lost; what they said is done again",
                self.path,
                self._history.lost,
                len(self._history.digests),
            )
        known = before.digests
        if known and self._history.digests[: len(known)] != known:
            self._rewritten = True
            if not self._history.lost:
                log.warning("%s: it was replaced or cut, and is read again", self.path)

    def _lines(self, file: BinaryIO, start: int) -> Iterator[Line | None]:
        """The whole lines from a place on, None for a broken one; notes how far it was read."""
        file.seek(start)
        self._offset = start
        while text := file.readline(LONGEST_LINE):
            if not text.endswith(b"\n") and len(text) < LONGEST_LINE:
                return  # being written, or cut: then the next append ends it
            line = parse_line(text)
            if line is None and text.strip():
                self._warn(self._offset, len(text))
            self._offset += len(text)
            self._tail = text[-TAIL:]
            yield line

    def _warn(self, offset: int, size: int) -> None:
        if offset not in self._warned:
            self._warned.add(offset)
            log.warning(
                "%s: skipped a broken record at byte %d (%d bytes)", self.path, offset, size
            )

    # Appending ------------------------------------------------------------------------------------

    def append_logs(self, logs: Sequence[Record]) -> None:
        """Appends records.

        Raises:
            OSError: If they could not be written; a part that was cut short is skipped by readers.
        """
        if self._read_only:
            raise StudyError(f"the journal {self.path} was opened for reading only.")
        until_s = time.monotonic() + self._lock.limit_s
        while True:
            with self._lock.held():
                self._refresh()
                lines = self._history.lines_after(logs)
                if self._lock.is_own():
                    self._write(b"".join(lines))
            self._refresh()
            last = parse_line(lines[-1])
            assert last is not None
            if self._history.digests[last.number : last.number + 1] == [last.digest]:
                self._written = last.record
                return
            # This process stalled for longer than the lock's grace, and others wrote meanwhile.
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.path}: others write it all the time")

    def _write(self, text: bytes) -> None:
        """Writes at the end of the file, at once."""
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.fstat(file).st_size > self._offset:  # a record that was cut short
                text = b"\n" + text
            if os.write(file, text) < len(text):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (part of a record)")
            os.fsync(file)
        finally:
            os.close(file)


class SharedJournalStorage(JournalStorage):
    """Optuna's storage on such a journal: no record of another process, and no change of the file,
    ends it.
    """

    def __init__(self, journal: Journal) -> None:
        """Reads the journal."""
        self._journal = journal
        super().__init__(journal)

    def _sync_with_backend(self) -> None:
        if self._journal.rewritten():
            self._replay_result = JournalStorageReplayResult(self._worker_id_prefix)
        answer: Exception | None = None
        for record in self._journal.read_logs(self._replay_result.log_number_read):
            try:
                self._replay_result.apply_logs([record])
            except Exception as error:
                if not self._is_own(record):
                    self._skip(record, error)
                elif self._journal.is_own_last(record):
                    answer = error  # Optuna's; that to an earlier call was given then
        if answer is not None:
            raise answer

    def _is_own(self, record: Record) -> bool:
        return str(record.get("worker_id")).startswith(self._worker_id_prefix)

    def _skip(self, record: Record, error: Exception) -> None:
        """Leaves out what Optuna does not understand; a trial keeps its number all the same."""
        self._warn(record, error)
        placeholder = placeholder_of(record)
        if placeholder is not None and record["study_id"] in self._replay_result._studies:
            self._replay_result.apply_logs([placeholder])
            self._replay_result.log_number_read -= 1

    def _warn(self, record: Record, error: Exception) -> None:
        log.warning(
            "%s: skipped record %s, which Optuna does not understand (%s: %s)",
            self._journal.path,
            record.get("at", ["?"])[0],
            type(error).__name__,
            error,
        )
