"""Standard error while XLA compiles: captured, and printed after all where the process ends in it.

XLA's warnings go to file descriptor 2 alone, so that is what is captured. A compiler that aborts
ends this process with it, and its last words would be lost in the file: a shell beside it waits
for that, prints them, and is gone otherwise.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from autoshard.processes.child import kill

_PRINT_AT_THE_END = 'read -r line; cat "$0" >&2; rm -f "$0"'
"""A script of POSIX shells: `read` ends with the process that has the other end of the pipe."""


@contextlib.contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """Captures file descriptor 2, the only place that XLA's C++ warnings go to.

    Yields:
        What gives the text that was written, once the capture has ended.
    """
    sys.stderr.flush()  # what Python wrote before is not part of it
    saved = os.dup(2)
    # Named, since the shell has to open it: the position in an inherited file would be shared.
    with (
        tempfile.NamedTemporaryFile(prefix="autoshard-stderr-") as file,
        _printed_at_the_end(file.name),
    ):
        os.dup2(file.fileno(), 2)
        text = ""

        def read() -> str:
            return text

        try:
            yield read
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)  # the position moved with what C++ wrote
            text = file.read().decode(errors="replace")


@contextlib.contextmanager
def _printed_at_the_end(path: str) -> Iterator[None]:
    """Within it a file is printed to standard error, and removed, where this process ends."""
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _PRINT_AT_THE_END, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is not for it
        )
    except OSError:  # there is no shell here; the words are lost then
        yield
        return
    try:
        yield
    finally:
        kill(shell)  # before its end of the pipe is closed, or it would print
        assert shell.stdin is not None
        shell.stdin.close()
