"""The language model of examples/, small: every split of the ranks trains alike, a killed run goes on
where it was, and what it decodes and records does not depend on the ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ferry

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))
from language_model import corpus as corpora  # noqa: E402
from language_model.corpus import Corpus, VALIDATION_BYTES  # noqa: E402
from language_model.model import Cache, LanguageModel, ModelConfig  # noqa: E402
from precision import LossScale  # noqa: E402
from language_model.training import TrainConfig, Trainer  # noqa: E402

MODEL = dict(hidden=32, num_layers=2, num_heads=2, context=16, num_experts=8, num_topk=2,
             intermediate=16, num_shared_experts=1, balance=0.01)
SPLITS = {"1 rank": (1, None), "2 ranks": (2, None), "4 ranks": (4, None), "2 x 2": (4, 2),
          "1 x 4": (4, 1)}
MPIS = [mpi for mpi in os.environ.get("FERRY_TEST_MPIS", "openmpi").split(",") if mpi]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A corpus of two domains, from words and from numbers."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(1)
    words = np.array(["the ", "whale ", "king ", "said ", "unto ", "sea, ", "and "])
    (folder / "words.txt").write_text("".join(random.choice(words, 60000)))
    (folder / "numbers.txt").write_text("".join(f"{n}, " for n in random.integers(0, 999, 50000)))
    return folder


def trained(group, text, steps, expert_parallel=None, model=None, **options):
    trainer = Trainer(group, ModelConfig(**{**MODEL, **(model or {})}),
                      TrainConfig(steps=20, batch=8, warmup=2, expert_parallel=expert_parallel,
                                  validation_windows=6, **options), Corpus(text))
    return trainer, [trainer.step() for _ in range(steps)]


def named_gradients(trainer):
    """By name, an expert's by its global id."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        prefix, _, last = name.rpartition(".experts.")
        if prefix:
            layer = trainer.model.get_submodule(prefix)
            for place, expert in enumerate(layer.local_experts):
                found[f"{prefix}.{expert}.{last}"] = parameter.grad[place].clone()
        else:
            found[name] = parameter.grad.clone()
    return found


def test_splits_give_the_same_gradients_and_losses(text):
    def run(group, expert_parallel):
        trainer, _ = trained(group, text, 0, expert_parallel)
        trainer.backward(trainer.batch(0))
        gradients = named_gradients(trainer)
        trainer.optimizer.zero_grad()
        return gradients, [trainer.step()["loss"] for _ in range(20)], trainer.validate()

    outcomes = {}
    for name, (ranks, expert_parallel) in SPLITS.items():
        results = ferry.run(run, 1, ranks, args=(expert_parallel,))
        gradients = {}
        for one, losses, perplexity in results:
            gradients.update(one)
            assert losses == results[0][1] and perplexity == results[0][2]
        outcomes[name] = gradients, results[0][1], results[0][2]
    want, losses, perplexity = outcomes["1 rank"]
    assert losses[-1] < losses[0] - 0.5 and len(want) == 2 * (8 * 3 + 10) + 3
    for name, (gradients, other, others_perplexity) in outcomes.items():
        assert gradients.keys() == want.keys()
        for key in want:
            scale = float(want[key].norm())
            assert float((gradients[key] - want[key]).norm()) <= 1e-5 * scale, (name, key)
        np.testing.assert_allclose(other, losses, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(list(others_perplexity.values()), list(perplexity.values()),
                                   rtol=1e-4)


def test_a_seed_twice_gives_the_same_bits(text):
    def run(group):
        trainer, records = trained(group, text, 6)
        return [r["loss"] for r in records], [p.detach().clone() for p in trainer.model.parameters()]

    first, second = ferry.run(run, 2, 2), ferry.run(run, 2, 2)
    for (losses, weights), (again, weights_again) in zip(first, second):
        assert losses == again
        assert all(torch.equal(one, other) for one, other in zip(weights, weights_again))
    other = ferry.run(lambda group: trained(group, text, 1, seed=2)[1][0]["loss"])[0]
    assert other != first[0][0][0]


def test_another_order_of_a_batch_is_the_same_step(text):
    plain, permuted = (ferry.run(lambda group: trained(group, text, 3, batch_order=order)[1], 1, 2)[0]
                       for order in (None, 5))
    assert [r["loss"] for r in plain] != [r["loss"] for r in permuted]  # other roundings
    np.testing.assert_allclose([r["loss"] for r in permuted], [r["loss"] for r in plain], rtol=1e-5)


def test_streams_below_fp32(text):
    def loss(format):
        model = {"stream_format": format}
        return ferry.run(lambda group: trained(group, text, 2, model=model)[1][-1]["loss"], 1, 2)[0]

    exact, *others = (loss(format) for format in ("f32", "bf16", "fp8_e4m3fn", "int8"))
    assert len({exact, *others}) == 4
    np.testing.assert_allclose(others, exact, rtol=0.01)


def test_the_dense_model_and_uneven_shares(text):
    def losses(ranks, **options):
        def run(group):
            return [r["loss"] for r in trained(group, text, 3, **options)[1]]
        return ferry.run(run, 1, ranks)[0]

    np.testing.assert_allclose(losses(3), losses(1), rtol=1e-5)  # 8 sequences over 3 ranks
    dense = {"num_experts": 0}
    np.testing.assert_allclose(losses(2, model=dense), losses(1, model=dense), rtol=1e-5)


def test_a_step_whose_gradient_overflows_is_left_out_on_every_rank(text):
    def run(group):
        trainer, _ = trained(group, text, 0, model={"row_dtype": "f16"}, loss_scale=2.0 ** 24,
                             dynamic_loss_scale=True)
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        first = trainer.step()
        kept = all(torch.equal(value, before[name])
                   for name, value in trainer.model.state_dict().items())
        after_first = trainer.loss_scale.value
        while not trainer.step()["taken"]:
            pass
        return first["taken"], kept, after_first, trainer.loss_scale.value

    results = ferry.run(run, 1, 2)
    assert results[0] == results[1]
    taken, kept, after_first, at_last = results[0]
    assert not taken and kept and after_first == 2.0 ** 23 and 1 < at_last <= after_first


def test_a_scaled_loss_is_the_same_step(text):
    """The auxiliary loss, which counts in backward, is scaled alike."""
    def run(group, scale):
        trainer, _ = trained(group, text, 0, model={"gate": "softmax", "balance": 0.5},
                             loss_scale=scale)
        trainer.backward(trainer.batch(0))
        return named_gradients(trainer), trainer.step()["grad_norm"]

    (plain, norm), (scaled, norm_scaled) = (ferry.run(run, 1, 2, args=(scale,))[0]
                                            for scale in (1.0, 1024.0))
    assert norm_scaled == norm
    assert all(torch.equal(scaled[name], plain[name]) for name in plain)  # a power of 2 is exact


def test_the_scale_grows_again():
    assert LossScale(dynamic=True).value == 2.0 ** 16
    scale = LossScale(8.0, dynamic=True, patience=2)
    for finite in (True, True, False, True, True):
        scale.update(finite)
    assert scale.value == 16.0
    fixed = LossScale(8.0)
    fixed.update(False)
    assert fixed.value == 8.0


def test_a_gate_that_is_rounded(text):
    def weights(group, dtype):
        trainer, records = trained(group, text, 2, model={"gate": "softmax", "gate_dtype": dtype})
        tokens = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
        return trainer.model.blocks[0].feed_forward.gate(tokens).topk_weights, records[-1]["loss"]

    for dtype, exact in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        (given, loss), = ferry.run(weights, args=(dtype,))
        assert torch.equal(given, given.to(exact).float()) and np.isfinite(loss)
    with pytest.raises(ValueError, match="gate_dtype = bf16 with gate = sigmoid"):
        LanguageModel(ModelConfig(gate_dtype="bf16"), None)


def test_decoding_with_a_cache_is_the_forward_of_all(text):
    def run(group):
        config = ModelConfig(**{**MODEL, "context": 6})
        model = LanguageModel(config, group).eval()
        tokens = torch.arange(20).view(1, 20) * 7 % 256
        with torch.no_grad():
            want, cache, parts = model(tokens), Cache(config), []
            for begin, end in ((0, 5), (5, 6), (6, 7), (7, 12), (12, 20)):
                parts.append(model(tokens[:, begin:end], cache))
        return float((torch.cat(parts, 1) - want).abs().max())

    assert ferry.run(run)[0] < 1e-4


def test_ranks_with_other_text_are_refused(tmp_path, text):
    shutil.copytree(text, tmp_path / "other")
    path = tmp_path / "other/words.txt"
    path.write_bytes(path.read_bytes().replace(b"whale", b"Whale", 1))

    def run(group):
        with pytest.raises(ValueError, match="the corpus of rank 1 is .* that of rank 0"):
            trained(group, text if group.rank == 0 else path.parent, 0)

    ferry.run(run, 1, 2)


def test_the_corpus_says_what_is_missing(tmp_path, text):
    with pytest.raises(ValueError, match="has nothing; fix: python3 examples"):
        Corpus(tmp_path)
    with pytest.raises(ValueError, match="has no poems; it has numbers, words"):
        Corpus(text, ["poems"])
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ValueError, match="short.txt has 9 bytes"):
        Corpus(tmp_path)
    whole = (text / "words.txt").read_bytes()
    one = Corpus(text, ["words"])
    batch = one.batch(3, 5, 4, 16)
    assert np.array_equal(batch, Corpus(text, ["words"]).batch(3, 5, 4, 16))
    assert not np.array_equal(batch, one.batch(3, 6, 4, 16))
    assert all(row.tobytes() in whole[:-VALIDATION_BYTES] for row in batch)
    assert all(row.tobytes() in whole[-VALIDATION_BYTES:] for row in one.validation("words", 9, 16))


@pytest.mark.skipif(shutil.which("bible") is None, reason="needs bible-kjv and bible-kjv-text")
def test_the_scripture_comes_from_debian(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_PACKAGES", {"absent": ("./no-such-package", "*.txt")})
    outcome = corpora.prepare(tmp_path)
    assert outcome["absent"].startswith("left out: ") and not (tmp_path / "absent.txt").exists()
    verses = (tmp_path / "scripture.txt").read_text().splitlines()
    assert verses[0] == "In the beginning God created the heaven and the earth."
    assert len(verses) == 31102


# The two programs, as a user starts them.

def program(name, *arguments, mpi_ranks=0):
    launcher = ["mpirun", "-n", str(mpi_ranks), "--oversubscribe", "--bind-to", "none"] * bool(mpi_ranks)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in MODEL.items()]
    return [*launcher, sys.executable, "-B", str(EXAMPLES / name),
            *map(str, arguments), *(options if name == "train_lm.py" else [])]


def started(command, **options):
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_mpi_yield_when_idle": "1"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, **options)


def output_of(command):
    process = started(command)
    told, _ = process.communicate(timeout=150)
    assert process.returncode == 0, told
    return told


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def losses_of(run):
    return {line["step"]: line["loss"] for line in log_of(run) if line["kind"] == "step"}


TRAINING = ("--steps=16", "--batch=8", "--warmup=2", "--save-every=2", "--validation-windows=4",
            "--log-every=4")


def refused(*arguments):
    process = started(program(*arguments))
    told, _ = process.communicate(timeout=60)
    assert process.returncode != 0, told
    return told


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory):
    """A run of four ranks that nothing disturbed, with its routing recorded."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    output_of(program("train_lm.py", f"--corpus={text}", f"--run={run}", *TRAINING, "--ranks=4",
                      "--record-windows=4"))
    return run


def test_a_run_that_is_killed_goes_on_where_it_was(text, whole_run, tmp_path):
    command = program("train_lm.py", f"--corpus={text}", f"--run={tmp_path}", *TRAINING, "--ranks=4")
    kills, random = 0, np.random.default_rng(3)
    for _ in range(3):
        before = set((tmp_path / "checkpoints").glob("step-*"))
        process = started(command, start_new_session=True)
        ends = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < ends and (
                set((tmp_path / "checkpoints").glob("step-*")) <= before):
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.05))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
    assert kills >= 2
    output_of(command)
    assert losses_of(tmp_path) == losses_of(whole_run)  # the same bits
    lines = [(line["kind"], line["step"]) for line in log_of(tmp_path) if line["kind"] != "run"]
    assert len(lines) == len(set(lines))


def test_a_run_goes_on_with_another_split_and_placement(text, whole_run, tmp_path):
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(newest) >= 2
    shutil.rmtree(newest[-1])  # as if it had not got there
    output_of(program("train_lm.py", f"--corpus={text}", f"--run={tmp_path}", *TRAINING,
                      "--ranks=2", "--placement=strided"))
    want = losses_of(whole_run)
    assert losses_of(tmp_path).keys() == want.keys()
    np.testing.assert_allclose(list(losses_of(tmp_path).values()), list(want.values()), rtol=1e-5)


def test_a_run_is_not_taken_for_another(text, whole_run, tmp_path):
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    command = ("train_lm.py", f"--corpus={text}", f"--run={tmp_path}", *TRAINING, "--ranks=2")
    assert "is of a run with weight_decay = 0.1, this one has 0.5" in refused(
        *command, "--weight-decay=0.5")
    log = (tmp_path / "log.jsonl").read_text()
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    (newest / "rank-00001.npz").unlink()
    assert "rank-00001.npz cannot be read (No such file" in refused(*command)
    assert (tmp_path / "log.jsonl").read_text() == log  # and nothing began anew


@pytest.mark.parametrize("options, text_of", [
    (["--save-every=0"], "save_every = 0; allowed: at least 1"),
    (["--ranks=3", "--nodes=2"], "--ranks 3 --nodes 2: as many on every node"),
    (["--nodes=0"], "--nodes 0: at least 1"),
    (["--gate-dtype=bf16"], "gate_dtype = bf16 with gate = sigmoid"),
    (["--record-windows=4"], "--record-windows needs --run")], ids=str)
def test_options_that_do_not_go_together(options, text_of):
    assert text_of in refused("train_lm.py", *options)


def test_processes_train_as_threads_do(text, whole_run, tmp_path):
    if "openmpi" not in MPIS:
        pytest.skip("needs Open MPI and mpi4py")
    output_of(program("train_lm.py", f"--corpus={text}", f"--run={tmp_path}", *TRAINING, "--nodes=2",
                      mpi_ranks=4))
    (run,) = (line for line in log_of(tmp_path) if line["kind"] == "run")
    assert (run["num_ranks"], run["num_nodes"]) == (4, 2)
    want, got = losses_of(whole_run), losses_of(tmp_path)
    np.testing.assert_allclose([got[step] for step in want], list(want.values()), rtol=1e-5)
    counts = [line["expert_counts"] for line in log_of(tmp_path) if line.get("expert_counts")]
    assert np.array(counts).shape == (4, 2, 8) and (np.array(counts).sum(2) == 8 * 16 * 2).all()


def test_every_split_decodes_the_same_text(whole_run):
    def decoded(*arguments, mpi_ranks=0):
        told = output_of(program("generate.py", whole_run, "--json", "--tokens=24", *arguments,
                                 "--prompt", "the whale", "and the king ", "12", mpi_ranks=mpi_ranks))
        return json.loads(told.splitlines()[-1])

    greedy = decoded()
    assert [text[:9] for text in greedy["texts"][:1]] == ["the whale"]
    assert [len(text.encode()) for text in greedy["texts"]] == [33, 37, 26]
    assert 0 < greedy["p50_ms"] <= greedy["p99_ms"] and greedy["tokens_per_s"] > 0
    assert decoded("--ranks=4")["texts"] == greedy["texts"]
    if "openmpi" in MPIS:
        over_mpi = decoded(mpi_ranks=2)
        assert over_mpi["texts"] == greedy["texts"] and over_mpi["num_ranks"] == 2
    warm = decoded("--temperature=1", "--ranks=2")
    assert warm["texts"] != greedy["texts"] and decoded("--temperature=1")["texts"] == warm["texts"]


def test_the_routing_of_a_run_is_a_trace(whole_run):
    command = os.environ.get("FERRY_COMMAND")
    for domain in ("words", "numbers"):
        trace = whole_run / "routing" / domain
        meta = json.loads((trace / "meta.json").read_text())
        assert meta["sequence_lengths"] == [16] * 4 and meta["num_experts"] == 8
        assert np.load(trace / "topk_idx.npy").shape == (64, 2, 2)
        if command:
            told = subprocess.run([command, "bench", "--trace", str(trace), "--nodes=2",
                                   "--ranks-per-node=2", "--repeat=1", "--json"], text=True,
                                  capture_output=True, check=True).stdout
            assert json.loads(told.splitlines()[0])
