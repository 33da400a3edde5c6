"""Compiles the programs that `test_saved_programs.py` reads: `python -m
tests.targets.make_programs`, once per jax.

Needs the tpu and gpu extras. Long payloads that no reader looks at are cut out.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import jax
import msgspec

from autoshard.compiler.isolated import Isolation
from autoshard.compiler.worker import Reply, Request
from autoshard.compiler.worker_process import Failure
from autoshard.jax_internals import executables
from autoshard.processes.child import START_LIMIT_S
from tests.targets.steps import plan

FOLDER = Path(__file__).parent / "programs"
PROGRAMS = {
    "tpu_fsdp": ("tpu:v5e:2x4", "data=4,model=2", "fsdp"),
    "tpu_tp": ("tpu:v5e:2x4", "data=2,model=4", "fsdp+tp"),
    "tpu_slices": ("tpu:v5e:2x2*2", "data=4,model=2", "dp"),
    "gpu_fsdp": ("gpu:h100:1x8", "data=4,model=2", "fsdp"),
    "gpu_tp": ("gpu:h100:1x8", "data=2,model=4", "fsdp+tp"),
}
_PAYLOADS = re.compile(
    r', backend_config=(\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\}|\{(?:[^{}]|\{[^{}]*\})*\})*\})'
)


def simplified(match: re.Match[str]) -> str:
    kept = re.findall(r'"(?:estimated_cycles|known_trip_count)":(?:"\d+"|\{"n":"\d+"\})', match[1])
    if "async_collective_fusion_config" in match[1]:
        kept.append('"async_collective_fusion_config":{}')
    return f", backend_config={{{','.join(kept)}}}" if kept else ""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (target, mesh, preset) in PROGRAMS.items():
        made = plan(target, mesh, preset)
        with Isolation(made.mesh) as isolation:
            request = executables.compile_request(made.built.lower(), None)
            assert request is not None
            worker = isolation._ready_worker()
            assert worker is not None
            reply = worker.exchange(
                msgspec.msgpack.encode(Request(compile=request)), Reply, START_LIMIT_S
            )
        assert not isinstance(reply, Failure), reply
        assert reply.figures is not None, reply.error
        text = _PAYLOADS.sub(simplified, reply.text)
        path = FOLDER / f"{name}_jax{jax.__version__}.txt.gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(path.name, len(reply.text), len(text), path.stat().st_size)


if __name__ == "__main__":
    main()
