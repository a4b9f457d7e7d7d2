"""What is secret between the islands of a run, and who says what: key agreement, sealed messages and records,
identities. No sockets here."""

from hf_diloco.sealing.channel import ISLANDS, OVERHEAD, Agreement, Channel, Parties
from hf_diloco.sealing.identity import Roster, Signer
from hf_diloco.sealing.keys import LinkKey, derive
from hf_diloco.sealing.stored import ValueSeal

__all__ = [
    "ISLANDS",
    "OVERHEAD",
    "Agreement",
    "Channel",
    "LinkKey",
    "Parties",
    "Roster",
    "Signer",
    "ValueSeal",
    "derive",
]
