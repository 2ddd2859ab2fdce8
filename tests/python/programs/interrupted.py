"""Ranks that wait in Ferry, or compute in Python, until Ctrl-C: waiting | python | both."""

import sys
import threading
import time

import ferry


def body(group):
    if group.rank == 0:
        print("running", flush=True)
    if sys.argv[1] == "python" or (sys.argv[1] == "both" and group.rank == 0):
        while True:
            sum(range(1000))
    if group.rank == 1:
        group.barrier()  # rank 0 never comes
    group.subgroup([0, 2]).barrier() if group.rank == 2 else group.barrier()


began = time.monotonic()
try:
    ferry.run(body, 1, 3)
except KeyboardInterrupt:
    print(f"KeyboardInterrupt after {time.monotonic() - began:.2f} s")
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join(5)
        assert not thread.is_alive(), thread
print("all ranks ended")
