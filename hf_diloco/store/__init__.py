"""Where islands leave records for each other: object storage, a folder, TCP; signed, created if absent."""
