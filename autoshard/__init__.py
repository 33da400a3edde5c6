"""autoshard: which PartitionSpec should every array carry? Searched, compiled, verified, measured.

Each folder is a stage, and says what comes in, what goes out and what it imports. The files beside
them are the driver: `_optimize` takes the public arguments, `_stages` leads a search through the
folders, `joint_search` runs it for several mesh shapes or functions, `_apply` binds a layout that
is known already, `plan` is what a user gets. `errors`, `text`, `arguments` (checks of what users
pass) and `version` are under everything.

Names are loaded where they are first used: `import autoshard` takes no longer than `import jax`.

>>> import autoshard
>>> autoshard.AxisRule.parse("wq.1->model").mesh_axis
'model'
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard._apply import apply as apply
    from autoshard._optimize import optimize as optimize
    from autoshard.compiler.bound_plan import BoundPlan as BoundPlan
    from autoshard.compiler.bound_plan import Verification as Verification
    from autoshard.compiler.compile import Compiled as Compiled
    from autoshard.compiler.initialise import init as init
    from autoshard.cost_model.hardware.hardware import Hardware as Hardware
    from autoshard.cost_model.hardware.hardware import Link as Link
    from autoshard.devices.target import target as target
    from autoshard.errors import ArgumentError as ArgumentError
    from autoshard.errors import AutoshardError as AutoshardError
    from autoshard.errors import ExtraError as ExtraError
    from autoshard.errors import FactoryError as FactoryError
    from autoshard.errors import HardwareError as HardwareError
    from autoshard.errors import JaxVersionError as JaxVersionError
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
    from autoshard.evidence.candidate import CompiledEvidence as CompiledEvidence
    from autoshard.evidence.candidate import Measured as Measured
    from autoshard.evidence.candidate import Origin as Origin
    from autoshard.evidence.candidate import PartitionedEvidence as PartitionedEvidence
    from autoshard.evidence.candidate import Predicted as Predicted
    from autoshard.evidence.candidate import Skipped as Skipped
    from autoshard.evidence.candidate import Status as Status
    from autoshard.evidence.candidate import Verified as Verified
    from autoshard.evidence.collectives import Collective as Collective
    from autoshard.evidence.throughput import Throughput as Throughput
    from autoshard.layout.axis_rule import AxisRule as AxisRule
    from autoshard.layout.axis_rule import Scope as Scope
    from autoshard.layout.axis_rule import ScopeKind as ScopeKind
    from autoshard.layout.constraints import PlacedConstraint as PlacedConstraint
    from autoshard.layout.pins import HasSpecs as HasSpecs
    from autoshard.layout.pins import Only as Only
    from autoshard.plan import Plan as Plan
    from autoshard.report.explain import Explanation as Explanation
    from autoshard.report.minimise import MinimalConstraints as MinimalConstraints
    from autoshard.report.source_constraints import SourceConstraint as SourceConstraint
    from autoshard.report.source_expressions import SourceSpan as SourceSpan
    from autoshard.report.what_if import LeafExplanation as LeafExplanation
    from autoshard.report.what_if import WhatIf as WhatIf
    from autoshard.search.study.shared_study import Sharing as Sharing
    from autoshard.table.check import Finding as Finding
    from autoshard.table.check import check as check
    from autoshard.table.spec_table import SpecTable as SpecTable

_HOMES = {
    "optimize": "autoshard._optimize",
    "apply": "autoshard._apply",
    "init": "autoshard.compiler.initialise",
    "target": "autoshard.devices.target",
    "check": "autoshard.table.check",
    "ArgumentError": "autoshard.errors",
    "AutoshardError": "autoshard.errors",
    "AxisRule": "autoshard.layout.axis_rule",
    "BoundPlan": "autoshard.compiler.bound_plan",
    "Candidate": "autoshard.evidence.candidate",
    "Collective": "autoshard.evidence.collectives",
    "Compiled": "autoshard.compiler.compile",
    "CompiledEvidence": "autoshard.evidence.candidate",
    "Effort": "autoshard.evaluate.effort",
    "Explanation": "autoshard.report.explain",
    "ExtraError": "autoshard.errors",
    "FactoryError": "autoshard.errors",
    "Finding": "autoshard.table.check",
    "Hardware": "autoshard.cost_model.hardware.hardware",
    "HardwareError": "autoshard.errors",
    "HasSpecs": "autoshard.layout.pins",
    "JaxVersionError": "autoshard.errors",
    "LeafExplanation": "autoshard.report.what_if",
    "Link": "autoshard.cost_model.hardware.hardware",
    "Measured": "autoshard.evidence.candidate",
    "MeshError": "autoshard.errors",
    "MinimalConstraints": "autoshard.report.minimise",
    "NoFeasiblePlanError": "autoshard.errors",
    "Only": "autoshard.layout.pins",
    "Origin": "autoshard.evidence.candidate",
    "PartitionedEvidence": "autoshard.evidence.candidate",
    "PathError": "autoshard.errors",
    "PlacedConstraint": "autoshard.layout.constraints",
    "Plan": "autoshard.plan",
    "Predicted": "autoshard.evidence.candidate",
    "ProcessesError": "autoshard.errors",
    "RuleError": "autoshard.errors",
    "Scope": "autoshard.layout.axis_rule",
    "ScopeKind": "autoshard.layout.axis_rule",
    "SearchFailedError": "autoshard.errors",
    "Sharing": "autoshard.search.study.shared_study",
    "SignatureError": "autoshard.errors",
    "Skipped": "autoshard.evidence.candidate",
    "SourceConstraint": "autoshard.report.source_constraints",
    "SourceSpan": "autoshard.report.source_expressions",
    "SpecError": "autoshard.errors",
    "SpecTable": "autoshard.table.spec_table",
    "Status": "autoshard.evidence.candidate",
    "StudyError": "autoshard.errors",
    "TableError": "autoshard.errors",
    "TargetError": "autoshard.errors",
    "Throughput": "autoshard.evidence.throughput",
    "TraceError": "autoshard.errors",
    "Verification": "autoshard.compiler.bound_plan",
    "Verified": "autoshard.evidence.candidate",
    "WhatIf": "autoshard.report.what_if",
}
"""By public name, the module that it is in; the imports above say the same to type checkers."""

_IMPORTING = threading.RLock()
"""One thread at a time: jax's modules import each other, and another thread may see half of one."""

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  # the keys are strings


def __getattr__(name: str) -> Any:
    """A public name, loaded at its first use."""
    if name == "__version__":
        from autoshard.version import own_version

        return own_version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    with _IMPORTING:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The API and nothing else."""
    return sorted(__all__)
