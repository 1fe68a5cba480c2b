"""What the start record says of the process itself: code, image, nodes, batch job and versions. Unknown is null."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID

from llmtrack.writer.ranks import world_size
from llmtrack.writer.redact import redact

from .revision import find_checkout, is_dirty, read_commit
from .scheduler import read_job, read_nodes

_T = TypeVar("_T")

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_DIGEST_VARIABLES: Final = ("LLMTRACK_IMAGE_DIGEST", "IMAGE_DIGEST")
# What starts containers on clusters says which image it was; the third is Pyxis, the container plugin of Slurm.
_IMAGE_VARIABLES: Final = (
    "APPTAINER_CONTAINER",
    "SINGULARITY_CONTAINER",
    "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image",
    "CONTAINER_IMAGE",
)
_SIF_MAGIC: Final = slice(32, 41)  # a line that starts the image stands before it
_SIF_UUID: Final = slice(48, 64)  # behind the versions of format and architecture
_PACKAGES: Final = {
    "llmtrack-log": "llmtrack",  # name of the distribution: module whose own word counts if it is loaded
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "datasets": "datasets",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine",
    "flash-attn": "flash_attn",
    "triton": "triton",
    "lightning": "lightning",
    "torchtitan": "torchtitan",
    "jax": "jax",
}


def process_identity() -> dict[str, object]:
    """Return the columns of the start record that say with what and where this process runs.

    Asks git, for a few seconds at most, and imports nothing. What cannot be found out is None: nothing of this keeps a
    trainer from starting.
    """
    checkout = _or_none(find_checkout)
    return {
        "git_commit": _or_none(lambda: read_commit(checkout) if checkout else None),
        "git_dirty": _or_none(lambda: is_dirty(checkout) if checkout else None),
        "image_digest": _or_none(_image_digest),
        "nodes": _or_none(lambda: read_nodes(socket.gethostname())),
        "world_size": _or_none(world_size),
        "host": _or_none(socket.gethostname),
        "pid": os.getpid(),
        "scheduler": _or_none(lambda: _json(read_job())),
        "versions": _or_none(lambda: _json(_versions())),
    }


def _or_none(find: Callable[[], _T]) -> _T | None:
    try:
        return find()
    except Exception:  # noqa: BLE001  # whatever is odd about this host, training is to start
        return None


def _json(value: object) -> str | None:
    return None if value is None else json.dumps(redact(value))


def _image_digest() -> str | None:
    """Return the digest that somebody put into the environment, or the UUID that every build of a SIF image gets.

    A container cannot see more: Docker and Kubernetes do not tell it its image, and to hash a SIF image of 20 GB would
    keep the trainer waiting.
    """
    for name in (*_DIGEST_VARIABLES, *_IMAGE_VARIABLES):
        digest = _DIGEST.search(os.environ.get(name, ""))
        if digest:
            return digest[0]
    image = _image()
    if image is None or not Path(image).is_file():
        return None
    with Path(image).open("rb") as file:
        head = file.read(_SIF_UUID.stop)
    return f"sif:{UUID(bytes=head[_SIF_UUID])}" if head[_SIF_MAGIC] == b"SIF_MAGIC" else None


def _image() -> str | None:
    return next((os.environ[name] for name in _IMAGE_VARIABLES if os.environ.get(name)), None)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package, module in _PACKAGES.items():
        version = getattr(sys.modules.get(module), "__version__", None) or _or_none(partial(metadata.version, package))
        if version is not None:
            versions[package] = str(version)
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    for name in ("cuda", "hip"):
        if getattr(torch_version, name, None):
            versions[name] = str(getattr(torch_version, name))
    image = _image()
    if image is not None:
        versions["image"] = image
    return versions
