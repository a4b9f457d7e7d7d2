"""Signed records that islands exchange through object storage, a folder, memory or our own server."""
