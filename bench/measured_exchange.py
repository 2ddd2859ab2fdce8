"""A ferry.Exchange for `ferry.torch` that keeps the time inside its calls, and can forget its plans."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Iterator
from weakref import WeakKeyDictionary

import ferry

OPERATIONS = ("plan", "dispatch", "combine", "combine_backward", "dispatch_backward")


class ExchangeClock:
    """seconds   inside calls of each of OPERATIONS so far: starting it, its progress, waiting for it"""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(OPERATIONS, 0.0)

    @contextmanager
    def running(self, operation: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[operation] += time.perf_counter() - began


class _Pending:
    """A pending whose time counts for its operation."""

    def __init__(self, pending: Any, clock: ExchangeClock, operation: str) -> None:
        self._pending, self._clock, self._operation = pending, clock, operation

    def done(self) -> bool:
        return self._pending.done()

    def progress(self) -> Any:
        with self._clock.running(self._operation):
            return self._pending.progress()

    def wait(self) -> Any:
        with self._clock.running(self._operation):
            return self._pending.wait()


class MeasuredExchange:
    """What ferry.torch calls of a ferry.Exchange, with a clock.

    keeps_plans   False: a new plan of the same routing is made before combine and each way back, as
                  in a system that knows each operation by itself: four rounds of metadata in place
                  of one
    """

    def __init__(self, exchange: ferry.Exchange, *, keeps_plans: bool) -> None:
        self.clock = ExchangeClock()
        self._exchange, self._keeps_plans = exchange, keeps_plans
        self._asked: list[tuple[Any, Any]] = []
        self._routing: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def _start(self, operation: str, *given: Any, **arrays: Any) -> _Pending:
        with self.clock.running(operation):
            pending = getattr(self._exchange, f"start_{operation}")(*given, **arrays)
        return _Pending(pending, self.clock, operation)

    def _plan_for_use(self, plan: Any) -> Any:
        if self._keeps_plans:
            return plan
        return self._start("plan", *self._routing[plan]).wait()

    def start_plan(self, topk_idx: Any, topk_weights: Any) -> _Pending:
        self._asked.append((topk_idx, topk_weights))
        return self._start("plan", topk_idx, topk_weights)

    def start_dispatch(self, plan: Any, x: Any) -> _Pending:
        self._routing[plan] = self._asked.pop(0)  # chunks are dispatched as they were planned
        return self._start("dispatch", plan, x)

    def start_combine(self, plan: Any, y: Any, out: Any) -> _Pending:
        return self._start("combine", self._plan_for_use(plan), y, out)

    def start_combine_backward(self, plan: Any, grad_out: Any, **arrays: Any) -> _Pending:
        return self._start("combine_backward", self._plan_for_use(plan), grad_out, **arrays)

    def start_dispatch_backward(self, plan: Any, grad_rows: Any, **arrays: Any) -> _Pending:
        return self._start("dispatch_backward", self._plan_for_use(plan), grad_rows, **arrays)
