"""Progress: plain lines in a log; on a terminal a live line that says how the search stands."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

SEARCH = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import autoshard
from tests.models import mlp_args, mlp_step
effort = autoshard.Effort(3, 2)
autoshard.optimize(mlp_step, mlp_args(batch=64), "data=4,model=2", effort=effort, memory_budget_bytes=BUDGET)
"""
ROOT = Path(__file__).parents[2]


ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "200", "TERM": "xterm"}


def command(budget: str) -> list[str]:
    return [sys.executable, "-c", SEARCH.replace("BUDGET", budget)]


def test_a_log_gets_plain_lines() -> None:
    done = subprocess.run(
        command("None"), cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, check=True, timeout=300
    )
    text = done.stderr.decode()
    lines = [line for line in text.splitlines() if line.startswith("autoshard: ")]
    assert any("compiled in" in line for line in lines)
    assert any("measured" in line for line in lines)
    assert "\x1b" not in text, "no escape codes in a log"
    assert "best so far" not in text, "the live line is for terminals"


def test_a_terminal_gets_a_live_line_with_the_best_so_far() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command("20_000"), cwd=ROOT, env=ENVIRONMENT, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            found = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not found:
            break
        text += found
    os.close(ours)
    process.wait(120)
    shown = text.decode(errors="replace")
    assert "compiling" in shown
    assert "left to compile" in shown
