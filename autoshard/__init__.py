"""autoshard: which PartitionSpec should every array carry? Searched, compiled, verified, measured.

>>> import autoshard
>>> autoshard.AxisRule.parse("wq.1->model").mesh_axis
'model'
"""

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
