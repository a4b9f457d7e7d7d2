"""Moving values between islands."""

from hf_diloco.exchange.base import Exchange, Observer, Traffic

__all__ = ["Exchange", "Observer", "Traffic"]
