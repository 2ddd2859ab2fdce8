"""DeepEP's `deep_ep.utils`: its events, which are there for their form only."""

from typing import Optional, Tuple

from torch import Tensor


class EventHandle:
    """Of an operation that is done."""

    def current_stream_wait(self) -> None:
        """Does nothing: there is nothing to wait for."""


class EventOverlap:
    """DeepEP's event, also as a context: `with event: compute()`."""

    def __init__(self, event: Optional[EventHandle] = None,
                 extra_tensors: Optional[Tuple[Tensor, ...]] = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Does nothing: Ferry's calls are done when they return."""

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()
