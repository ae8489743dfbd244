"""Pure: the owner of a folder of segment files, and the errors of a folder of another owner."""

import msgspec

from adam_async.errors import ConfigError

FORMAT = 1
"""Number of the format of segment files; a reader refuses others."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Owner of a folder of segment files.

    Attributes:
        run: Id of the run or store whose states the folder has.
        contents: Version of the owner's encoding of states and entries, from 1.
    """

    run: str
    contents: int = 1


class OtherRun(ConfigError):
    """The folder has the states of another run. The message has both runs and the remedy."""


class OtherContents(ConfigError):
    """The folder has states in another encoding than this release's. The message has the remedy."""


class OtherFormat(ConfigError):
    """The folder has segment files of another release. The message has the remedy."""
