"""Read DCP metadata without running code that a checkpoint may contain.

torch 2.13 reads `.metadata` with plain pickle, which executes code of the file's author. The metadata of plain tensors
needs only a few classes, and no others are loaded here.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from planner.errors import EnvironmentProblem

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size", "float32", "bfloat16", "device"},
    "torch._utils": {"_rebuild_device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
"""Module -> names that occur in the metadata of plain tensors."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in ALLOWED.get(module, ()):
            raise _refused(f"{module}.{name}")
        return super().find_class(module, name)


def _member(owner: object, name: str) -> _MEM_FORMAT_ENCODING:
    """A replacement for `getattr`, which pickles of Python 3.11.0 to 3.11.3 call to get a member of an enum."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise _refused("builtins.getattr")
    return _MEM_FORMAT_ENCODING[name]


def _refused(what: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"the checkpoint's metadata asks for {what}, which tensors do not need",
        hint="load only checkpoints that you trust",
    )


class SafeReader(FileSystemReader):
    """torch's file reader, with an allow-list for metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read `.metadata` of the checkpoint.

        Raises:
            EnvironmentProblem: the metadata refers to anything but plain tensors.
        """
        with Path(self.path, ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata
