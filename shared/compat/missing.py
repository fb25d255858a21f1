"""The error for a private name that the installed version of a library does not have."""

from importlib.metadata import version

from shared.errors import UserError


def missing(package: str, name: str, use: str) -> UserError:
    """The error for a `name` that the installed `package` lacks, when there is no public alternative."""
    return UserError(
        f"{package} {version(package)} has no {name}, which {use} needs: install the versions of requirements.txt"
    )
