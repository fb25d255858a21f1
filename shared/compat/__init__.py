"""Private and undocumented interfaces of other libraries, one module per library. The rest of shared/ uses none.

Each function names the interface that it uses. A test in tests/compat fails if an upgrade changes the interface. If the
private name is missing, the function uses a public interface with the same result, where there is one. This room may
import only shared/errors.py.
"""

from importlib.metadata import version
from typing import Any

from shared.errors import UserError


def missing(package: str, name: str, use: str) -> UserError:
    """The error for a `name` that the installed `package` lacks, when there is no public alternative."""
    return UserError(
        f"{package} {version(package)} has no {name}, which {use} needs: install the versions of requirements.txt"
    )


def attribute(owner: Any, name: str, use: str) -> Any:
    """Return an attribute of Accelerate; `use` names its use for the error.

    Raises:
        UserError: this version of Accelerate does not have it.
    """
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        raise missing("accelerate", f"{kind.__name__}.{name}", use)
    return getattr(owner, name)
