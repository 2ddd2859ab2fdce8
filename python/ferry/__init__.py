"""Ferry carries tokens to the experts of a Mixture-of-Experts layer and brings the sums home.

    def layer(group):
        placement = ferry.Placement.contiguous(num_experts, group.size)
        exchange = ferry.Exchange(group, placement, hidden=1024, dtype="f32")
        plan = exchange.plan(topk_idx, topk_weights)   # the only exchange of counts and ids
        rows = exchange.dispatch(plan, x)              # tokens of this rank's experts
        y = exchange.output(plan)                      # write the experts' outputs here
        y.numpy()[:] = experts(rows.numpy())
        return exchange.combine(plan, y)               # out[t] = sum_j w[t,j] * y(t,j)

    outs = ferry.run(layer, nodes=2, ranks_per_node=4)  # ranks are threads: no launcher

Under mpirun or srun each process is a rank: ``with ferry.init() as group: layer(group)``.
"""

from ._errors import (
    CancelledError,
    CorruptMessageError,
    Error,
    InvalidArgumentError,
    LimitExceededError,
    MismatchError,
    PeerFailedError,
    PeerTimeoutError,
    PrecisionWarning,
    ResourceExhaustedError,
    StalePlanError,
    UnsupportedError,
    WrongThreadError,
)
from ._exchange import Exchange, choose_wires
from ._ferry import (
    Array,
    ExpertRows,
    GradRows,
    OutputRows,
    Pending,
    Placement,
    Plan,
    PlanSummary,
    RowSources,
    Topology,
    WindowRows,
    __version__,
)
from ._group import Group
from ._init import init
from ._run import run

__all__ = [
    "Array",
    "CancelledError",
    "CorruptMessageError",
    "Error",
    "Exchange", "choose_wires",
    "ExpertRows",
    "GradRows",
    "Group",
    "InvalidArgumentError",
    "LimitExceededError",
    "MismatchError",
    "OutputRows",
    "PeerFailedError",
    "PeerTimeoutError",
    "Pending",
    "Placement",
    "Plan",
    "PlanSummary",
    "PrecisionWarning",
    "ResourceExhaustedError",
    "RowSources",
    "StalePlanError",
    "Topology",
    "UnsupportedError",
    "WindowRows",
    "WrongThreadError",
    "__version__",
    "init",
    "run",
]
