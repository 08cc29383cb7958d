"""The runtime directory of a mesh on this machine: keys, models, configuration, logs and the process table.

`--home`, else TRUNKLINE_HOME, else `.trunkline` in the working directory. Everything in it can be made again.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """Names every file that trunkctl keeps; makes none of them."""

    root: Path

    @property
    def models(self) -> Path:
        """One artefact directory per model name."""
        return self.root / "models"

    @property
    def logs(self) -> Path:
        """One bounded log per process."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Configuration of the running processes, and the embedded store's data."""
        return self.root / "run"

    @property
    def processes(self) -> Path:
        """The process table; there while a mesh is."""
        return self.root / "processes.json"

    @property
    def plan(self) -> Path:
        """What the running mesh was asked to be."""
        return self.run / "mesh.json"

    @property
    def lock(self) -> Path:
        """Held while a mesh is being started or ended."""
        return self.root / "mesh.lock"

    @property
    def keys(self) -> Path:
        """The key records that gateways read."""
        return self.root / "keys.json"

    @property
    def dev_key(self) -> Path:
        """The local API key, in plain text."""
        return self.root / "dev.key"


def find_home(given: str | None) -> Home:
    """The directory named on the command line, in the environment, or by default."""
    return Home(Path(given or os.environ.get("TRUNKLINE_HOME", ".trunkline")).absolute())


def write_private(path: Path, data: bytes) -> None:
    """Replaces a file as a whole, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    draft.replace(path)
