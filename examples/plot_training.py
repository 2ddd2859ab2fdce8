"""Draws what training runs left in their logs, and what whole steps took: SVG files with matplotlib.

    python3 examples/plot_training.py --moe RUN... --dense RUN... --output docs/images

RUN are --run folders of train_lm.py. Every figure is drawn whose input is given.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

matplotlib.rcParams.update({"svg.hashsalt": "ferry", "font.size": 9, "axes.spines.top": False,
                            "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3})
PARTS = {"forward_s": "forward", "backward_s": "backward", "reduce_s": "sum of gradients",
         "update_s": "update"}


def lines(run: Path, kind: str) -> list[dict]:
    """Of a log; a run that was killed may have left half a line."""
    whole = [line for line in (run / "log.jsonl").read_text().splitlines() if line.endswith("}")]
    return [line for line in map(json.loads, whole) if line["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run, "step")}


def save(figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    print(path)


def below(figure, axis, height: float = -0.12) -> None:
    """One legend under all panels."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False,
                  bbox_to_anchor=(0.5, height))


def perplexities(runs: list[Path], domain: str) -> tuple[list[int], np.ndarray]:
    """Steps, and [runs, steps]."""
    logs = [{line["step"]: line["perplexity"][domain] for line in lines(run, "validation")}
            for run in runs]
    steps = sorted(set.intersection(*map(set, logs)))
    return steps, np.array([[log[step] for step in steps] for log in logs])


def draw_perplexity(moe: list[Path], dense: list[Path], path: Path) -> None:
    """Validation perplexity of every domain: mean over the seeds, and their range."""
    domains = sorted(lines(moe[0], "validation")[-1]["perplexity"])
    figure, axes = plt.subplots(1, len(domains), figsize=(3.1 * len(domains), 2.8), squeeze=False)
    for axis, domain in zip(axes[0], domains):
        for runs, name in ((moe, "Mixture of Experts"), (dense, "dense, same active parameters")):
            if not runs:
                continue
            steps, values = perplexities(runs, domain)
            axis.plot(steps, values.mean(0), label=name)
            axis.fill_between(steps, values.min(0), values.max(0), alpha=0.25)
        axis.set(title=domain, xlabel="step", yscale="log")
        axis.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%.1f"))
        axis.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%.1f"))
        axis.tick_params(axis="y", which="minor", labelsize=7)
    axes[0][0].set_ylabel("perplexity per byte")
    below(figure, axes[0][0])
    save(figure, path)


def draw_spread(base: Path, controls: list[Path], splits: list[Path], path: Path) -> None:
    """How far losses are from the base run's: other orders of a sum, and other splits of the ranks."""
    want = losses(base)
    figure, axis = plt.subplots(figsize=(5.4, 3))
    for runs, colour, style in ((controls, "0.6", "-"), (splits, None, "--")):
        for number, run in enumerate(runs):
            got = losses(run)
            steps = [step for step in want if step in got]
            label = "another order of the batch" if runs is controls else run.name
            axis.plot(steps, [max(abs(got[s] - want[s]), 1e-9) for s in steps], style, color=colour,
                      label=label if runs is splits or number == 0 else None)
    axis.set(yscale="log", xlabel="step", ylabel="difference of the loss, nats per byte")
    axis.legend(frameon=False)
    save(figure, path)


def draw_load(run: Path, path: Path) -> None:
    """Expert counts of the layers over the steps, as shares of an even load."""
    records = [line for line in lines(run, "step") if line.get("expert_counts")]
    counts = np.array([line["expert_counts"] for line in records], dtype=float)
    loads = counts / counts.mean(2, keepdims=True)
    figure, axes = plt.subplots(1, loads.shape[1], figsize=(2.4 * loads.shape[1], 2.8), sharey=True)
    for layer, axis in enumerate(np.atleast_1d(axes)):
        image = axis.imshow(loads[:, layer], aspect="auto", vmin=0, vmax=3, cmap="viridis",
                            extent=(0, loads.shape[2], records[-1]["step"], records[0]["step"]))
        axis.set(title=f"layer {layer}", xlabel="expert")
        axis.grid(False)
    np.atleast_1d(axes)[0].set_ylabel("step")
    figure.colorbar(image, ax=axes, label="load / mean load")
    save(figure, path)


def draw_steps(results: list[Path], path: Path) -> None:
    """Parts of a whole step by exchange, one panel per result of bench/train_step.py."""
    figure, axes = plt.subplots(1, len(results), figsize=(3.1 * len(results), 2.8), squeeze=False,
                                sharey=True)
    for axis, file in zip(axes[0], results):
        result = json.loads(file.read_text().splitlines()[-1])
        names, bottom = list(result["variants"]), np.zeros(len(result["variants"]))
        for part, label in PARTS.items():
            values = np.array([result["variants"][name][part] for name in names])
            axis.bar(names, values, bottom=bottom, label=label)
            bottom += values
        plt.setp(axis.get_xticklabels(), rotation=45, ha="right", rotation_mode="anchor")
        rate = result.get("link_bits_per_s")
        axis.set_title("no limit" if not rate else f"{rate / 1e6:.0f} Mbit/s")
    axes[0][0].set_ylabel("seconds per step")
    below(figure, axes[0][0], -0.38)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, what in (("moe", "runs of the model, one per seed"),
                       ("dense", "runs of the dense model"),
                       ("controls", "runs with --batch-order"),
                       ("splits", "runs on other splits of the ranks"),
                       ("steps", "results of bench/train_step.py")):
        parser.add_argument(f"--{name}", type=Path, nargs="+", default=[], help=what)
    parser.add_argument("--base", type=Path, help="the run that controls and splits differ from")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.moe:
        draw_perplexity(options.moe, options.dense, options.output / "training-perplexity.svg")
        draw_load(options.moe[0], options.output / "training-load.svg")
    if options.base and (options.controls or options.splits):
        draw_spread(options.base, options.controls, options.splits,
                    options.output / "training-spread.svg")
    if options.steps:
        draw_steps(options.steps, options.output / "training-steps.svg")


if __name__ == "__main__":
    main()
