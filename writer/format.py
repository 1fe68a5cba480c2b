"""Format 1 of the log: the names, folders and columns that the writer and every reader agree on.

    ROOT/run_id=<run>/segment=00001/<table>-00001.arrows     a part that is, or was, appended to
    ROOT/run_id=<run>/segment=00001/<table>-00001.parquet    the same part, sealed
    ROOT/run_id=<run>/segment=00001/heartbeat.json
    ROOT/run_id=<run>/adoption=00001/segments-00001.arrows   where a segment really starts, said later
    ROOT/run_id=<run>/evals/evals-<unique>.parquet

Readers may know what is in this module and in `stream`, and nothing else of the writer. `docs/FORMAT.md` has the bytes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pyarrow as pa

from .errors import UsageError

FORMAT_VERSION: Final = 1

OPEN_SUFFIX: Final = ".arrows"
SEALED_SUFFIX: Final = ".parquet"
HEARTBEAT: Final = "heartbeat.json"
EVALS_FOLDER: Final = "evals"

RUN_FOLDER: Final = re.compile(r"run_id=([A-Za-z0-9][A-Za-z0-9._-]{0,63})")
SEGMENT_FOLDER: Final = re.compile(r"segment=([0-9]{5,})")
ADOPTION_FOLDER: Final = re.compile(r"adoption=([0-9]{5,})")
PART_FILE: Final = re.compile(r"([a-z]+)-([0-9]{5,})\.(arrows|parquet)")
_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

TIME: Final = pa.timestamp("ms", tz="UTC")
_STRINGS: Final = pa.list_(pa.string())
_PLACE: Final = [("seq", pa.int64()), ("time", TIME), ("step", pa.int64()), ("tokens", pa.int64())]

SCHEMAS: Final[dict[str, pa.Schema]] = {
    table: pa.schema([*_PLACE, *columns])
    for table, columns in {
        "metrics": [("name", pa.string()), ("value", pa.float64())],
        "segments": [
            ("phase", pa.string()),  # start, end, adopt
            ("project", pa.string()),
            ("run_name", pa.string()),
            ("from_run", pa.string()),  # the place it starts from; null: from nowhere
            ("from_segment", pa.int64()),
            ("from_ckpt", pa.string()),
            ("fork_reason", pa.string()),  # null, recipe, rollback, foreign, requested
            ("recipe_hash", pa.string()),
            ("recipe", pa.string()),  # JSON
            ("recipe_diff", pa.string()),  # JSON: {key: [before, after]}; null when parent and child have the same
            ("config", pa.string()),  # JSON, secrets redacted
            ("git_commit", pa.string()),
            ("git_dirty", pa.bool_()),
            ("image_digest", pa.string()),
            ("nodes", _STRINGS),
            ("world_size", pa.int64()),
            ("host", pa.string()),
            ("pid", pa.int64()),
            ("scheduler", pa.string()),  # JSON
            ("flops", pa.string()),  # JSON
            ("versions", pa.string()),  # JSON
            ("alerts", pa.string()),  # JSON: the detectors with their thresholds
            ("exit", pa.string()),  # finished, preempted, failed, abandoned
            ("detail", pa.string()),
            ("dropped", pa.int64()),  # points
            ("adopts", pa.int64()),  # in an adopt record: the segment whose place this is
        ],
        "checkpoints": [("ckpt_id", pa.string()), ("path", pa.string()), ("bytes", pa.int64())],
        "alerts": [
            ("alert_id", pa.string()),
            ("rule", pa.string()),
            ("level", pa.string()),
            ("metric", pa.string()),
            ("value", pa.float64()),
            ("baseline", pa.float64()),
            ("score", pa.float64()),
            ("message", pa.string()),
            ("batch_hash", pa.string()),
            ("batch_ids", _STRINGS),
            ("phase", pa.string()),  # raised, context, cleared
        ],
        "batches": [
            ("batch_hash", pa.string()),
            ("batch_ids", _STRINGS),
            ("position", pa.int64()),
            ("rank", pa.int64()),  # whose ids these are; null where one rank speaks for all
        ],
        "gaps": [
            ("first_tokens", pa.int64()),
            ("last_tokens", pa.int64()),
            ("points", pa.int64()),
            ("reason", pa.string()),  # queue_full, io_error, bad_value
            ("errno", pa.int64()),
        ],
        "evals": [
            ("ckpt_id", pa.string()),
            ("task", pa.string()),
            ("metric", pa.string()),
            ("value", pa.float64()),
            ("stderr", pa.float64()),
            ("harness", pa.string()),
            ("harness_version", pa.string()),
            ("prompt_hash", pa.string()),
            ("details", pa.string()),  # JSON
        ],
    }.items()
}


def check_root(root: Path) -> None:
    """Refuse the folder of a run where the folder that holds runs is meant; whether it is there is not looked at.

    Raises:
        UsageError: It is called as a run's folder, and holds segments.
    """
    whole = Path(os.path.abspath(root))  # of "." too
    if RUN_FOLDER.fullmatch(whole.name) and any(whole.glob("segment=[0-9]*")):
        raise UsageError(f"{root} is the folder of a run, not a root", hint=f"give {whole.parent}")


def check_run_id(run_id: str) -> str:
    """Return the run id unchanged if it can name a folder and a tracker's run.

    Raises:
        UsageError: It is not ``[A-Za-z0-9][A-Za-z0-9._-]{0,63}``.
    """
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"run id {run_id!r} is not valid",
            hint="use 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
        )
    return run_id


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of a run.

    Raises:
        UsageError: The run id is not valid.
    """
    return root / f"run_id={check_run_id(run_id)}"


def segment_folder(root: Path, run_id: str, segment: int) -> Path:
    """Return the folder of one segment, numbered from 1."""
    return run_folder(root, run_id) / f"segment={segment:05d}"


def adoption_folder(root: Path, run_id: str, adoption: int) -> Path:
    """Return the folder of the record that says anew where a segment of a run starts, numbered from 1."""
    return run_folder(root, run_id) / f"adoption={adoption:05d}"


def part_name(table: str, part: int, suffix: str = OPEN_SUFFIX) -> str:
    """Return the file name of one part, numbered from 1."""
    return f"{table}-{part:05d}{suffix}"
