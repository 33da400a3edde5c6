"""The same tasks on a real PostgreSQL, and through Optuna's gRPC proxy."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from autoshard import Effort, optimize
from autoshard.errors import StudyError
from autoshard.report.html import report_html
from autoshard.search.study.status import status_json, status_of, status_text
from autoshard.search.study.storage import open_storage
from autoshard.search.study.task_queue import TaskQueue
from tests.jobs.crew import CROWDED_LEASE_S, ROOT, crew, evaluations, task_id_of, tasks_of, wait_for
from tests.jobs.postgres import PASSWORD, Server
from tests.models import mlp_args, mlp_step


def test_four_workers_share_a_budget_exactly(server: Server, tmp_path: Path) -> None:
    log = tmp_path / "evaluations.log"
    with crew(
        4, server.url, 24, 0.05, log, study="four"
    ) as workers:  # all make the tables in the same second
        said = [
            json.loads(worker.communicate(timeout=120)[1].splitlines()[-1]) for worker in workers
        ]
    assert said == [{"tasks": 24, "best": 17}] * 4
    assert sorted(evaluations(log)) == list(range(24))


@pytest.mark.parametrize("away_s", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_server_that_restarts_is_waited_for(away_s: int, server: Server, tmp_path: Path) -> None:
    log, study = tmp_path / "evaluations.log", f"restart {away_s}"
    with crew(2, server.url, 12, 0.3, log, study=study) as workers:
        wait_for(lambda: len(evaluations(log)) >= 4)
        server.stop()
        time.sleep(away_s)
        server.start()
        said = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [json.loads(text.splitlines()[-1])["tasks"] for text in said] == [12, 12]
    assert any("is away" in text for text in said)
    assert not any(PASSWORD in text for text in said)
    with TaskQueue(server.url, study, create=False) as queue:
        trials = queue.trials()
    done = [
        str(task_id_of(t)) for t in trials if t.state.is_finished() and t.state != TrialState.FAIL
    ]
    assert sorted(done) == sorted(f"compile {i}" for i in range(12))


def test_a_wrong_password_is_an_error_at_once_and_not_shown(server: Server) -> None:
    wrong = server.url.replace(PASSWORD, "guessed-word")
    start_s = time.monotonic()
    with pytest.raises(StudyError) as failure:
        open_storage(wrong)
    assert time.monotonic() - start_s < 30
    assert "guessed-word" not in str(failure.value)
    assert "password authentication failed" in str(failure.value)


def test_workers_behind_the_grpc_proxy(server: Server, tmp_path: Path) -> None:
    program = (
        "import sys, optuna; "
        "storage = optuna.storages.get_storage(sys.argv[1]); "
        "optuna.storages.run_grpc_proxy_server(storage, host='localhost', port=int(sys.argv[2]))"
    )
    port = server.port + 1 if server.port < 65_000 else server.port - 1
    url = server.url.replace("postgresql://", "postgresql+psycopg://")
    proxy = subprocess.Popen(
        [sys.executable, "-c", program, url, str(port)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    log = tmp_path / "evaluations.log"
    try:
        with crew(2, f"grpc://localhost:{port}", 8, 0.05, log, study="proxy") as workers:
            said = [
                json.loads(worker.communicate(timeout=120)[1].splitlines()[-1])
                for worker in workers
            ]
    finally:
        proxy.kill()
        proxy.wait()
    assert [found["tasks"] for found in said] == [8, 8]
    assert sorted(evaluations(log)) == list(range(8))


@pytest.mark.slow
def test_sixteen_processes_start_in_the_same_second(server: Server, tmp_path: Path) -> None:
    log = tmp_path / "evaluations.log"
    with crew(16, server.url, 40, 0.1, log, study="sixteen", lease_s=CROWDED_LEASE_S) as workers:
        said = [
            json.loads(worker.communicate(timeout=600)[1].splitlines()[-1]) for worker in workers
        ]
    assert said == [{"tasks": 40, "best": 17}] * 16
    assert sorted(evaluations(log)) == list(range(40))


def test_a_password_is_in_nothing_that_is_written(
    server: Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG, "autoshard")
    effort = Effort(compiled=1, measured=1)
    plan = optimize(
        mlp_step, mlp_args(), "data=4,model=2", effort=effort, storage=server.url, study="secret"
    )
    plan.table.save(tmp_path / "table.json")
    pages = [
        (tmp_path / "table.json").read_text(),
        report_html(plan.table),
        str(plan),
        repr(plan),
        *plan.notes,
    ]
    pages += [json.dumps(plan.records()), caplog.text, *capfd.readouterr()]
    with TaskQueue(server.url, "secret", create=False) as queue:
        pages += [str(trial.user_attrs) for trial in queue.trials()]
        status = status_of(queue)
        pages += [status_text(status), json.dumps(status_json(status))]
    assert "claimed: compile" in caplog.text
    assert not any(PASSWORD in page for page in pages)


@pytest.mark.bench
def test_overhead_with_a_thousand_trials(server: Server, tmp_path: Path) -> None:
    """Claim, record and bookkeeping of a task: under 50 ms with 1,000 trials in the study."""
    for where in (f"journal:{tmp_path / 'study.log'}", server.url):
        with TaskQueue(where, "many") as queue:
            queue.run(tasks_of(1000, 0.0, tmp_path / "log"))
            start_s = time.perf_counter()
            queue.run(tasks_of(1050, 0.0, tmp_path / "log"))
            each_s = (time.perf_counter() - start_s) / 50
        print(
            f"{where.partition(':')[0]}: {1e3 * each_s:.1f} ms a task with 1,000 trials in the "
            f"study"
        )
        assert each_s < 0.05
