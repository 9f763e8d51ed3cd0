"""Models of other libraries. Import the module of the library: each needs that library only."""

from masks.checks import Installed


def integration(package: str, version: str) -> Installed:
    """Context of the imports of a package, which the extra 'models' installs."""
    name = f"sparseflash.integrations.{package} needs {package} {version} or newer"
    return Installed(name, f"{package}>={version}", "models")
