"""Every error that this package raises on purpose.

    DiLoCoError
     ├── ConfigError            a setting is wrong: name, value, remedy (also a ValueError)
     ├── UnsupportedError       a model, optimizer or DeepSpeed setting that the outer loop cannot work with
     ├── RendezvousError        the islands could not find each other
     │    ├── DuplicateIslandError   two processes claim the same island number
     │    └── FingerprintError       the islands do not train the same thing
     ├── ExchangeError          a synchronisation failed; nothing was changed by it
     │    ├── IslandLostError        an island is missing or late; names it
     │    ├── DamagedTransferError   an island's data arrived corrupt; names it
     │    ├── MissedRoundError       a round passes without this island, which goes on training
     │    ├── StoreError             the object store did not answer, or refused
     │    │    └── StoreFullError        it has no space left
     │    └── PayloadError           an object is gone, or does not match its announcement
     ├── ForgedError            a record was not written by an island of this run, for this path
     │    └── UnknownIdentityError   its author holds the run's key, but not the island's identity; names the island
     ├── DivergedError          islands that should hold equal outer parameters do not
     ├── CheckpointError        outer state is missing, incomplete or of another run
     └── StopRequested          this island was asked to stop while it waited for the others

An error never loses training state: a synchronisation that fails leaves the parameters as they were.
"""

from __future__ import annotations

from collections.abc import Collection

from hf_diloco.utils.redact import redact_text


class DiLoCoError(Exception):
    """The base class of all errors that hf_diloco raises on purpose. Messages contain no secrets of settings and
    URLs."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact_text(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DiLoCoError, ValueError):
    """A setting is wrong. The message names the setting, its value and the remedy."""


class UnsupportedError(DiLoCoError):
    """The outer loop cannot synchronise this model, optimizer or DeepSpeed configuration. The message says why."""


class RendezvousError(DiLoCoError):
    """The islands could not find each other in time."""


class DuplicateIslandError(RendezvousError):
    """Another process has already joined the run under this island number."""


class FingerprintError(RendezvousError):
    """The islands do not train the same thing: another model, tokenizer, algorithm or payload."""


class ExchangeError(DiLoCoError):
    """A synchronisation failed. It changed no parameter and no outer state."""


WAS_STOPPED = "it was asked to stop (by Ctrl-C, SIGTERM or stop())"
"""In the message of an `IslandLostError`: nothing has failed. The launcher finds it in an island's output."""


class IslandLostError(ExchangeError):
    """One or more islands did not take part in a round in time.

    Attributes:
        islands: the numbers of the missing islands.
    """

    def __init__(self, message: str, islands: Collection[int] = ()) -> None:
        super().__init__(message)
        self.islands = tuple(sorted(islands))


class DamagedTransferError(ExchangeError):
    """Data from another island do not match their checksum, or that island did not seal them.

    Attributes:
        islands: the numbers of the islands that sent them.
        is_sealed: whether the connection has a key.
    """

    def __init__(self, islands: Collection[int], is_sealed: bool = False) -> None:
        self.islands = tuple(sorted(islands))
        self.is_sealed = is_sealed
        names = ", ".join(f"island {island}" for island in self.islands)
        super().__init__(
            f"what {names} sent arrived damaged ({damage(is_sealed)}): if this happens again, look at the memory and "
            f"the network of both machines{', and at who sits between them' if is_sealed else ''}"
        )


def damage(is_sealed: bool) -> str:
    """Describes the evidence that received data are corrupt."""
    if is_sealed:
        return "it was altered in transit, or sent before or for another place: its seal does not hold"
    return "its checksum differs"


class MissedRoundError(ExchangeError):
    """A round passes without this island, which trains on and contributes its progress to a later round."""


class StoreError(ExchangeError):
    """The object store did not answer in time, or refused."""


class StoreFullError(StoreError):
    """The object store has no space left."""


class PayloadError(ExchangeError):
    """An object is gone, or does not match its announcement: cut short, altered, malformed.

    Attributes:
        path: the object's.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class ForgedError(DiLoCoError):
    """A record was not sealed with this run's key for its path; or a peer that connects does not hold the key.

    Attributes:
        island: the island that it claims to come from; None if unknown.
    """

    def __init__(self, message: str, island: int | None = None) -> None:
        super().__init__(message)
        self.island = island


class UnknownIdentityError(ForgedError):
    """A record or peer has the run's key, but not the identity of the island that it claims to be."""


class DivergedError(DiLoCoError):
    """Islands that must hold bit-identical outer parameters do not.

    Attributes:
        is_state_sound: this island's state before the round is the agreed one, and worth a checkpoint.
    """

    def __init__(self, message: str, is_state_sound: bool = False) -> None:
        super().__init__(message)
        self.is_state_sound = is_state_sound


class CheckpointError(DiLoCoError):
    """Outer state on disk is missing, incomplete, or belongs to another run."""


class StopRequested(DiLoCoError):
    """This island was asked to stop while it waited for the others, and has told them so."""

    def __init__(self, message: str = "this island was asked to stop while it waited for the others") -> None:
        super().__init__(message)


__all__ = [
    "CheckpointError",
    "ConfigError",
    "DamagedTransferError",
    "DiLoCoError",
    "DivergedError",
    "DuplicateIslandError",
    "ExchangeError",
    "FingerprintError",
    "ForgedError",
    "IslandLostError",
    "MissedRoundError",
    "PayloadError",
    "RendezvousError",
    "StopRequested",
    "StoreError",
    "StoreFullError",
    "UnknownIdentityError",
    "UnsupportedError",
]
