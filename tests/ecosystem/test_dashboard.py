"""A stored study opens in optuna-dashboard, and trials are a list of plain dicts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import optuna_dashboard
from optuna_dashboard._cli import get_storage

import autoshard
from tests.models import mlp_args, mlp_step


def get(app: Any, path: str) -> Any:
    """What the dashboard's server answers, without a socket."""
    status: list[str] = []
    environment = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "SERVER_NAME": "here",
        "SERVER_PORT": "80",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.url_scheme": "http",
    }
    body = b"".join(app(environment, lambda found, headers, error=None: status.append(found)))
    assert status == ["200 OK"]
    return json.loads(body)


def test_the_dashboard_shows_the_study(tmp_path: Path) -> None:
    plan = autoshard.optimize(
        mlp_step,
        mlp_args(),
        "data=4,model=2",
        donate_argnums=0,
        progress=False,
        storage=tmp_path / "study.log",
        study="mine",
        effort=autoshard.Effort(compiled=1, measured=0),
    )
    app = optuna_dashboard.wsgi(
        get_storage(str(tmp_path / "study.log"))
    )  # as its command opens a file
    (study,) = [s for s in get(app, "/api/studies")["study_summaries"] if s["study_name"] == "mine"]
    shown = get(app, f"/api/studies/{study['study_id']}")
    assert shown["name"] == "mine"
    assert len(shown["trials"]) >= 1
    records = plan.records()
    assert len(records) == len(plan.candidates)
    assert json.loads(json.dumps(records))[0]["name"] == plan.candidates[0].name
    assert sum(record["status"] == "winner" for record in records) == 1
