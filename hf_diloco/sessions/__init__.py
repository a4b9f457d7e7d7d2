"""How an island meets the others: one file a kind of session."""

from hf_diloco.sessions.base import BaseSession
from hf_diloco.sessions.fixed import FixedSession
from hf_diloco.sessions.open import open_session

__all__ = ["BaseSession", "FixedSession", "open_session"]
