"""What Ferry raises: one class for each code of the library, which is also what Python has for it; and
what it warns with.

docs/errors.md explains every text. The same refusal carries the same text on every rank.
"""

from __future__ import annotations

from . import _ferry


class Error(Exception):
    """Base of all errors of Ferry. `code` is the library's name for the kind."""

    code: str = ""


class PrecisionWarning(UserWarning):
    """A setting that is known to harm training, or numbers that show it: docs/precision.md."""


class InvalidArgumentError(Error, ValueError):
    """A value is out of range or has the wrong shape or dtype; fix the call."""

    code = "invalid_argument"


class MismatchError(Error, ValueError):
    """Ranks disagree on an option or on the order of calls; make them agree."""

    code = "mismatch"


class StalePlanError(Error, ValueError):
    """The plan is of another exchange or placement, or poisoned; plan again."""

    code = "stale_plan"


class LimitExceededError(Error, MemoryError):
    """A stated limit (pool, metadata) is too small; raise it, or free rows."""

    code = "limit_exceeded"


class ResourceExhaustedError(Error, MemoryError):
    """The system gave no memory or handle; free some, or ask for less."""

    code = "resource_exhausted"


class WrongThreadError(Error, RuntimeError):
    """A second thread used a group that is in use; one caller at a time."""

    code = "wrong_thread"


class PeerTimeoutError(Error, TimeoutError):
    """A rank gave no sign of life before the deadline; see the named rank."""

    code = "timeout"


class PeerFailedError(Error, ConnectionError):
    """Another rank failed or was ended; the text is that rank's own."""

    code = "peer_failed"


class CorruptMessageError(Error, ConnectionError):
    """A message failed its checks; suspect the network or mixed versions."""

    code = "corrupt_message"


class CancelledError(Error, RuntimeError):
    """The caller gave up on an unfinished operation."""

    code = "cancelled"


class UnsupportedError(Error, NotImplementedError):
    """This build or transport cannot do it; the text says what can."""

    code = "unsupported"


ERROR_TYPES: dict[str, type[Error]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        MismatchError,
        StalePlanError,
        LimitExceededError,
        ResourceExhaustedError,
        WrongThreadError,
        PeerTimeoutError,
        PeerFailedError,
        CorruptMessageError,
        CancelledError,
        UnsupportedError,
    )
}
for _kind in (Error, PrecisionWarning, *ERROR_TYPES.values()):
    _kind.__module__ = "ferry"  # where users find them
_ferry.set_error_types(ERROR_TYPES)
