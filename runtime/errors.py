"""What an error means to the user: one line, and the exit code that its class states in `exit_code`."""

import errno

from espalier.runtime.config_errors import CONFIG_ERRORS, describe_config_error

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_BAD_PATH = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ENAMETOOLONG}


class Stopped(Exception):
    """Raised where work is left undone because a signal came."""


def exit_code_of(error: BaseException) -> int | None:
    """Return the exit code of an error that is explained in one line; None for one that needs a traceback."""
    if _is_storage(error):
        return 4
    if isinstance(error, CONFIG_ERRORS) or _is_bad_path(error):
        return 2
    code = getattr(error, "exit_code", None)
    return code if isinstance(code, int) else None


def line_of(error: BaseException) -> str:
    """Return the error in one line; one that is explained nowhere with the name of its class."""
    if isinstance(error, CONFIG_ERRORS):
        return describe_config_error(error)
    if isinstance(error, OSError) and _is_storage(error):
        return f"{error.filename or 'storage'}: {error.strerror}: free space, then run the same command again"
    if isinstance(error, OSError) and _is_bad_path(error):
        return f"{error.filename}: {error.strerror}: choose another path, or change what stands there"
    if exit_code_of(error) is not None:
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _is_storage(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def _is_bad_path(error: BaseException) -> bool:
    """Say whether a path that a user named cannot be what it is to be: a file where a folder is needed, no rights."""
    return isinstance(error, OSError) and error.errno in _BAD_PATH and error.filename is not None
