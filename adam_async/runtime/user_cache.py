"""The folder of the user's caches: compiled kernels, downloaded data, records of launches.

A user may have no home folder, or that of another user, as in containers and batch jobs with a bare user id.
Then the folder is in that of temporary files, never in the working directory.
"""

import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

NOWHERE = Path(os.devnull) / "no-folder-for-caches"
"""Path that cannot be made: processes without a folder for caches keep nothing, and say so."""


def user_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder of this package in the user's cache; the folder need not exist."""
    caches = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):  # the standard ignores other paths
        return Path(caches) / "adam-async"
    home = environment.get("HOME", "")
    if not home:
        with suppress(KeyError):  # the user id has no name
            home = pwd.getpwuid(os.getuid()).pw_dir
    if os.path.isabs(home) and any(os.access(f"{home}{end}", os.W_OK | os.X_OK) for end in ("/.cache", "")):
        return Path(home) / ".cache" / "adam-async"
    return _temporary_cache(environment)


def _temporary_cache(environment: Mapping[str, str]) -> Path:
    """Return a folder of this user alone: kernels are code, which another user must not put there."""
    temporary = environment.get("TMPDIR", "")
    folder = Path(temporary if os.path.isabs(temporary) else "/tmp") / f"adam-async-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError:
        return NOWHERE
    is_private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_private else NOWHERE
