"""Ranks as threads, for tests of what needs only a group with all_reduce and all_gather."""

import threading


class ThreadGroup:
    """rank, size, all_reduce of NumPy arrays over threads, added in rank order, and all_gather."""

    def __init__(self, shared, rank):
        self.rank, self.size, self._shared = rank, shared["size"], shared

    def all_gather(self, array):
        shared = self._shared
        shared["parts"][self.rank] = array.copy()
        shared["barrier"].wait()
        parts = list(shared["parts"])
        shared["barrier"].wait()
        return parts

    def all_reduce(self, array):
        first, *others = self.all_gather(array)
        return sum(others, first)


class Ranks:
    """World and sub-groups of `size` threads."""

    def __init__(self, size):
        self.size = size

    def groups(self, rank_lists):
        """One group per list; returns rank -> its group."""
        result = {}
        for ranks in rank_lists:
            shared = {"size": len(ranks), "parts": [None] * len(ranks),
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
