"""Who else may write a cache: prepared rows are trained on as they lie there, whoever put them under their key."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tuner.data.building.cache import LEVELS


def others_may_write(cache_dir: Path) -> Iterator[str]:
    """Yield a warning of the first of a cache's directories that users besides this one and root may write.

    A group of the user's own, as most systems give each user one, is nobody else.
    """
    for path in (cache_dir, *(cache_dir / level for level in LEVELS)):
        try:
            facts = path.stat()
        except OSError:
            continue  # what is not there is not used
        if facts.st_uid not in (os.getuid(), 0):
            why = f"belongs to another user ({facts.st_uid})"
        elif facts.st_mode & stat.S_IWOTH:
            why = "may be written by everybody"
        elif facts.st_mode & stat.S_IWGRP and facts.st_gid not in (os.getuid(), 0):
            why = f"may be written by group {facts.st_gid}"
        else:
            continue
        yield (
            f"{path} {why}: rows that somebody else puts there under a key are trained on. chmod go-w {path}, or name "
            "another data.cache_dir"
        )
        return
