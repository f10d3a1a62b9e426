"""What a store cannot take, in words: values that are too long, folders that cannot be written, schemas it does not know.

Nothing is cut without saying so. It knows the limits and versions that it is told, not MLflow.
"""

import errno
import hashlib
import re
from pathlib import Path

_NOT_THE_STORE = (errno.ENOSPC, errno.EDQUOT, errno.ENOENT)  # a full disk has its own message, a missing file is a defect


def excerpt(text: str, limit: int, where: str = "") -> str:
    """``text`` if it has at most ``limit`` characters; else its beginning, its length, ``where`` it is whole, its hash.

    The hash keeps two long texts apart that begin alike.
    """
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    end = f"… ({len(text):,} characters{where}, SHA-256 {digest})"
    return text[: limit - len(end)] + end


def unwritable(uri: str, error: Exception) -> str | None:
    """The message for an artifact that could not be written; None if the store is not to blame."""
    if getattr(error, "errno", None) in _NOT_THE_STORE:
        return None
    return (
        f"tracking.uri={uri}: the artifact root cannot be written ({error}); let this user write there, start the server with "
        "--serve-artifacts so that it writes itself, or choose another tracking.experiment, whose root is its own"
    )


def unusable(uri: str, error: Exception, migrations: Path, version: str) -> str:
    """The message for a store that MLflow refuses; ``migrations`` holds a file for each schema that ``version`` knows."""
    found = re.search(r"found version (\w+)", str(error))
    if found is None:
        return f"tracking.uri={uri}: MLflow cannot use this store ({error})"
    if any(migrations.glob(f"{found[1]}_*.py")):
        return (
            f"tracking.uri={uri}: an older MLflow wrote this store (schema {found[1]}); make a copy of it, then run "
            f"`mlflow db upgrade {uri}`"
        )
    return (
        f"tracking.uri={uri}: a newer MLflow wrote this store (schema {found[1]} is unknown to MLflow {version}); install the "
        "MLflow that wrote it, or give another tracking.uri or paths.work"
    )
