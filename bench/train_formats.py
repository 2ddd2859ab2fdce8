"""Trains small models in several precisions with the same seeds, and says how far each ends from FP32.

    python3 bench/train_formats.py RESULTS formats --corpus build/corpus    # language model, wire formats
    python3 bench/train_formats.py RESULTS pitfalls --corpus build/corpus   # settings that harm, beside sound ones
    python3 bench/train_formats.py RESULTS digits                           # all of them, with train_digits.py
    python3 bench/train_formats.py RESULTS formats --table                  # the table of what is there

RESULTS/SERIES/VARIANT-SEED are --run folders of the examples; runs that are there are kept, so an
interrupted series goes on. Seeds are the outer loop: a part of the series is paired, too. A control
differs from its base in the order of sums alone: what rounding does to a run. The table has the mean
difference over paired seeds with its 95 % confidence interval; the spread is the standard deviation
of the base over its seeds. Other options go to the example. Needs python3-scipy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from scipy import stats

_ROOT = Path(__file__).resolve().parent.parent
_SEED = "{seed}"  # stands for the run's own
_MPI = "mpirun -n 2 --oversubscribe --bind-to none"  # a rank on each virtual node
_SMALL_MODEL = ["--nodes=2", "--num-layers=2", "--num-experts=32", "--num-topk=4", "--batch=16",
                "--validation-windows=128"]
#: Gradients as small as those of a step of 2^26 tokens (67 million; DeepSeek-V3's had 63), which has so
#: many times as many. A power of two changes no bit in FP32.
_SMALL = {"train_lm.py": 2.0 ** -15, "train_digits.py": 2.0 ** -16}
_F16 = ["--stream-format=f16", "--row-dtype=f16"]
_OUTLIER = "--outlier=100"

Variants = Dict[str, Tuple[str, List[str]]]  # variant -> what it is compared with, its options

_FORMATS: Variants = {
    "f32": ("f32", []),
    "control": ("f32", [f"--batch-order={_SEED}"]),
    "int8 dispatch, bf16 combine": ("f32", ["--wire-dispatch=int8", "--wire-combine=bf16"]),
    "int8": ("f32", ["--wire-dispatch=int8", "--wire-combine=int8"]),
    "fp8": ("f32", ["--wire-dispatch=fp8_e4m3fn", "--wire-combine=fp8_e4m3fn"]),
}
def _gradients(script: str) -> Variants:
    unscaled = f"--loss-scale={_SMALL[script]}"
    dynamic = [f"--loss-scale={_SMALL[script] * 2 ** 17}", "--dynamic-loss-scale"]
    return {
        "small gradients, f16, dynamic scale": ("f32", [*_F16, *dynamic]),
        "small gradients, f16, unscaled": ("f32", [*_F16, unscaled]),
        "small gradients, f16 wires, unscaled": (
            "f32", ["--wire-combine-backward=f16", "--wire-dispatch-backward=f16", unscaled]),
    }


_STREAM: Variants = {
    "fp8 stream": ("f32", ["--stream-format=fp8_e4m3fn"]),
    "int8 stream": ("f32", ["--stream-format=int8"]),
}
_OUTLIERS: Variants = {
    "outlier, f32": ("outlier, f32", [_OUTLIER]),
    "outlier, bf16 stream": ("outlier, f32", [_OUTLIER, "--stream-format=bf16"]),
    "outlier, fp8 stream": ("outlier, f32", [_OUTLIER, "--stream-format=fp8_e4m3fn"]),
    "outlier, int8 stream": ("outlier, f32", [_OUTLIER, "--stream-format=int8"]),
}


class Series(NamedTuple):
    """One model's runs; `options` hold for all of them."""

    script: str
    launcher: str
    options: List[str]
    variants: Variants

    @property
    def in_percent(self) -> bool:
        """Differences of the language model are of perplexity; those of the digits of the loss."""
        return self.script == "train_lm.py"

    def differences(self, losses: np.ndarray, bases: np.ndarray) -> np.ndarray:
        return 100 * np.expm1(losses - bases) if self.in_percent else losses - bases


SERIES = {
    "formats": Series("train_lm.py", _MPI, [*_SMALL_MODEL, "--steps=200", "--warmup=20",
                                            "--learning-rate=1e-3"], _FORMATS),
    "pitfalls": Series("train_lm.py", _MPI, [*_SMALL_MODEL, "--steps=60", "--warmup=10"], {
        "f32": ("f32", []), **_gradients("train_lm.py"), **_STREAM,
        "softmax gate": ("softmax gate", ["--gate=softmax"]),
        "softmax gate, bf16": ("softmax gate", ["--gate=softmax", "--gate-dtype=bf16"])}),
    "digits": Series("train_digits.py", "", ["--ranks=2", "--nodes=2", "--steps=100"], {
        **_FORMATS, "gate, bf16": ("f32", ["--gate-dtype=bf16"]),
        "gate, f16": ("f32", ["--gate-dtype=f16"]), **_gradients("train_digits.py"), **_STREAM,
        **_OUTLIERS}),
}


def folder_of(results: Path, variant: str, seed: int) -> Path:
    return results / f"{variant.replace(',', '').replace(' ', '-')}-{seed}"


def last_loss(run: Path, steps: int) -> Optional[float]:
    """Nats at the end of a run: of the language model the mean over the domains, of the digits that of
    the images it was trained on. None where the run has not ended."""
    log = run / "log.jsonl"
    found = [line for line in map(json.loads, log.read_text().splitlines())
             if line["kind"] == "validation"] if log.exists() else []
    if not found or found[-1]["step"] != steps:
        return None
    if "train" in found[-1]:
        return found[-1]["train"]["loss"]
    return float(np.mean(np.log(list(found[-1]["perplexity"].values()))))


def train(results: Path, series: Series, seeds: List[int], options: List[str], steps: int) -> None:
    for seed in seeds:
        for variant, (_, own) in series.variants.items():
            run = folder_of(results, variant, seed)
            if last_loss(run, steps) is not None:
                continue
            print(f"{variant}, seed {seed}", file=sys.stderr, flush=True)
            subprocess.run([*shlex.split(series.launcher), sys.executable, "-B",
                            str(_ROOT / "examples" / series.script), *options,
                            *(part.replace(_SEED, str(seed)) for part in own),
                            f"--seed={seed}", f"--run={run}"], check=True)


def interval(differences: np.ndarray) -> Tuple[float, float, float]:
    """Mean, and the bounds of its 95 % confidence interval (Student's t)."""
    mean, count = float(differences.mean()), len(differences)
    if count < 2:
        return mean, -math.inf, math.inf
    half = stats.t.ppf(0.975, count - 1) * differences.std(ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def ends(results: Path, series: Series, seeds: List[int], steps: int) -> Dict[str, Dict[int, float]]:
    """variant -> seed -> loss, of the runs that have ended."""
    found = {variant: {seed: last_loss(folder_of(results, variant, seed), steps) for seed in seeds}
             for variant in series.variants}
    return {variant: {seed: loss for seed, loss in losses.items() if loss is not None}
            for variant, losses in found.items()}


def table(series: Series, losses: Dict[str, Dict[int, float]]) -> str:
    """Markdown."""
    value, unit, scale = (math.exp, " %", 100) if series.in_percent else (float, "", 1)
    lines = [f"| variant | seeds | {'perplexity per byte' if series.in_percent else 'loss'} | difference | "
             "95 % interval | of the spread |", "|---|---|---|---|---|---|"]
    for variant, (base, _) in series.variants.items():
        paired = sorted(set(losses[variant]) & set(losses[base]))
        if not paired:
            continue
        own, bases = (np.array([losses[name][seed] for seed in paired]) for name in (variant, base))
        spread = bases.std(ddof=1) if len(paired) > 1 else math.nan
        first = f"| {variant} | {len(paired)} | {value(own.mean()):.4g} |"
        if variant == base:
            lines.append(f"{first} | spread {scale * spread:.3g}{unit} | |")
            continue
        mean, low, high = interval(series.differences(own, bases))
        lines.append(f"{first} {mean:+.2g}{unit} | {low:+.2g}{unit} to {high:+.2g}{unit} | "
                     f"{(own - bases).mean() / spread:+.1f} |")
    return "\n".join(lines)


def draw(series: Series, losses: Dict[str, Dict[int, float]], path: Path) -> None:
    """Every variant's differences by seed, their mean and its interval."""
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    matplotlib.rcParams.update({"svg.hashsalt": "ferry", "font.size": 9, "axes.grid": True,
                                "grid.alpha": 0.3, "axes.spines.top": False,
                                "axes.spines.right": False})
    variants = [name for name, (base, _) in series.variants.items() if name != base and losses[name]]
    figure, axis = plt.subplots(figsize=(5.4, 0.5 + 0.45 * len(variants)))
    for place, variant in enumerate(variants):
        bases = losses[series.variants[variant][0]]
        paired = [(loss, bases[seed]) for seed, loss in losses[variant].items() if seed in bases]
        differences = series.differences(*np.array(paired).T)
        mean, low, high = interval(differences)
        axis.plot(differences, np.full(len(differences), place), "o", color="0.6", markersize=4)
        if len(differences) > 1:
            axis.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="D", color="C0",
                          capsize=3)
    axis.set_yticks(range(len(variants)), variants)
    axis.invert_yaxis()
    axis.axvline(0, color="black", linewidth=0.8)
    what = "perplexity, percent" if series.in_percent else "loss"
    axis.set_xlabel(f"{what} above the base: seeds, mean, 95 % interval")
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("series", choices=SERIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="default: all of the series")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--table", action="store_true", help="only the table of the runs that are there")
    parser.add_argument("--figure", type=Path, help="an SVG file of the differences")
    own, rest = parser.parse_known_args()
    series, results = SERIES[own.series], own.results / own.series
    if own.variants:
        series = series._replace(variants={name: series.variants[name] for name in own.variants})
    options = [*series.options, *rest] + ([f"--steps={own.steps}"] if own.steps else [])
    steps = int(next(o for o in reversed(options) if o.startswith("--steps=")).split("=")[1])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not own.table:
        train(results, series, own.seeds, options, steps)
    losses = ends(results, series, own.seeds, steps)
    print(table(series, losses))
    if own.figure:
        draw(series, losses, own.figure)


if __name__ == "__main__":
    main()
