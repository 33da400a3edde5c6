"""Where the proposer's own study lives: in memory, a journal file, or any storage URL of Optuna.

One Optuna trial is one proposal, told its predicted time. (What workers share is in `tasks`.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from autoshard.errors import StudyError

IDENTITY = "identity"

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger("optuna").propagate = False


def open_storage(where: str | Path | None) -> BaseStorage | str | None:
    """An Optuna storage.

    Args:
        where: None for memory; a URL (`sqlite:///x.db`, `postgresql://...`); or `journal:PATH` or a plain path for a
            journal file.
    """
    if where is None:
        return None
    text = str(where)
    if "://" in text:
        return text
    path = Path(text.removeprefix("journal:"))
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


def open_study(
    where: str | Path | None, name: str | None, identity: Mapping[str, str], sampler: optuna.samplers.BaseSampler
) -> optuna.Study:
    """Opens or creates the study, and refuses one that belongs to something else.

    Args:
        where: See `open_storage`.
        name: Name of the study; by default one that follows from the identity.
        identity: What the study is for (program, mesh, space, versions); stored with it.
        sampler: Used for asking.

    Raises:
        StudyError: If the stored study is for another program, mesh, space or version; the difference is named.
    """
    study = optuna.create_study(
        storage=open_storage(where),
        study_name=name or f"autoshard-{identity['program'][:12]}-{identity['mesh']}",
        sampler=sampler,
        load_if_exists=True,
    )
    stored = study.user_attrs.get(IDENTITY)
    if stored is None:
        study.set_user_attr(IDENTITY, dict(identity))
    elif stored != dict(identity):
        differs = [f"{k}: {stored.get(k)!r} there, {v!r} here" for k, v in identity.items() if stored.get(k) != v]
        raise StudyError(
            f"study {study.study_name!r} in {where} is for something else ({'; '.join(differs)}). "
            f"Choose another --study name, or another storage."
        )
    return study
