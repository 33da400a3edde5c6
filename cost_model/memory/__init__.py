"""Peak bytes of many layouts at once.

In: the schedules and classes of a program (`program`), and for each layout the temporaries that a
device holds (`step_time`). `liveness` tables which bytes are alive at each program point,
`all_reduce_combining` tells which partial sums wait for each other, and `peak_memory` keeps the few
points that can be the peak. Out: peak bytes [layouts], and the point at which a layout peaks. Next
is `predict`, which joins them with the step time.
"""
