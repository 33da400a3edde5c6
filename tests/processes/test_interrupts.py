"""A Ctrl-C ends the work at the next step even where the exception it raised was lost."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from autoshard.processes.interrupts import Interrupts
from autoshard.processes.progress import Progress


def test_a_lost_interrupt_is_raised_again_at_the_next_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts, Progress(False, interrupts) as progress:
        progress.doing("one")
        with contextlib.suppress(KeyboardInterrupt):  # as a finaliser would
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            progress.doing("two")
        progress.doing("three")
    assert signal.getsignal(signal.SIGINT) is before
