"""bench/train_formats.py: the arithmetic of its table, and a series that goes on where it was."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))
from train_formats import SERIES, ends, folder_of, interval, table  # noqa: E402


def write_end(run, step, perplexity):
    run.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "run"}, {"kind": "validation", "step": step,
                               "perplexity": {"a": perplexity / 2, "b": perplexity * 2}}]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_interval_is_student_s():
    # Of 1, 2, 3: mean 2, deviation 1; t of two degrees of freedom at 97.5 % is 4.3027.
    mean, low, high = interval(np.array([1.0, 2.0, 3.0]))
    assert (mean, low, high) == pytest.approx((2, 2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)),
                                              rel=1e-4)
    assert interval(np.array([1.0]))[1:] == (-math.inf, math.inf)


def test_only_pairs_of_runs_that_ended_count(tmp_path):
    series = SERIES["formats"]
    for seed, (base, other) in enumerate([(4.0, 4.04), (5.0, 5.05), (6.0, 6.06)]):
        write_end(folder_of(tmp_path, "f32", seed), 200, base)
        write_end(folder_of(tmp_path, "int8", seed), 200, other)
    write_end(folder_of(tmp_path, "int8", 3), 200, 100.0)  # without its base
    write_end(folder_of(tmp_path, "f32", 4), 200, 7.0)     # without another
    write_end(folder_of(tmp_path, "control", 0), 100, 9.0)  # not at its end
    rows = table(series, ends(tmp_path, series, range(5), 200)).splitlines()
    assert len(rows) == 4  # a head of two, f32, int8
    spread = np.log([4, 5, 6]).std(ddof=1)
    (int8,) = (row for row in rows if row.startswith("| int8 |"))
    cells = [cell.strip() for cell in int8.strip("|").split("|")]
    assert cells == ["int8", "3", f"{120 ** (1 / 3) * 1.01:.4g}", "+1 %", "+1 % to +1 %",
                     f"{math.log(1.01) / spread:+.1f}"]


def test_a_series_of_digits_goes_on_where_it_was(tmp_path):
    command = [sys.executable, "-B", str(BENCH / "train_formats.py"), str(tmp_path), "digits",
               "--seeds", "1", "2", "--steps=2", "--variants", "f32", "small gradients, f16, unscaled"]

    def output():
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done

    first = output()
    assert first.stderr.count(", seed 1\n") == first.stderr.count(", seed 2\n") == 2
    assert "| f32 | 2 | " in first.stdout and "small gradients, f16, unscaled | 2 | " in first.stdout
    again = output()
    assert ", seed" not in again.stderr
    assert again.stdout.splitlines()[-4:] == first.stdout.splitlines()[-4:]
    command.append(f"--figure={tmp_path / 'series.svg'}")
    output()
    assert (tmp_path / "series.svg").read_text().count("<svg") == 1


def test_every_variant_s_base_is_in_its_series():
    for series in SERIES.values():
        assert {base for base, _ in series.variants.values()} <= series.variants.keys()
