"""What pipelining hides: a step of `ferry.torch.MoELayer` beside its compute and its wire alone.

    lab/run --name lab0 --ranks-per-host 2 -- python3 bench/overlap.py --intermediate 64

A step is forward and backward of one layer. *wire*: the same step with experts that do nothing, in
as many chunks. *compute*: gate and experts of one step on rows that are there, on all ranks at once.
Prints one JSON object; `step_over_longest` is the step over the longer of the two.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Callable

import numpy as np
import torch
from torch import Tensor, nn

import ferry
import ferry.torch


class NoExperts(nn.Module):
    """y = row: what is left is the exchange."""

    def forward(self, rows: Tensor, expert_counts: list[int]) -> Tensor:
        return rows.clone()


def timed(group: ferry.Group, call: Callable[[], None]) -> float:
    """Microseconds from a common start to the end of the last rank."""
    group.barrier()
    start = time.perf_counter()
    call()
    return float(group.all_reduce(np.array([(time.perf_counter() - start) * 1e6]), "max")[0])


def measure(group: ferry.Group, options: argparse.Namespace) -> dict:
    random = torch.Generator().manual_seed(group.rank)
    x = torch.randn(options.tokens, options.hidden, generator=random)
    grad = torch.randn(options.tokens, options.hidden, generator=random)

    def layer(overlap: int, experts: nn.Module | None = None) -> ferry.torch.MoELayer:
        return ferry.torch.MoELayer(options.hidden, options.intermediate, options.experts,
                                    options.topk, group=group, overlap=overlap, experts=experts,
                                    seed=1)

    plain, piped = layer(1), layer(options.overlap)
    wire = layer(options.overlap, NoExperts())
    rows, counts = [], []

    def step(which: ferry.torch.MoELayer) -> Callable[[], None]:
        return lambda: which(x.clone().requires_grad_()).backward(grad)

    def compute() -> None:
        plain.gate(x).topk_weights.sum().backward()
        own = rows[0].detach().requires_grad_()
        plain.experts(own, counts[0]).backward(rows[0])

    hook = plain.experts.register_forward_pre_hook(
        lambda module, inputs: (rows.append(inputs[0].detach().clone()),
                                counts.append(list(inputs[1]))) and None)
    step(plain)()
    hook.remove()
    times: dict[str, list[float]] = {"step_plain": [], "step": [], "wire": [], "compute": []}
    calls = {"step_plain": step(plain), "step": step(piped), "wire": step(wire), "compute": compute}
    for repeat in range(-1, options.repeat):
        for name, call in calls.items():
            took = timed(group, call)
            if repeat >= 0:
                times[name].append(took)
    medians = {f"{name}_us": round(float(np.median(values))) for name, values in times.items()}
    longest = max(medians["wire_us"], medians["compute_us"])
    return {"schema": "ferry.overlap/1", "num_ranks": group.size, "num_nodes": group.nodes,
            "tokens_per_rank": options.tokens, "hidden": options.hidden,
            "intermediate": options.intermediate, "overlap": options.overlap,
            "progress_thread": options.progress_thread, **medians,
            "step_over_longest": round(medians["step_us"] / longest, 3),
            "step_plain_over_longest": round(medians["step_plain_us"] / longest, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("tokens", 512), ("hidden", 1024), ("intermediate", 64),
                          ("experts", 16), ("topk", 8), ("overlap", 4), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--progress-thread", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ferry.init(progress_thread=options.progress_thread) as group:
        result = measure(group, options)
        if group.rank == 0:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
