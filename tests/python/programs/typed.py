"""A program as users write it, for mypy --strict; it runs, too."""

import numpy as np
import numpy.typing as npt

import ferry


def layer(group: ferry.Group) -> float:
    placement = ferry.Placement.from_map([0, 1])
    exchange = ferry.Exchange(group, placement, hidden=8, dtype="f32", strategy="flat")
    ids: npt.NDArray[np.int64] = np.zeros((3, 1), np.int64)
    plan: ferry.Plan = exchange.plan(ids)
    pending: ferry.Pending[ferry.ExpertRows] = exchange.start_dispatch(
        plan, np.ones((3, 8), np.float32))
    rows: ferry.ExpertRows = pending.wait()
    counts: npt.NDArray[np.int64] = plan.expert_counts
    exchange.combine(plan, rows)
    summary: ferry.PlanSummary = plan.summary
    try:
        group.barrier()
    except ferry.Error as error:
        print(error.code.upper())
    return float(rows.numpy().sum()) + float(counts.sum()) + summary.rows_received


results: list[float] = ferry.run(layer, nodes=1, ranks_per_node=2)
assert results == [60.0, 0.0], results
