"""Prints what bench/train_step.py found as tables of Markdown, one per file.

    python3 bench/train_step_table.py results/1gbit.json ...

Times are milliseconds; bench/train_step.py says what they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_TIMES = ("step", "forward", "backward", "exchange", "reduce", "update", "link")


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.0f} %"


def table(result: dict[str, Any]) -> str:
    rate = result["link_bits_per_s"]
    lines = [
        f"Links {'without a limit' if rate is None else f'of {rate / 1e6:g} Mbit/s'}, "
        f"{result['num_ranks']} ranks on {result['num_nodes']} nodes, {result['tokens_per_step']} "
        f"tokens a step, hidden {result['hidden']}, {result['num_layers']} layers of "
        f"{result['num_experts']} experts of width {result['intermediate']}, top-{result['num_topk']}; "
        f"medians of {result['repeat']} steps. Share of flat's step: {_percent(result['link_share'])} "
        f"by bytes, {_percent(result['measured_share'])} measured.", "",
        f"| | {' | '.join(_TIMES)} | bytes | rounds | tokens/s | vs flat | ceiling | vs gloo |",
        "|---|" + "---|" * (len(_TIMES) + 6)]
    for name, variant in result["variants"].items():
        times = (variant.get(f"{part}_s") for part in _TIMES)
        against = [result.get(f"speedup_vs_{base}", {}).get(name) for base in ("flat", "gloo")]
        against.insert(1, variant.get("ceiling_vs_flat"))
        cells = [*("" if time is None else f"{1e3 * time:.1f}" for time in times),
                 f"{variant['inter_node_bytes'] / 1e6:.1f} MB",
                 f"{variant['metadata_rounds_per_layer']:g}", f"{variant['tokens_per_s']:.0f}",
                 *("" if value is None else f"{value:.2f}" for value in against)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if "speedup_of_reuse" in result:
        lines += ["", f"Plans that are kept: {result['speedup_of_reuse']:.3f} x."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(table(json.loads(Path(path).read_text())))
