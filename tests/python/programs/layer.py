"""One rank of an MPI job: layers in the group, in sub-groups, and in a second group.

Usage: layer.py [mpi4py] [split] [boom]
"""

import os
import sys

import numpy as np

import ferry


def layer(group):
    exchange = ferry.Exchange(group, ferry.Placement.contiguous(group.size, group.size), 64, "f32",
                              wire_combine="f32")
    ids = (np.arange(8).reshape(4, 2) + group.rank) % group.size
    x = np.full((4, 64), group.rank + 1, np.float32)
    plan = exchange.plan(ids, np.ones((4, 2), np.float32))
    rows = exchange.dispatch(plan, x)
    y = exchange.output(plan)
    y.numpy()[:] = rows.numpy() * (group.rank + 1)
    out = exchange.combine(plan, y).numpy()
    assert (out == ((ids + 1).sum(1)[:, None] * x)).all(), (group, out[:, 0])
    return rows.numpy()


comm = None
if "mpi4py" in sys.argv:
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
shape = ferry.Topology.uniform(2, 2) if "split" in sys.argv else None
with ferry.init(comm, topology=shape) as group:
    view = layer(group)
    assert group.transport == "mpi" and group.nodes == (2 if shape else 1)
    rank = group.rank
    ep = group.subgroup([0, 1] if rank < 2 else [2, 3])
    dp = group.subgroup([2, 0] if rank % 2 == 0 else [3, 1])
    assert dp.nodes == group.nodes and ep.nodes == 1
    for one in (ep, dp, group, ep):
        layer(one)
    if "boom" in sys.argv and rank == 1:
        raise ValueError("rank 1 has had enough")
    assert group.all_reduce(np.array([rank])).tolist() == [6]
assert group.closed and ep.closed and view.sum() > 0
# One that is still open when Python ends, with its rows.
last = ferry.init(comm, topology=shape)
kept = layer(last)
last.barrier()
# In one write: lines of several ranks must not run into each other.
os.write(1, f"rank {rank} is right\n".encode())
