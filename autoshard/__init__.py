"""autoshard: which PartitionSpec should every array carry? Searched, compiled, verified, measured.

Names are loaded where they are first used: `import autoshard` takes no longer than `import jax`.

>>> import autoshard
>>> autoshard.AxisRule.parse("wq.1->model").mesh_axis
'model'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard._apply import apply as apply
    from autoshard._optimize import optimize as optimize
    from autoshard.compiler.bound_plan import Verification as Verification
    from autoshard.compiler.initialise import init as init
    from autoshard.devices.target import target as target
    from autoshard.errors import ArgumentError as ArgumentError
    from autoshard.errors import AutoshardError as AutoshardError
    from autoshard.errors import ExtraError as ExtraError
    from autoshard.errors import FactoryError as FactoryError
    from autoshard.errors import HardwareError as HardwareError
    from autoshard.errors import MeshError as MeshError
    from autoshard.errors import NoFeasiblePlanError as NoFeasiblePlanError
    from autoshard.errors import PathError as PathError
    from autoshard.errors import ProcessesError as ProcessesError
    from autoshard.errors import RuleError as RuleError
    from autoshard.errors import SearchFailedError as SearchFailedError
    from autoshard.errors import SignatureError as SignatureError
    from autoshard.errors import SpecError as SpecError
    from autoshard.errors import StudyError as StudyError
    from autoshard.errors import TableError as TableError
    from autoshard.errors import TargetError as TargetError
    from autoshard.errors import TraceError as TraceError
    from autoshard.evaluate.effort import Effort as Effort
    from autoshard.evidence.candidate import Candidate as Candidate
    from autoshard.layout.axis_rule import AxisRule as AxisRule
    from autoshard.layout.pins import Only as Only
    from autoshard.plan import Plan as Plan
    from autoshard.table.check import check as check
    from autoshard.table.spec_table import SpecTable as SpecTable

_HOMES = {
    "apply": "autoshard._apply",
    "optimize": "autoshard._optimize",
    "Verification": "autoshard.compiler.bound_plan",
    "init": "autoshard.compiler.initialise",
    "target": "autoshard.devices.target",
    "ArgumentError": "autoshard.errors",
    "AutoshardError": "autoshard.errors",
    "ExtraError": "autoshard.errors",
    "FactoryError": "autoshard.errors",
    "HardwareError": "autoshard.errors",
    "MeshError": "autoshard.errors",
    "NoFeasiblePlanError": "autoshard.errors",
    "PathError": "autoshard.errors",
    "ProcessesError": "autoshard.errors",
    "RuleError": "autoshard.errors",
    "SearchFailedError": "autoshard.errors",
    "SignatureError": "autoshard.errors",
    "SpecError": "autoshard.errors",
    "StudyError": "autoshard.errors",
    "TableError": "autoshard.errors",
    "TargetError": "autoshard.errors",
    "TraceError": "autoshard.errors",
    "Effort": "autoshard.evaluate.effort",
    "Candidate": "autoshard.evidence.candidate",
    "AxisRule": "autoshard.layout.axis_rule",
    "Only": "autoshard.layout.pins",
    "Plan": "autoshard.plan",
    "check": "autoshard.table.check",
    "SpecTable": "autoshard.table.spec_table",
}
"""By public name, the module that it is in; the imports above say the same to type checkers."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """A public name, loaded at its first use."""
    if name == "__version__":
        from autoshard.version import own_version

        return own_version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The API and nothing else."""
    return sorted(__all__)
