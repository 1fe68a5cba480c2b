"""The id of a checkpoint: made of its content and its token count, whatever it is called and wherever it lies.

An evaluator on another host, months later, computes the same id from the same files, so evaluations need no registry.
`docs/EVALS.md` says what counts as a weight file; `docs/decisions/0005-checkpoint-ids.md` says why.
"""

from __future__ import annotations

import hashlib
import operator
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Final, NamedTuple, SupportsIndex

from llmtrack.writer.errors import LlmtrackError, UsageError

# These five are part of what an id means: change one, and no old checkpoint is found again.
_DOMAIN: Final = b"llmtrack checkpoint id 1\0"
_CHUNK_BYTES: Final = 64 << 20  # hashed by itself, so that one huge file keeps every thread busy
_SAMPLES: Final = 8  # quick: places in a file, evenly from its head to its tail
_SAMPLE_BYTES: Final = 64 << 10
_HEX_DIGITS: Final = 32  # 128 bits: short enough to paste, and chance never makes two alike

_THREADS: Final = 16  # enough to hide the latency of shared storage; hashing and reading both release the GIL
_BLOCK_BYTES: Final = 1 << 20  # held by each thread

_STRAY_SUFFIXES: Final = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".swp", "~")
_TEXT_SUFFIXES: Final = frozenset(
    f".{kind}"
    for kind in (
        *("json", "jsonl", "yaml", "yml", "toml", "ini", "cfg", "csv", "tsv", "txt", "md", "rst", "html", "jinja"),
        *("py", "sh", "log", "out", "err"),
    )
)
_DCP_METADATA: Final = ".metadata"  # torch.distributed.checkpoint: which tensor lies where in the shards


@dataclass(frozen=True)
class CheckpointIdentity:
    """What is recorded of a checkpoint.

    Attributes:
        ckpt_id: ``full-…`` or ``quick-…``, and 32 hexadecimal digits.
        bytes: Size of its weight files together.
    """

    ckpt_id: str
    bytes: int


class _WeightFile(NamedTuple):
    name: bytes  # relative to the checkpoint, parts joined by "/"; empty when the checkpoint is one file
    path: str
    size: int
    mtime_ns: int  # never part of the id: only tells that somebody wrote while we read


class _Piece(NamedTuple):
    """Spans of one file that are hashed together, each an offset and a length in bytes."""

    path: str
    spans: tuple[tuple[int, int], ...]


def checkpoint_id(path: str | os.PathLike[str], tokens: SupportsIndex, *, full: bool = True) -> str:
    """Name a checkpoint by its content: the same files and tokens give the same id anywhere, any byte changed another.

    Takes one file or a folder in any layout (shards, safetensors, torch.distributed.checkpoint). Where it lies, what
    the file or folder itself is called, modification times and the order of files do not matter; names within a folder
    do. Strays (hidden, ``.tmp``, ``.lock`` …) and text (``.json``, ``.txt``, ``.log`` …) beside the weights are left
    out. May be called from any thread; reads in up to 16 threads, with 1 MiB of memory each.

    Args:
        path: The file, or the folder.
        tokens: Tokens seen by the run when it was saved.
        full: Read every byte. False reads at most 512 KiB of each file (size, head, tail and six places between) and
            gives a ``quick-…`` id, which is what a run records for itself, being cheap enough for terabytes.

    Raises:
        UsageError: There is no checkpoint at the path, or tokens is no count.
        LlmtrackError: A file vanished, changed or could not be read.
    """
    return identify(path, tokens, full=full).ckpt_id


def identify(path: str | os.PathLike[str], tokens: SupportsIndex, *, full: bool) -> CheckpointIdentity:
    """Name and measure a checkpoint in one go; see `checkpoint_id`.

    Raises:
        UsageError: There is no checkpoint at the path, or tokens is no count.
        LlmtrackError: A file vanished, changed or could not be read.
    """
    where, count = Path(path), _token_count(tokens)
    try:
        if not where.exists():
            raise UsageError(f"there is no checkpoint at {where}", hint="give the file or folder that was saved")
        files = _weight_files(where)
        digest = _digest(files, count, full=full)
        if (changed := _difference(files, _weight_files(where))) is not None:
            raise LlmtrackError(f"{where}: {changed} while it was being read", hint="wait until the save has ended")
    except FileNotFoundError as error:
        raise LlmtrackError(
            f"{error.filename}: deleted while the checkpoint was being read, or a link that leads nowhere",
            hint="keep the checkpoint until its id is made, or give a complete copy",
        ) from error
    except OSError as error:
        raise LlmtrackError(
            f"{error.filename or where}: could not be read: {error.strerror or error}",
            hint="check the storage and the permissions, then try again",
        ) from error
    return CheckpointIdentity(f"{'full' if full else 'quick'}-{digest}", sum(file.size for file in files))


def _token_count(tokens: SupportsIndex) -> int:
    try:
        count = -1 if isinstance(tokens, bool) else operator.index(tokens)
    except TypeError:
        count = -1
    if not 0 <= count < 1 << 63:
        raise UsageError(f"tokens {tokens!r} is no token count", hint="give a whole number from 0 on")
    return count


def _weight_files(where: Path) -> list[_WeightFile]:
    """List the weight files of a checkpoint, sorted by name."""
    status = where.stat()
    if stat.S_ISREG(status.st_mode):
        files = [_WeightFile(b"", str(where), status.st_size, status.st_mtime_ns)]
    elif stat.S_ISDIR(status.st_mode):
        files = sorted(_walk(str(where), b"", frozenset({(status.st_dev, status.st_ino)})))
    else:
        raise UsageError(f"{where} is neither a file nor a folder", hint="give the file or folder that was saved")
    if not any(file.size for file in files):
        raise UsageError(
            f"{where} holds no weights",
            hint="hidden, temporary, text and empty files are not weights; give what the trainer saved",
        )
    return files


def _walk(folder: str, prefix: bytes, above: frozenset[tuple[int, int]]) -> Iterator[_WeightFile]:
    """Yield the weight files below a folder; `above` are the folders on the way, so that no link leads in a circle."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_stray(entry.name):
                continue
            name = prefix + os.fsencode(entry.name)
            if entry.is_dir():
                status = entry.stat()
                this = (status.st_dev, status.st_ino)
                if this not in above:
                    yield from _walk(entry.path, name + b"/", above | {this})
            elif Path(entry.name).suffix.lower() not in _TEXT_SUFFIXES:
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    yield _WeightFile(name, entry.path, status.st_size, status.st_mtime_ns)


def _is_stray(name: str) -> bool:
    hidden = name.startswith(".") and name != _DCP_METADATA
    return hidden or name == "__pycache__" or name.lower().endswith(_STRAY_SUFFIXES)


def _difference(before: list[_WeightFile], after: list[_WeightFile]) -> str | None:
    """Say what happened to the first file that is not as it was."""
    if before == after:
        return None
    was, now = ({file.name: file for file in files} for files in (before, after))
    name = min(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    verb = "appeared" if name not in was else "vanished" if name not in now else "changed"
    return f"{os.fsdecode(name) or 'the file'} {verb}"


def _digest(files: list[_WeightFile], tokens: int, *, full: bool) -> str:
    """Hash names, sizes and content; the content in pieces by many threads, their digests in the order of names."""
    whole = hashlib.sha256(_DOMAIN, usedforsecurity=False)
    whole.update(b"full" if full else b"quick")
    whole.update(tokens.to_bytes(8, "little"))
    for file in files:
        whole.update(len(file.name).to_bytes(8, "little") + file.name + file.size.to_bytes(8, "little"))
    for digest in _Hashing(files, full=full).run():
        whole.update(digest)
    return whole.hexdigest()[:_HEX_DIGITS]


class _Hashing:
    """Hashes the pieces of files by several threads, the caller's among them.

    Not a `ThreadPoolExecutor`, for which the interpreter waits at exit, while storage may hang for ever; and a run that
    ends only there has its last checkpoint identified when no thread can be started any more.
    """

    def __init__(self, files: list[_WeightFile], *, full: bool) -> None:
        self._count = sum(1 for file in files for _ in _pieces(file, full=full))
        self._pieces = enumerate(piece for file in files for piece in _pieces(file, full=full))
        self._lock = Lock()
        self._digests: dict[int, bytes] = {}
        self._error: BaseException | None = None

    def run(self) -> list[bytes]:
        """Return the digests in the order of the pieces, or raise the first error."""
        threads: list[Thread] = []
        for i in range(min(self._count, _THREADS) - 1):
            thread = Thread(target=self._work, name=f"llmtrack-checkpoint-{i}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or the process may have no more of them
                break
            threads.append(thread)
        self._work()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [self._digests[i] for i in range(self._count)]

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                at, piece = task
                self._digests[at] = _hash_piece(piece)
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that asked, for all of them
            with self._lock:
                self._error = self._error or error

    def _next(self) -> tuple[int, _Piece] | None:
        with self._lock:
            return next(self._pieces, None) if self._error is None else None


def _pieces(file: _WeightFile, *, full: bool) -> Iterator[_Piece]:
    if full:
        for offset in range(0, file.size, _CHUNK_BYTES):
            yield _Piece(file.path, ((offset, min(_CHUNK_BYTES, file.size - offset)),))
    elif file.size <= _SAMPLES * _SAMPLE_BYTES:
        yield _Piece(file.path, ((0, file.size),))
    else:
        last = file.size - _SAMPLE_BYTES
        yield _Piece(file.path, tuple((last * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)))


def _hash_piece(piece: _Piece) -> bytes:
    digest = hashlib.sha256(usedforsecurity=False)
    block = memoryview(bytearray(min(_BLOCK_BYTES, max(length for _, length in piece.spans))))
    with Path(piece.path).open("rb", buffering=0) as file:
        for offset, length in piece.spans:
            file.seek(offset)
            rest = length
            while rest:
                got = file.readinto(block[:rest])
                if not got:
                    raise LlmtrackError(
                        f"{piece.path}: cut short while it was being read", hint="wait until the save has ended"
                    )
                digest.update(block[:got])
                rest -= got
    return digest.digest()
