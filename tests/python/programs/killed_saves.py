"""Saves in children that are killed at every kind of moment; what is left must load, whole.

Usage: killed_saves.py DIRECTORY SEED
First each child is killed before its n-th step on the disk, for every n until a save comes through;
then children that save in a loop are killed after random times.
"""

import itertools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import ferry
from ferry.torch import MoELayer, load_checkpoint, save_checkpoint

torch.set_num_threads(1)
DIRECTORY = Path(sys.argv[1])
RANKS, KEEP = 3, 1
IN_DIRECTORY, ANYWHERE = {"open", "os.mkdir", "os.rename"}, {"os.remove", "os.rmdir"}


def filled(group, value):
    """A model and its optimiser in which every number is `value`."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), MoELayer(16, 32, 7, 2, group=group))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter] = {"step": torch.tensor(float(value)),
                                          "exp_avg": torch.full_like(parameter, value),
                                          "exp_avg_sq": torch.full_like(parameter, value)}
    return model, optimizer


def save(step, value):
    def body(group):
        save_checkpoint(DIRECTORY, *filled(group, value), group=group, step=step, keep=KEEP,
                        extra={"value": value})
    ferry.run(body, ranks_per_node=RANKS)


def loaded():
    """The value of the newest checkpoint, after a look at every number in each that is there."""
    def look(group, step):
        model, optimizer = filled(group, -1)
        value = load_checkpoint(DIRECTORY, model, optimizer, group=group, step=step)["value"]
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert len(states) == 3 * len(list(model.parameters()))
        for tensor in (*model.parameters(), *states):
            assert (tensor == value).all(), (value, tensor)
        return value

    def body(group):
        steps = {int(path.name[5:13]) for path in DIRECTORY.glob("step-*")}
        return [look(group, step) for step in sorted(steps)][-1]
    return ferry.run(body, ranks_per_node=2)[0]


def child(work):
    """Forks; the child reports by lines on a pipe. Returns its pid and the pipe's end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        try:
            work(lambda value: os.write(theirs, f"{value}\n".encode()))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(theirs)
    return pid, os.fdopen(ours)


def kill_before(number):
    """This process ends before its `number`-th step on the disk, whichever thread does it."""
    left, lock, sync = itertools.count(number - 1, -1), threading.Lock(), os.fsync

    def count():
        with lock:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, args):
        if event in ANYWHERE or event in IN_DIRECTORY and str(DIRECTORY) in str(args[0]):
            count()

    def counted_sync(handle):
        count()
        sync(handle)
    sys.addaudithook(hook)
    os.fsync = counted_sync


def at_every_step(step, value):
    """`step` is of the first save: a new one for each (where it grows), or one that is replaced."""
    kills, known = 0, value
    save(step(value), value)
    for number in itertools.count(1):
        value += 1

        def work(report):
            kill_before(number)
            save(step(value), value)
        pid, reports = child(work)
        reports.close()
        _, status = os.waitpid(pid, 0)
        newest = loaded()
        assert newest in (known, value), (number, newest, known, value)
        known = newest
        if status == 0:
            assert newest == value and kills > 20
            return kills, value
        assert os.WTERMSIG(status) == signal.SIGKILL, (number, status)
        kills += 1


def at_random_times(rounds, value, rng):
    kills = 0
    for _ in range(rounds):
        def work(report):
            for number in itertools.count(value + 1):
                save(number // 2, number)  # every step twice
                report(number)
        pid, reports = child(work)
        value = int(reports.readline())
        time.sleep(rng.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = [int(line) for line in reports if line.endswith("\n")]
        reports.close()
        value = max([value, *reported])
        newest = loaded()
        assert newest in (value, value + 1), (newest, value)
        value, kills = newest, kills + 1
    return kills, value


first, last = at_every_step(lambda value: value, 1)
second, last = at_every_step(lambda value: 1000, last)
third, last = at_random_times(15, 10 * last + 2000, random.Random(int(sys.argv[2])))
save(last + 1, last + 1)
names = sorted(path.name for path in DIRECTORY.iterdir())
assert len(names) == KEEP + 1 and all(name.startswith("step-") for name in names), names
print(f"{first} + {second} + {third} kills")
