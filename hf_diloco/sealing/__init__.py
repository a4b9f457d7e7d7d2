"""What is secret between the islands of a run: key agreement, sealed messages, sealed records. No sockets here."""

from hf_diloco.sealing.agreement import Agreement
from hf_diloco.sealing.channel import OVERHEAD, Channel
from hf_diloco.sealing.keys import LinkKey, derive
from hf_diloco.sealing.values import ValueSeal

__all__ = ["OVERHEAD", "Agreement", "Channel", "LinkKey", "ValueSeal", "derive"]
