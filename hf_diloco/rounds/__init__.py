"""How an island meets the others: one file a kind of session."""

from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.open import open_session
from hf_diloco.rounds.session import BaseSession

__all__ = ["BaseSession", "FixedSession", "open_session"]
