"""Devices that may not be here: hardware by name, as a mesh that is planned and compiled for.

In comes a name (`tpu:v5e:16x16`) and the axes of a mesh (`data=16,model=16`). Out go a `Target`
with the numbers of its chips (`parts`), a `jax.sharding.Mesh` over stand-ins for its devices
(`target`), and in the process that compiles the real compiler's devices (`topology`). Next are
`layout.mesh`, which reads any mesh, and `compiler`, which compiles for targets.

Imports: errors, text.
"""
