"""Checkpoints on a disk: what is noticed when files change, disks that fail, kills at any moment."""

import json
import os
import random
import resource
import shutil
import sys
import threading
import time
import zipfile
import zlib

import pytest
import torch
from torch import nn

import ferry
from ferry.torch import (checkpoint_extra, latest_checkpoint, load_checkpoint, save_checkpoint,
                         saving_files)
from saving_jobs import (PROGRAMS, Job, entries, failing_saves, loaded, refusals, run, run_program,
                         saved)

EXPERT_7 = "model/1.moe.experts/7/w1"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A directory with one checkpoint, what was held, and the loss."""
    directory = tmp_path_factory.mktemp("run")
    return directory, *saved(directory)


@pytest.fixture
def run7(original, tmp_path):
    """A checkpoint that a test may spoil."""
    shutil.copytree(original[0], tmp_path / "run7")
    return latest_checkpoint(tmp_path / "run7")


def write_index(checkpoint, index):
    rest = {key: value for key, value in index.items() if key != "crc32"}
    index["crc32"] = zlib.crc32(json.dumps(rest, sort_keys=True).encode())
    (checkpoint / "index.json").write_text(json.dumps(index))


def edited(checkpoint, edit):
    """Changes the index and keeps its CRC right: only the content shows what is wrong."""
    index = json.loads((checkpoint / "index.json").read_text())
    edit(index)
    write_index(checkpoint, index)


def rewritten(path, edit):
    """Writes a .npz again with other members: edit(dict of bytes) -> list of (name, bytes)."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in edit(members):
            archive.writestr(name, content)


def test_a_missing_expert(run7):
    rewritten(run7 / "rank-00001.npz",
              lambda members: [one for one in members.items() if EXPERT_7 not in one[0]])
    text = refusals(run7.parent)
    assert f"rank-00001.npz cannot be read ('{EXPERT_7}' is not in it" in text
    edited(run7, lambda index: index["tensors"].pop(EXPERT_7))
    text = refusals(run7.parent)
    assert f"on rank 1: {run7}: the checkpoint lacks '{EXPERT_7}', of expert 7 of '1.moe.exp" in text
    assert "on rank 3" in refusals(run7.parent, "ep4")


def test_a_doubled_expert(run7):
    with zipfile.ZipFile(run7 / "rank-00001.npz") as archive:
        content = archive.read(EXPERT_7 + ".npy")
    path = run7 / "rank-00000.npz"
    kept = path.read_bytes()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(EXPERT_7 + ".npy", content)
    assert f"{path} cannot be read ('{EXPERT_7}' is in it, but rank-00001.npz has it, too)" in (
        refusals(run7.parent))
    path.write_bytes(kept)
    path = run7 / "rank-00001.npz"
    with pytest.warns(UserWarning, match="Duplicate"):
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(EXPERT_7 + ".npy", content)
    assert f"{path} cannot be read ('{EXPERT_7}' is in it twice)" in refusals(run7.parent)
    path = run7 / "index.json"
    path.write_text(path.read_text().replace(f'"{EXPERT_7}": ', f'"{EXPERT_7}": {{}}, "{EXPERT_7}": '))
    assert f"{path} cannot be read ('{EXPERT_7}' is there twice)" in refusals(run7.parent)


def test_a_tensor_that_nobody_has(run7):
    def rename(index):
        index["tensors"]["model/1.dense.third"] = index["tensors"].pop("model/1.dense.bias")
    edited(run7, rename)
    assert "lacks 'model/1.dense.bias'; fix: build the model" in refusals(run7.parent)
    edited(run7, lambda index: index["tensors"].update(
        {"model/1.dense.bias": index["tensors"]["model/1.dense.third"]}))
    assert "has 'model/1.dense.third', and 0 more, that no rank" in refusals(run7.parent)


def test_experts_that_differ_in_their_state_cannot_share_a_rank(run7):
    name = "optimizer/step/1.moe.experts/7/w3"
    edited(run7, lambda index: index["values"][name].update(value=4.0))
    text = refusals(run7.parent)
    assert (f"'{name}', of expert 7 of '1.moe.experts' is 4.0, 'optimizer/step/1.moe.experts/4/w3' "
            "is 3.0") in text
    edited(run7, lambda index: index["values"].pop(name))
    assert "'1.moe.experts/7/w3' has the optimiser's state ['exp_avg'" in refusals(run7.parent)


def test_another_schema(run7):
    edited(run7, lambda index: index.update(schema="ferry.checkpoint/2"))
    assert (f"on rank 0: {run7}/index.json cannot be read (its schema is 'ferry.checkpoint/2'; "
            "allowed: 'ferry.checkpoint/1')") in refusals(run7.parent)
    (run7 / "index.json").write_text("[]")
    assert "its schema is None" in refusals(run7.parent)


def test_an_array_that_is_not_what_the_index_says(run7):
    for change, text in ((lambda content: content + b"12345678", "it is longer than it says"),
                         (lambda content: content.replace(b"(6, 8)", b"(8, 6)"), "float32 [8, 6]"),
                         (lambda content: content.replace(b"<f4", b"<i4"), "it is int32 [6, 8]"),
                         (lambda content: content.replace(b"<f4", b"|O4"), f"'{EXPERT_7}': ")):
        path = run7 / "rank-00001.npz"
        kept, member = path.read_bytes(), EXPERT_7 + ".npy"
        rewritten(path, lambda members: {**members, member: change(members[member])}.items())
        with zipfile.ZipFile(path) as archive:
            crc = archive.getinfo(member).CRC
        edited(run7, lambda index: index["tensors"][EXPERT_7].update(crc32=crc))
        said = refusals(run7.parent)
        assert f"{path} cannot be read ('{EXPERT_7}'" in said and text in said
        path.write_bytes(kept)


def test_files_that_are_not_as_they_were_written(run7, tmp_path):
    path, index = run7 / "rank-00001.npz", run7 / "index.json"
    good = path.read_bytes()
    for size in (0, 3, 1000, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        assert f"{path} cannot be read" in refusals(run7.parent)
    path.unlink()
    assert f"{path} cannot be read (No such file" in refusals(run7.parent)
    saved(tmp_path / "other", seed=3)  # the same names and shapes, other numbers
    shutil.copy(latest_checkpoint(tmp_path / "other") / path.name, path)
    assert "has another CRC than in the index" in refusals(run7.parent)
    path.write_bytes(good)
    shutil.copy(path, run7 / "rank-00007.npz")
    assert "rank-00007.npz is in the directory and not in the index" in refusals(run7.parent)
    (run7 / "rank-00007.npz").unlink()
    text = index.read_text()
    index.write_text(text.replace('"lr": 0.02', '"lr": 0.03'))
    assert f"{index} cannot be read (its CRC is not that of its content" in refusals(run7.parent)
    index.write_text(text[:-1])
    assert f"{index} cannot be read" in refusals(run7.parent)
    index.unlink()
    assert f"{index} cannot be read (No such file" in refusals(run7.parent)
    assert "no checkpoint in" in refusals(tmp_path / "none", error=FileNotFoundError)


def test_any_byte_that_changes_is_noticed_or_means_nothing(run7, original):
    """Some bytes of a zip, such as dates, are not content."""
    _, held, loss = original
    rng, noticed = random.Random(11), 0
    files = sorted(run7.iterdir())
    for number in range(60):
        path = files[number % len(files)]
        good = path.read_bytes()
        bad, at = bytearray(good), rng.randrange(len(good))
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        try:
            assert loaded(run7.parent, "ep1") == (held, loss), (path, at)
        except ValueError as error:
            assert str(path) in str(error), (error, path, at)
            noticed += 1
        path.write_bytes(good)
    assert noticed > 40


def test_older_ones_go_and_a_step_can_be_saved_again(tmp_path):
    (tmp_path / ".step-00000001.beef.saving").mkdir()
    (tmp_path / ".step-00000001.1.removing").mkdir()
    (tmp_path / "z-notes.txt").touch()

    def body(world):
        job = Job(world, "ep2")

        def save(step, keep, value):
            with torch.no_grad():
                job.model[0].dense.weight.fill_(value)
            save_checkpoint(tmp_path, job.model, group=world, step=step, keep=keep)
            return entries(tmp_path)[:-1] if world.rank == 0 else None
        seen = [save(*one) for one in ((1, 2, 1), (2, 2, 2), (3, 2, 3), (4, 2, 4), (3, 2, 5),
                                       (3, None, 6), (7, None, 7), (7, 0, 8))]
        load_checkpoint(tmp_path, job.model, group=world)
        assert (job.model[0].dense.weight == 8).all()
        return seen
    one, two, three, four = (f"step-0000000{step}" for step in (1, 2, 3, 4))
    assert run(body)[0] == [
        [one], [one, two], [one, two, three], [two, three, four], [two, three + ".1", four],
        [two, three + ".2", four], [two, three + ".2", four, "step-00000007"],
        ["step-00000007.1"]]
    assert latest_checkpoint(tmp_path).name == "step-00000007.1"
    assert latest_checkpoint(tmp_path / "none") is None
    assert checkpoint_extra(tmp_path)["step"] == 7
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 8"):
        checkpoint_extra(tmp_path, step=8)


def test_the_same_state_gives_the_same_bytes(tmp_path):
    def body(world):
        job = Job(world, "ep2").trained(1)
        paths = [save_checkpoint(tmp_path / name, job.model, job.optimizer, group=world, step=1)
                 for name in "ab"]
        return [{file.name: file.read_bytes() for file in path.iterdir()} for path in paths]
    one, two = run(body)[0]
    assert one == two


def test_a_disk_that_takes_no_more_on_one_rank(tmp_path):
    """Only rank 0's file, with what is dense, is over the limit."""
    held, loss = saved(tmp_path, "ep4")
    sizes = [path.stat().st_size for path in sorted(latest_checkpoint(tmp_path).glob("*.npz"))]
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert max(sizes[1:]) + 2000 < sizes[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[0] - 1000, old[1]))
    try:
        def body(world):
            job = Job(world, "ep4", seed=3).trained()
            with pytest.raises(OSError) as said:
                save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=4, keep=0)
            return str(said.value)
        texts = set(run(body, "ep4"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert len(texts) == 1
    text = texts.pop()
    assert "save_checkpoint: on rank 0: " in text and "/rank-00000.npz cannot be written (" in text
    assert entries(tmp_path) == ["step-00000003"]
    assert loaded(tmp_path, "ep2") == (held, loss)


@pytest.mark.parametrize("step, file", [(1, "rank-00002.npz"), (5, "rank-00002.npz"),
                                        (1, "index.json")])
def test_a_rank_that_cannot_write(tmp_path, monkeypatch, step, file):
    """At its first sync, at a later turn while others are done or not, and at the index."""
    held, loss = saved(tmp_path, "ep4")
    monkeypatch.setattr(saving_files, "TURN_BYTES", 400)
    count, sync = [0], os.fsync

    def fsync(handle):
        if os.readlink(f"/proc/self/fd/{handle}").endswith(file):
            count[0] += 1
            if count[0] == step:
                raise OSError(28, "No space left on device")
        sync(handle)
    monkeypatch.setattr(os, "fsync", fsync)
    text = failing_saves(tmp_path, OSError)
    rank = 2 if file.startswith("rank") else 0
    assert f"on rank {rank}: " in text and f"/{file} cannot be written (No space left" in text
    assert text.startswith("[Errno 28]") and "ranks share" in text
    assert entries(tmp_path) == ["step-00000003"]
    assert loaded(tmp_path, "ep2") == (held, loss)


def test_a_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    text = failing_saves(tmp_path / "file" / "run", NotADirectoryError)
    assert "save_checkpoint: on rank 0: " in text and "cannot be made (Not a directory)" in text


def test_a_slow_disk_outlives_the_deadline(tmp_path, monkeypatch):
    """Ranks that wait for a slow one hear of it after each turn."""
    bits = saving_files.bits

    def slow_bits(tensor):
        if threading.current_thread().name.endswith("rank 0"):
            time.sleep(0.05)
        return bits(tensor)
    monkeypatch.setattr(saving_files, "bits", slow_bits)
    monkeypatch.setattr(saving_files, "TURN_BYTES", 1)

    def body(group):
        model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(45)])
        group.set_limits(deadline_s=2)
        save_checkpoint(tmp_path, model, group=group, step=1)
        load_checkpoint(tmp_path, model, group=group)
    ferry.run(body, ranks_per_node=2)


def test_kills_at_any_moment_leave_a_complete_checkpoint(tmp_path):
    said = run_program([sys.executable, "-B", str(PROGRAMS / "killed_saves.py"), str(tmp_path), "5"])
    assert said.endswith("15 kills\n")
