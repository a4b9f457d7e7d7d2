"""Encryption and authentication: key agreement, sealed messages and records, identities. No sockets here."""
