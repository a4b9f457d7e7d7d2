"""What is secret between the islands of a run, and who says what: key agreement, sealed messages and records,
identities. No sockets here."""
