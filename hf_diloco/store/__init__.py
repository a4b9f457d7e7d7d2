"""Signed records that islands leave for each other, in object storage, a folder, memory or a server of our own."""
