"""Rows that leave before routing is known: start_gather beside the gate, against one after the other.

    python3 bench/gather_first.py --link-rate 1e9

Two virtual nodes of one rank each, strategy node_gather, links slowed to a rate. *gate*: a router of
some work, which must end before the plan can be made; it polls between blocks of tokens. Prints one
JSON object, medians in microseconds: `in_turn` is gate, plan, dispatch; `beside` starts the rows
first, and then the gate.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Callable

import numpy as np

import ferry


def measure(group: ferry.Group, options: argparse.Namespace) -> dict[str, float]:
    draw = np.random.default_rng(group.rank)
    x = draw.standard_normal((options.tokens, options.hidden), np.float32)
    router = draw.standard_normal((options.hidden, options.experts), np.float32)
    scores = np.empty((options.tokens, options.experts), np.float32)
    placement = ferry.Placement.contiguous(options.experts, group.size)
    exchange = ferry.Exchange(group, placement, options.hidden, "f32", strategy="node_gather")

    def gate(poll: Callable[[], object] = lambda: None) -> tuple[np.ndarray, np.ndarray]:
        for first in range(0, options.tokens * options.gate_passes, options.block):
            at = first % options.tokens
            scores[at:at + options.block] = x[at:at + options.block] @ router
            poll()
        idx = np.argpartition(-scores, options.topk, axis=1)[:, :options.topk].astype(np.int32)
        return idx, np.full(idx.shape, 1 / options.topk, np.float32)

    def in_turn() -> np.ndarray:
        plan = exchange.plan(*gate())
        return exchange.dispatch(plan, x).numpy()

    def beside() -> np.ndarray:
        gathering = exchange.start_gather(x)
        exchange.plan(*gate(gathering.progress), gathering=gathering)
        return gathering.wait().numpy()

    known = exchange.plan(*gate())
    if not np.array_equal(in_turn(), beside()):
        raise SystemExit("rows that left first are not those of a dispatch")
    times: dict[str, list[float]] = {}
    calls: dict[str, Callable[[], object]] = {
        "gate": gate, "dispatch": lambda: exchange.dispatch(known, x),
        "in_turn": in_turn, "beside": beside}
    for _ in range(options.repeat):
        for name, call in calls.items():
            group.barrier()
            start = time.perf_counter()
            call()
            took = np.array([(time.perf_counter() - start) * 1e6])
            times.setdefault(name, []).append(float(group.all_reduce(took, "max")[0]))
    return {f"{name}_us": round(float(np.median(values))) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("tokens", 1024), ("hidden", 1024), ("experts", 64), ("topk", 8),
                          ("gate-passes", 1), ("block", 16), ("repeat", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--link-rate", type=float, default=1e9, help="bits per second of a node")
    options = parser.parse_args()
    result = ferry.run(measure, nodes=2, ranks_per_node=1, link_bits_per_s=options.link_rate,
                       args=(options,))[0]
    hidden = (result["in_turn_us"] - result["beside_us"]) / min(result["gate_us"],
                                                               result["dispatch_us"])
    print(json.dumps({"schema": "ferry.gather_first/1", **vars(options), **result,
                      "hidden_share": round(hidden, 3)}))


if __name__ == "__main__":
    main()
