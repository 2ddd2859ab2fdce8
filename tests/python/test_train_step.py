"""bench/train_step.py at tiny sizes on two virtual nodes, and the arithmetic of what it tells."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from test_mpi import LAUNCHERS, mpi4py_mpi

pytest.importorskip("torch")
BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
VARIANTS = ["flat", "rank_dedup", "node_gather", "node_dedup", "node_dedup_no_reuse", "gloo"]
TOKENS, ROW_BYTES, LAYERS = 4 * 16, 32 * 4, 2


@pytest.fixture
def corpus(tmp_path):
    draw = random.Random(5)
    for domain, words in (("hills", "green over far stone"), ("sums", "one two and makes")):
        text = " ".join(draw.choices(words.split(), k=1 << 15)).encode() * 2
        assert len(text) >= 1 << 17
        (tmp_path / f"{domain}.txt").write_bytes(text)
    return tmp_path


def variants():
    """Without gloo where this host's name has no address, by which gloo's ranks would meet."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return VARIANTS[:-1]
    return VARIANTS


def run(corpus):
    mpi = mpi4py_mpi()
    if mpi is None or shutil.which(LAUNCHERS[mpi][0]) is None or (
            mpi not in os.environ.get("FERRY_TEST_MPIS", "")):
        pytest.skip("no mpi4py, no launcher of its MPI, or no module for it")
    words = ["--nodes", 2, "--hidden", 32, "--intermediate", 16, "--num-layers", LAYERS,
             "--num-heads", 2, "--context", 16, "--batch", 4, "--repeat", 2, "--warm-up", 1]
    return subprocess.run(
        [*LAUNCHERS[mpi], sys.executable, "-B", str(BENCH / "train_step.py"), "--corpus", str(corpus),
         *map(str, words), "--start", str(corpus / "start"), "--train-first", "2", "--variants",
         *variants()],
        capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})


def test_steps_of_all_variants(corpus):
    said = run(corpus)
    assert said.returncode == 0, said.stderr
    result = json.loads(said.stdout.splitlines()[-1])
    assert (result["schema"], result["num_nodes"], result["num_ranks"]) == ("ferry.train_step/1", 2, 4)
    assert result["verified"] and 0 <= result["largest_loss_difference"] <= 1e-4
    assert result["losses"][1] != result["losses"][0] and result["load_of_ranks"] >= 1
    found = result["variants"]
    assert list(found) == variants()
    for name, variant in found.items():
        rounds = 4 if name == "node_dedup_no_reuse" else 1
        assert variant["metadata_rounds_per_layer"] == rounds, name
        assert 0 < variant["exchange_s"] < variant["step_s"], name
        assert variant["step_s_p10"] <= variant["step_s"] <= variant["step_s_p90"], name
    # There and back, forward and backward: at most a row per token, or per token and expert.
    rows = {name: found[name]["payload_bytes"] / (4 * LAYERS * ROW_BYTES) for name in found}
    assert rows["node_dedup"] <= rows["node_gather"] < rows["rank_dedup"] < rows["flat"]
    assert rows["rank_dedup"] < 2 * 1.1 * TOKENS and rows["flat"] < 8 * TOKENS
    if "gloo" in found:
        assert rows["gloo"] < rows["flat"] < rows["gloo"] * 1.1
    # Nearly: how ids are written depends on the plans before.
    assert found["node_dedup_no_reuse"]["metadata_bytes"] == pytest.approx(
        4 * found["node_dedup"]["metadata_bytes"], rel=0.01)
    assert set(result["speedup_vs_flat"]) == set(found) - {"flat"} and result["speedup_of_reuse"] > 0


def test_what_links_cost():
    from train_step import shares, speedups
    results = {"flat": {"step_s": 0.4, "busiest_node_bytes": 10_000_000},
               "node_dedup": {"step_s": 0.32, "busiest_node_bytes": 2_500_000}}
    free = {"variants": {"flat": {"step_s": 0.3}}}
    told = shares(results, 0.8e9, free)
    assert told == {"link_share": 0.25, "measured_share": 0.25}  # 80 Mbit are 0.1 s
    assert results["flat"]["ceiling_vs_flat"] == 1.0
    assert results["node_dedup"]["ceiling_vs_flat"] == round(1 / (1 - 0.25 * 0.75), 4)
    assert "measured_share" not in results["node_dedup"]
    assert shares({"gloo": {"step_s": 1.0, "busiest_node_bytes": 1}}, None, None) == {
        "link_share": None, "measured_share": None}

    from numpy import array
    found = speedups({"flat": array([2.0, 6.0, 4.0]), "node_dedup": array([1.0, 2.0, 4.0]),
                      "node_dedup_no_reuse": array([1.5, 3.0, 5.0])})
    assert found == {"speedup_vs_flat": {"node_dedup": 2.0, "node_dedup_no_reuse": round(4 / 3, 4)},
                     "speedup_of_reuse": 1.5}


def test_losses_that_differ():
    from types import SimpleNamespace

    from train_step import compare
    same = [SimpleNamespace(name=name, losses=[loss]) for name, loss in (("flat", 4.0), ("gloo", 4.0001))]
    assert compare(same) == pytest.approx(2.5e-5)
    for wrong in (4.001, float("nan")):
        same[1].losses[-1] = wrong
        with pytest.raises(SystemExit, match="the loss of gloo is .* that of flat 4; allowed"):
            compare(same)
