"""Moving values between islands."""

from hf_diloco.transport.base import Exchange, Observer, Traffic

__all__ = ["Exchange", "Observer", "Traffic"]
