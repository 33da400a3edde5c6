"""Where the time of a search goes, and what is left out where there is too little of it."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from jax.sharding import Mesh

import autoshard
from autoshard import Effort, optimize
from autoshard.cli.app import plan_json
from autoshard.compiler.isolated import COMMAND, Isolation
from autoshard.evaluate import evaluation
from autoshard.processes import stopwatch
from autoshard.shardy.partition import partition
from tests.long_programs import rollout_args, rollout_step, unet_args, unet_step
from tests.models import mlp_args, mlp_step


def search(mesh: Mesh, effort: Effort, **options: Any) -> autoshard.Plan:
    return optimize(mlp_step, mlp_args(), mesh, effort=effort, **{"isolate": False, **options})


def counts(plan: autoshard.Plan) -> dict[str, int]:
    assert plan.timings is not None
    return plan.timings.counts


def count_partitioned(plan: autoshard.Plan) -> int:
    return sum(candidate.partitioned is not None for candidate in plan.candidates)


def count_compiled(plan: autoshard.Plan) -> int:
    return sum(candidate.compiled is not None for candidate in plan.candidates)


# Where it went ------------------------------------------------------------------------------------


def test_every_stage_has_its_time(mesh_4x2: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    plan = search(mesh_4x2, Effort(4, 2), isolate=True)
    timings = plan.timings
    assert timings is not None
    stages = {"trace", "axes", "search", "start", "lower", "partition"}
    assert set(timings) == stages | {"compile", "verify", "measure", "advice"}
    assert all(timings[stage] > 0 for stage in timings)
    assert sum(timings.seconds.values()) <= timings.total_s
    assert timings.counts["partition"] == timings.counts["lower"] == count_partitioned(plan)
    assert timings.counts["compile"] >= count_compiled(plan)

    text = str(plan).replace("\n", " ")
    assert re.search(r"searched for .*: .*\bpartition [\d.]+ \w+ \(", text)
    assert "searched for" in plan._repr_html_()
    record = json.loads(json.dumps(plan_json(plan)))["timings"]
    assert record["seconds"].keys() == set(timings)
    assert record["total_s"] == timings.total_s
    said = capfd.readouterr().err
    shares = re.findall(r"(\w+): [\d.e+-]+ s, \d+% of the time so far", said)
    assert {"traced", "found", "predicted", "partitioned"} <= set(shares)
    assert "searched for" in said


def test_a_known_layout_took_no_search(mesh_4x2: Mesh) -> None:
    plan = autoshard.apply(mlp_step, mlp_args(), mesh_4x2, "fsdp")
    assert plan.timings is None
    assert plan_json(plan)["timings"] is None
    assert "searched for" not in str(plan)


# A deadline ---------------------------------------------------------------------------------------


def test_what_is_not_reached_is_said(mesh_4x2: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    plan = search(mesh_4x2, Effort(4, 2, seconds=0.0))
    said = capfd.readouterr().err
    for what in (
        "out of time before all layouts were predicted",
        "out of time; the other",
        "out of time after",
        "out of time before changes of the program",
    ):
        assert what in said
    assert counts(plan).keys() == {"trace", "axes", "search", "compile"}
    assert count_compiled(plan) == 1
    assert not plan.verified.ok
    assert "out of time" in plan.verified.reason


def test_without_a_deadline_everything_is_reached(
    mesh_4x2: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    assert search(mesh_4x2, Effort(2, 1)).verified.ok
    assert "out of time" not in capfd.readouterr().err


def test_time_that_runs_out_before_measuring(
    mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the winner's outputs were compared."""
    verify = evaluation.Evaluation.verify

    def then_late(self: evaluation.Evaluation, entry: Any) -> None:
        verify(self, entry)
        monkeypatch.setattr(evaluation.Evaluation, "late", lambda self: True)

    monkeypatch.setattr(evaluation.Evaluation, "verify", then_late)
    plan = search(mesh_4x2, Effort(2, 2))
    assert "out of time before measuring" in capfd.readouterr().err
    assert "measure" not in counts(plan)
    assert plan.verified.ok


# Partitioning that costs more than compiling ------------------------------------------------------


class SlowPasses:
    """Passes that take so long, by the search's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.runs, self._late_s, self._seconds = 0, 0.0, seconds
        now_s = stopwatch.time.monotonic
        clock = SimpleNamespace(monotonic=lambda: now_s() + self._late_s)
        monkeypatch.setattr(stopwatch, "time", clock)
        monkeypatch.setattr(evaluation, "partition", self._partition)

    def _partition(self, *args: Any) -> Any:
        self.runs += 1
        self._late_s += self._seconds
        return partition(*args)


def test_partitioning_that_costs_more_than_compiling_ends(
    mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compiling takes seconds here, the passes a thousand: one candidate tells."""
    passes = SlowPasses(monkeypatch, 1000.0)
    plan = search(mesh_4x2, Effort(4, 0))
    assert passes.runs == count_partitioned(plan) == 1
    assert count_compiled(plan) == 4
    assert plan.verified.ok
    said = capfd.readouterr().err
    assert "partitioning a candidate takes" in said
    assert "candidates are not partitioned" in said


@pytest.mark.parametrize(
    ("effort", "seconds"),
    [
        (Effort(3, 0, partitioned=5), 0.0),  # they cost less
        (Effort(1, 0, partitioned=5), 1000.0),  # one is compiled: they choose which
        (Effort(0, 0, partitioned=5), 1000.0),  # none is compiled
    ],
)
def test_partitioning_goes_on(
    mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch, effort: Effort, seconds: float
) -> None:
    passes = SlowPasses(monkeypatch, seconds)
    plan = search(mesh_4x2, effort, progress=False)
    assert passes.runs == count_partitioned(plan) >= 5
    assert count_compiled(plan) == effort.compiled


def test_passes_that_never_end_are_ended(
    mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """That says nothing against the candidates: they are compiled."""
    sleeping = (
        "import sys, time\nfrom autoshard.compiler import worker\n"
        "worker.partition_module = lambda module, axes: time.sleep(600)\n"
        "worker.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
    )
    command = (*COMMAND[:2], "-c", sleeping)
    monkeypatch.setitem(Isolation.__init__.__kwdefaults__, "command", command)
    plan = search(mesh_4x2, Effort(3, 0), isolate=True)
    assert counts(plan)["partition"] == 1
    assert count_compiled(plan) == 3
    assert not any(candidate.rejected for candidate in plan.candidates)
    assert plan.verified.ok
    assert "candidates are not partitioned" in capfd.readouterr().err


# Long programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bodies", "equations"), [(4, 700), pytest.param(9, 4000, marks=pytest.mark.slow)]
)
def test_a_rollout_of_many_equations_is_partitioned(
    mesh_4x2: Mesh, bodies: int, equations: int
) -> None:
    plan = optimize(
        rollout_step,
        rollout_args(bodies),
        mesh_4x2,
        effort=Effort(0, 0, partitioned=2),
        progress=False,
    )
    assert len(plan.traced.program.eqns) >= equations
    assert count_partitioned(plan) >= 2
    assert counts(plan)["partition"] == count_partitioned(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("fn", "args"), [(rollout_step, rollout_args()), (unet_step, unet_args())])
def test_long_programs_are_searched_within_their_time(
    mesh_4x2: Mesh, fn: Any, args: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Longer by no more than what was under way."""
    plan = optimize(fn, args, mesh_4x2, effort=Effort(2, 0, seconds=40.0))
    assert plan.timings is not None
    assert count_compiled(plan) >= 1
    print(plan.timings)
    print(capfd.readouterr().err)
