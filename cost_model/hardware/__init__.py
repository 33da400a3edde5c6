"""What a machine does in a second: rates, links and collectives; what its backend fuses.

In: the name of a preset, a saved calibration or the devices themselves (`calibrate`); program
evidence for `refit`. Out: a `Hardware` (rates and links with their sources), a `Backend` (which
operations fuse, which collectives exist), seconds and bytes of one collective (`collectives`), and
the seconds of a step from its components (`step_components`). This folder knows no layouts: next
are `program`, which counts what there is to do under any layout, and `step_time`, which prices it
for many layouts at once.
"""
