"""Every error autoshard raises: where, what was got, the rule with its numbers, a fix that works.

Each class also inherits the builtin that a caller would expect to catch (`ValueError`,
`LookupError`, ...). A *candidate* that fails is never an exception: it is a rejection with a reason
(see `autoshard.evidence.candidate`).
"""

from __future__ import annotations


class AutoshardError(Exception):
    """Base of all errors of this package; catch it to catch them all."""


class TraceError(AutoshardError, TypeError):
    """`fn` cannot be traced with the example arguments; whether plain `jax.jit(fn)` fails as well
    was tried, and the message says it.
    """


class ArgumentError(AutoshardError, ValueError):
    """An argument of an autoshard function is not of the documented form."""


class MeshError(AutoshardError, ValueError):
    """The mesh (or mesh string) does not fit the devices."""


class TargetError(AutoshardError, ValueError):
    """There is no such target, the mesh does not match it, or something was to be run on it."""


class ExtraError(AutoshardError, ImportError):
    """An optional part of the installation is missing; the message has the command for it."""


class SpecError(AutoshardError, ValueError):
    """A PartitionSpec does not fit an array: unknown mesh axis, too many dimensions, odd sizes."""


class JaxVersionError(AutoshardError, ImportError):
    """This release of jax lacks names that autoshard needs; the message has each of them."""


class PathError(AutoshardError, LookupError):
    """A leaf path names no leaf of the arguments."""


class RuleError(AutoshardError, ValueError):
    """An axis rule names an unknown logical axis or mesh axis, or is not of the documented form."""


class SignatureError(AutoshardError, TypeError):
    """A plan was called with arguments that its rules cannot serve."""


class NoFeasiblePlanError(AutoshardError, RuntimeError):
    """No candidate fits the memory budget."""


class SearchFailedError(AutoshardError, RuntimeError):
    """Every candidate was rejected; the message lists the reasons."""


class HardwareError(AutoshardError, ValueError):
    """A hardware description, link or group size is impossible or unknown."""


class TableError(AutoshardError, ValueError):
    """A spec table cannot be read, or belongs to another function, mesh or schema."""


class FactoryError(AutoshardError, ImportError):
    """A `pkg.module:factory` cannot be imported, or returns something else than arguments."""


class StudyError(AutoshardError, ValueError):
    """A stored study belongs to another program, mesh or version."""


class StorageAwayError(StudyError):
    """The storage of a study cannot be reached; the same call may work later."""


class ProcessesError(AutoshardError, RuntimeError):
    """The processes of one search (`jax.distributed`) differ, or one failed or does not answer."""
