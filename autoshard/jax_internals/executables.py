"""Lowered programs and executables: what it takes to compile a program in another process, or for
devices that are not here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

_O0 = 9
"""The number of O0 in XLA's `ExecutionOptions.EffortLevel`, which jax before 0.11 asks for."""


def calls_python(lowered: jax.stages.Lowered) -> bool:
    """True if the program calls back into this process."""
    args = lowered._lowering.compile_args
    return bool(args["host_callbacks"] or args["keepalive"])


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A lowered program as another process can compile it, just as `lowered.compile()` would here.

    Attributes:
        module: StableHLO bytecode.
        options: Serialised XLA CompileOptions.
        device_ids: The devices of the program, in order.
    """

    module: bytes
    options: bytes
    device_ids: tuple[int, ...]


def compile_request(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, Any] | None
) -> CompileRequest | None:
    """What another process needs to compile a program; None if it calls back into this one."""
    from jax._src.interpreters import pxla

    if calls_python(lowered):
        return None
    computation: Any = lowered._lowering
    args = computation.compile_args
    devices = list(computation._device_list)
    to_inputs, to_outputs = pxla.get_prop_to_input_output(
        args["in_shardings"], args["out_shardings"], len(args["ordered_effects"])
    )
    options: Any = pxla.create_compile_options(
        computation.stablehlo(),
        args["tuple_args"],
        to_inputs,
        to_outputs,
        args["backend"],
        np.array(devices, dtype=object),
        {**dict(computation._compiler_options_kvs), **(compiler_options or {})},
    )
    return CompileRequest(
        module_bytes(lowered), options.SerializeAsString(), tuple(device.id for device in devices)
    )


def module_bytes(lowered: jax.stages.Lowered) -> bytes:
    """A lowered program as MLIR bytecode, for another process with the same jax."""
    from jax._src.interpreters import mlir

    module: Any = lowered.compiler_ir("stablehlo")
    return mlir.module_to_bytecode(module)


@contextlib.contextmanager
def parsed_module(module: bytes) -> Iterator[Any]:
    """The MLIR module of `module_bytes`, with the dialects of jax, while the context lasts."""
    from jax._src.interpreters import mlir
    from jax.extend.mlir import ir

    with mlir.make_ir_context():
        yield ir.Module.parse(module)


def compile_requested(request: CompileRequest, devices: Mapping[int, jax.Device]) -> Any:
    """Compiles a program that another process lowered; it can be asked for text and memory.

    Args:
        request: The program.
        devices: The devices of this process by id.
    """
    from jax._src import stages
    from jaxlib import xla_client

    # jax's own wrapper around an executable reads its text and memory in every release.
    class Sent(stages.Executable):
        def xla_extension_executable(self) -> Any:
            return executable

    chosen = tuple(devices[number] for number in request.device_ids)
    client: Any = chosen[0].client
    options = xla_client.CompileOptions.ParseFromString(request.options)
    own = np.array([[device.id for device in chosen]])
    options.device_assignment = xla_client.DeviceAssignment.create(own)
    targets = xla_client.DeviceList(chosen)
    # The client of a topology can compile a module, and load nothing.
    if is_compile_only(chosen[0]):
        with parsed_module(request.module) as module:
            executable = client.compile(module, executable_devices=targets, compile_options=options)
    else:
        executable = client.compile_and_load(
            request.module, executable_devices=targets, compile_options=options
        )
    return Sent()


def is_compile_only(device: Any) -> bool:
    """True for a device of a topology: programs can be compiled for it and not run."""
    from jaxlib import _jax

    return isinstance(device.client, _jax.CompileOnlyPyClient)


def gpu_target_config(devices: Sequence[jax.Device]) -> str | None:
    """What the GPU compiler knows of these GPUs, as text; None for devices that are no GPUs."""
    from jaxlib import _jax

    if devices[0].platform != "gpu":
        return None
    text: str = _jax.get_topology_for_devices(list(devices)).target_config
    return text


def quick_compile_options() -> dict[str, Any]:
    """What makes the TPU compiler skip its optimisations."""
    by_name = jax.__version_info__ >= (0, 11)
    return {"optimization_level": "O0" if by_name else _O0}
