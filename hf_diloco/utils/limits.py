"""What the system allows this process."""

from __future__ import annotations

import contextlib
import resource

MAX_FILES = 1 << 16
"""The highest limit of open files to ask for: some programs walk through all that are possible."""


def raise_file_limit() -> int:
    """Raises the soft limit of open files to the hard one, at most to `MAX_FILES`; returns the limit from now on.

    Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
