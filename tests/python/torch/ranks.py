"""Ranks as threads, for tests of what needs only a group with all_reduce."""

import threading


class ThreadGroup:
    """rank, size, and all_reduce of NumPy arrays over threads: added in rank order."""

    def __init__(self, shared, rank):
        self.rank, self.size, self._shared = rank, shared["size"], shared

    def all_reduce(self, array):
        shared = self._shared
        shared["parts"][self.rank] = array.copy()
        shared["barrier"].wait()
        total = shared["parts"][0].copy()
        for part in shared["parts"][1:]:
            total = total + part
        shared["barrier"].wait()
        shared["calls"][self.rank] += 1
        return total


class Ranks:
    """World and sub-groups of `size` threads."""

    def __init__(self, size):
        self.size = size

    def groups(self, rank_lists):
        """One group per list; returns rank -> its group."""
        result = {}
        for ranks in rank_lists:
            shared = {"size": len(ranks), "parts": [None] * len(ranks), "calls": [0] * len(ranks),
                      "barrier": threading.Barrier(len(ranks), timeout=20)}
            for place, rank in enumerate(ranks):
                result[rank] = ThreadGroup(shared, place)
        return result

    def run(self, function):
        """function(rank) on a thread each; results by rank; the first error is raised."""
        results, errors = [None] * self.size, []

        def work(rank):
            try:
                results[rank] = function(rank)
            except Exception as error:  # noqa: BLE001 - raised again below
                errors.append(error)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
