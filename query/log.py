"""What lies in a root: its segments, what is new in their parts, and what could not be read.

Files are only ever listed, read and, when they vanish in between because they were sealed, listed again. Small tables
are read before points, so that whatever a checkpoint says is settled is there when it is looked for.
"""

from __future__ import annotations

import datetime as dt
import errno
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmtrack.writer.errors import FormatError, UsageError
from llmtrack.writer.format import (
    EVALS_FOLDER,
    HEARTBEAT,
    PART_FILE,
    RUN_FOLDER,
    SCHEMAS,
    SEALED_SUFFIX,
    SEGMENT_FOLDER,
)
from llmtrack.writer.stream import Damage, read_part

SMALL_TABLES: Final = ("segments", "checkpoints", "alerts", "batches", "gaps")
POINT_COLUMNS: Final = ("seq", "time", "step", "tokens", "name", "value")

_TRIES: Final = 5  # of a segment whose parts vanish while they are read: each try is a new listing
_PARQUET_TAIL_BYTES: Final = 8  # the length of the footer and the magic number
_PARQUET_MAGIC: Final = b"PAR1"
_VANISHED: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})

_Key = tuple[str, int]  # run_id, segment


@dataclass(frozen=True)
class Reached:
    """How far a segment is known to have come."""

    time: dt.datetime
    step: int
    tokens: int
    dropped: int = 0


@dataclass
class News:
    """What changed in a root since it was last read.

    Attributes:
        gone: Segments whose folder is no longer there: all their rows go.
        rows: Rows of the small tables, with `run_id` and `segment` in front.
        replaced: Segments whose rows in `rows` take the place of those read earlier, by table.
        points: Rows of open parts of metrics, with `run_id`, `segment` and `part` in front; None when there are none.
        taken_back: Points read earlier that do not count any more, as (run_id, segment, part, first seq): their part
            was sealed, or the next one has them again.
    """

    gone: list[_Key] = field(default_factory=list)
    rows: dict[str, pa.Table] = field(default_factory=dict)
    replaced: dict[str, set[_Key]] = field(default_factory=lambda: defaultdict(set))
    points: pa.Table | None = None
    taken_back: list[tuple[str, int, int, int]] = field(default_factory=list)


@dataclass
class _Open:
    """How far one open part was read."""

    offset: int = 0
    size: int = -1
    first_seq: int | None = None
    last_seq: int = -1


@dataclass
class _Segment:
    run_id: str
    number: int
    path: str
    ended: bool = False
    open: dict[tuple[str, int], _Open] = field(default_factory=dict)
    sealed: dict[int, bool] = field(default_factory=dict)  # part -> readable
    heartbeat: Reached | None = None
    reached: Reached | None = None
    sealed_reached: int = 0  # the part whose statistics are in `reached`

    @property
    def key(self) -> _Key:
        return self.run_id, self.number

    def part_path(self, table: str, part: int, suffix: str = ".arrows") -> Path:
        return Path(self.path, f"{table}-{part:05d}{suffix}")

    def known(self) -> Reached | None:
        """Return the furthest place that a heartbeat or a point shows."""
        places = [place for place in (self.heartbeat, self.reached) if place is not None]
        if not places:
            return None
        far = max(places, key=lambda place: place.tokens)
        return Reached(max(place.time for place in places), far.step, far.tokens, max(p.dropped for p in places))


@dataclass
class _Listing:
    """The files of one segment; a sealed part hides the open one of the same number."""

    open: dict[tuple[str, int], os.DirEntry[str]] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    has_heartbeat: bool = False


class Log:
    """One root, read again and again: each `read` returns what is new since the one before.

    Args:
        root: The folder that holds ``run_id=…`` folders. Everything else in it is ignored.

    Raises:
        UsageError: There is no such folder, or it is the folder of a run.
    """

    def __init__(self, root: Path) -> None:
        if RUN_FOLDER.fullmatch(root.name) and any(SEGMENT_FOLDER.fullmatch(name) for name in _names(root)):
            raise UsageError(f"{root} is the folder of a run, not a root", hint=f"use --root {root.parent}")
        if not root.is_dir():
            raise UsageError(
                f"there is no folder {root}",
                hint="give the folder that holds the run_id=… folders with --root DIR or LLMTRACK_DIR",
            )
        self.root = root
        self._segments: dict[_Key, _Segment] = {}
        self._evals: dict[str, bool] = {}  # path -> readable
        self._damages: dict[str, tuple[Damage, ...]] = {}
        self._parents: dict[str, set[str]] = defaultdict(set)
        self._places: set[_Key] = set()  # segments that others start from

    # ---- what there is -------------------------------------------------------------------------------------------

    def run_ids(self) -> list[str]:
        """Return the ids of all runs in the root, sorted, from one listing."""
        return sorted(match[1] for name in _names(self.root) if (match := RUN_FOLDER.fullmatch(name)))

    def segments(self) -> list[_Key]:
        """Return every segment whose folder is there, whether its start can be read or not."""
        return sorted(self._segments)

    def sealed_parts(self) -> list[str]:
        """Return the paths of the sealed parts of metrics that can be opened."""
        return [
            str(segment.part_path("metrics", part, SEALED_SUFFIX))
            for _, segment in sorted(self._segments.items())
            for part, readable in sorted(segment.sealed.items())
            if readable
        ]

    def sealed_parts_before(self) -> list[str]:
        """Return those of them whose segment another one starts from: all that a segment's start is compared with."""
        return [path for path in self.sealed_parts() if _owner(path) in self._places]

    def eval_files(self) -> list[str]:
        """Return the paths of the files of evals that can be opened."""
        return sorted(path for path, readable in self._evals.items() if readable)

    def reached(self) -> list[tuple[str, int, Reached]]:
        """Return how far each segment without an end record is known to have come."""
        return [
            (segment.run_id, segment.number, place)
            for segment in self._segments.values()
            if (place := segment.known()) is not None
        ]

    def damages(self) -> list[tuple[_Key | None, Damage]]:
        """Return what could not be read, with the run and segment it belongs to (segment 0: the run's evals)."""
        return [(_owner(path), damage) for path, found in sorted(self._damages.items()) for damage in found]

    def set_aside(self, path: str, reason: str) -> None:
        """Leave out a Parquet file from now on, and count it as damaged."""
        segment = self._segments.get(_owner(path))
        name = PART_FILE.fullmatch(os.path.basename(path))
        if segment is not None and name is not None:
            segment.sealed[int(name[2])] = False
        else:
            self._evals[path] = False
        self._damages[path] = (Damage(Path(path), 0, _size(path), reason),)

    # ---- what is new ---------------------------------------------------------------------------------------------

    def read(self, runs: Collection[str] | None = None, *, points: bool = True) -> News:
        """Take in what is new.

        Args:
            runs: Only these runs and the runs they were forked from; None: all of the root.
            points: Read the open parts of metrics too.

        Raises:
            UsageError: There is no such run.
        """
        news = News()
        there = self.run_ids()
        if runs is not None and (missing := sorted(set(runs) - set(there))):
            raise UsageError(f"there is no run {missing[0]} in {self.root}", hint="llmtrack ls shows the runs")
        for key in [key for key in self._segments if key[0] not in set(there)]:
            self._forget(key, news)
        small: dict[str, list[pa.Table]] = defaultdict(list)
        wanted, done = set(there if runs is None else runs), set[str]()
        touched: list[_Segment] = []
        self._list_evals(os.path.join(self.root, EVALS_FOLDER))  # of checkpoints that no run had recorded at the time
        while wanted:
            new = list(self._list_runs(sorted(wanted), news))
            self._read_small_tables(new, news, small)
            touched += [segment for segment, _ in new]
            done |= wanted
            parents = {parent for run_id in wanted for parent in self._parents[run_id]}
            wanted = set() if runs is None else (parents & set(there)) - done
        news.rows = {table: pa.concat_tables(tables) for table, tables in small.items()}
        chunks: list[pa.Table] = []
        for segment in touched:
            chunks += self._read_progress(segment, news, points=points)
        if chunks:
            news.points = pa.concat_tables(chunks)
        return news

    def _list_runs(self, run_ids: Iterable[str], news: News) -> Iterator[tuple[_Segment, _Listing]]:
        """Yield the segments in which something may have changed, and the files they have."""
        for run_id in run_ids:
            folder = os.path.join(self.root, f"run_id={run_id}")
            names = _names(folder)
            numbers = sorted(int(match[1]) for name in names if (match := SEGMENT_FOLDER.fullmatch(name)))
            for key in [key for key in self._segments if key[0] == run_id and key[1] not in numbers]:
                self._forget(key, news)
            if EVALS_FOLDER in names:
                self._list_evals(os.path.join(folder, EVALS_FOLDER))
            for number in numbers:
                path = os.path.join(folder, f"segment={number:05d}")
                segment = self._segments.setdefault((run_id, number), _Segment(run_id, number, path))
                if segment.ended and not any(table == "metrics" for table, _ in segment.open):
                    continue  # it ended and is sealed: nothing in it changes any more
                yield segment, self._list_segment(segment, news)

    def _list_evals(self, folder: str) -> None:
        for name in _names(folder):
            path = os.path.join(folder, name)
            if name.endswith(SEALED_SUFFIX) and path not in self._evals:
                self._evals[path] = self._check_parquet(path)

    def _list_segment(self, segment: _Segment, news: News) -> _Listing:
        listing = _list_files(segment.path)
        for part in sorted(listing.sealed - segment.sealed.keys()):
            path = segment.part_path("metrics", part, SEALED_SUFFIX)
            segment.sealed[part] = self._check_parquet(str(path))
            if segment.sealed[part]:
                before = segment.open.pop(("metrics", part), None)
                self._damages.pop(str(segment.part_path("metrics", part)), None)
                if before is not None and before.last_seq >= 0:
                    news.taken_back.append((*segment.key, part, 0))
        for part, readable in segment.sealed.items():
            if readable:
                listing.open.pop(("metrics", part), None)
        return listing

    def _check_parquet(self, path: str) -> bool:
        """Return whether a Parquet file has its end, and count it as damaged otherwise."""
        reason = _parquet_fault(path)
        if reason:
            self._damages[path] = (Damage(Path(path), 0, _size(path), reason),)
        return not reason

    def _forget(self, key: _Key, news: News) -> None:
        segment = self._segments.pop(key)
        self._damages = {path: found for path, found in self._damages.items() if not path.startswith(segment.path)}
        news.gone.append(key)

    # ---- small tables --------------------------------------------------------------------------------------------

    def _read_small_tables(
        self, listed: Sequence[tuple[_Segment, _Listing]], news: News, small: dict[str, list[pa.Table]]
    ) -> None:
        """Read the small tables of segments in which one of their parts is new or has grown."""
        for table in SMALL_TABLES:
            changed: list[tuple[_Segment, list[int]]] = []
            for segment, listing in listed:
                parts = sorted(part for name, part in listing.open if name == table)
                if any(_has_changed(segment.open.get((table, part)), listing.open[table, part]) for part in parts):
                    changed.append((segment, parts))
            rows = self._read_rows(table, changed, news)
            if rows is None:
                continue
            small[table].append(rows)
            if table == "segments":
                self._take_in_records(rows)

    def _read_rows(self, table: str, changed: Sequence[tuple[_Segment, list[int]]], news: News) -> pa.Table | None:
        tables, keys = [], []
        for segment, parts in changed:
            if any(segment.open.get((table, part)) for part in parts):
                news.replaced[table].add(segment.key)
            next_seq: int | None = None
            for part in reversed(parts):
                rows = self._read_open(segment, table, part, next_seq)
                if len(rows):
                    next_seq = _first(rows, next_seq)
                    tables.append(rows)
                    keys.append((segment.key, len(rows)))
        return _with_keys(tables, keys)

    def _take_in_records(self, rows: pa.Table) -> None:
        columns = rows.select(["run_id", "segment", "phase", "from_run", "from_segment"])
        ended = columns.filter(pc.equal(columns["phase"], "end"))
        for run_id, number in zip(ended["run_id"].to_pylist(), ended["segment"].to_pylist(), strict=True):
            self._segments[run_id, number].ended = True
        placed = columns.filter(pc.is_valid(columns["from_run"]))
        for row in placed.to_pylist():
            self._parents[row["run_id"]].add(row["from_run"])
            self._places.add((row["from_run"], row["from_segment"]))

    def _read_open(self, segment: _Segment, table: str, part: int, before_seq: int | None, offset: int = 0) -> pa.Table:
        """Read one open part from an offset on, and remember how far that was.

        Raises:
            FileNotFoundError: It was sealed, or its segment deleted, meanwhile.
        """
        path = segment.part_path(table, part)
        try:
            content = read_part(path, offset=offset, live=not segment.ended)
        except FormatError as error:
            self._damages[str(path)] = (Damage(path, error.offset, _size(str(path)), error.reason),)
            segment.open[table, part] = _Open(size=_size(str(path)))
            return SCHEMAS[table].empty_table()
        except OSError as error:
            if error.errno in _VANISHED:
                raise FileNotFoundError(str(path)) from error
            self._damages[str(path)] = (Damage(path, 0, _size(str(path)), os.strerror(error.errno or 0)),)
            segment.open.setdefault((table, part), _Open())
            return SCHEMAS[table].empty_table()
        earlier = self._damages.get(str(path), ()) if offset else ()
        self._damages.pop(str(path), None)
        if found := (*earlier, *content.damages):
            self._damages[str(path)] = found
        rows = content.table if before_seq is None else content.table.filter(pc.less(content.table["seq"], before_seq))
        state = segment.open.get((table, part), _Open()) if offset else _Open()
        segment.open[table, part] = state
        state.offset, state.size = content.next_offset, content.next_offset + content.torn_bytes
        if len(content.table):
            state.first_seq = _first(content.table, state.first_seq)
        if len(rows):
            state.last_seq = max(state.last_seq, pc.max(rows["seq"]).as_py())
        return rows

    # ---- points and progress -------------------------------------------------------------------------------------

    def _read_progress(self, segment: _Segment, news: News, *, points: bool) -> list[pa.Table]:
        """Read the heartbeat and the points of a segment; list it again when its parts vanish meanwhile."""
        for _ in range(_TRIES):
            try:
                listing = self._list_segment(segment, news)
                if listing.has_heartbeat and not segment.ended:
                    segment.heartbeat = _read_heartbeat(os.path.join(segment.path, HEARTBEAT)) or segment.heartbeat
                chunks = self._read_points(segment, listing, news) if points else []
                if not segment.ended:
                    self._look_at_sealed(segment)
            except FileNotFoundError:
                continue
            return chunks
        path = Path(segment.path)
        self._damages[segment.path] = (Damage(path, 0, 0, "its parts are listed and cannot be opened"),)
        return []

    def _read_points(self, segment: _Segment, listing: _Listing, news: News) -> list[pa.Table]:
        chunks: list[pa.Table] = []
        next_seq: int | None = None
        for part in sorted(
            {part for table, part in listing.open if table == "metrics"} | segment.sealed.keys(), reverse=True
        ):
            entry = listing.open.get(("metrics", part))
            if entry is None:
                if part != min(listing.sealed) and next_seq is None and _has_older_open(listing, part):
                    next_seq = _sealed_first_seq(segment.part_path("metrics", part, SEALED_SUFFIX))
                continue
            state = segment.open.get(("metrics", part))
            if state is not None and next_seq is not None and state.last_seq >= next_seq:
                news.taken_back.append((*segment.key, part, next_seq))
                state.last_seq = next_seq - 1
            if _has_changed(state, entry):
                offset = state.offset if state is not None else 0
                rows = self._read_open(segment, "metrics", part, next_seq, offset)
                if len(rows):
                    chunks.append(_point_rows(segment, part, rows))
                    last = rows.slice(len(rows) - 1).to_pylist()[0]
                    if segment.reached is None or last["tokens"] >= segment.reached.tokens:
                        segment.reached = Reached(last["time"], last["step"], last["tokens"])
            first = segment.open["metrics", part].first_seq
            next_seq = first if next_seq is None else next_seq if first is None else min(first, next_seq)
        return chunks

    def _look_at_sealed(self, segment: _Segment) -> None:
        """Learn from the newest sealed part how far a segment came that was sealed for it after its death."""
        part = max((part for part, readable in segment.sealed.items() if readable), default=0)
        if part > segment.sealed_reached:
            segment.sealed_reached = part
            place = _sealed_reached(segment.part_path("metrics", part, SEALED_SUFFIX))
            if place is not None and (segment.reached is None or place.tokens >= segment.reached.tokens):
                segment.reached = place


def _names(folder: str | os.PathLike[str]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError as error:
        if error.errno in _VANISHED:
            return []
        raise


def _list_files(folder: str) -> _Listing:
    listing = _Listing()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == HEARTBEAT:
                    listing.has_heartbeat = True
                elif (match := PART_FILE.fullmatch(entry.name)) and match[1] in SCHEMAS:
                    if match[3] == "arrows":
                        listing.open[match[1], int(match[2])] = entry
                    elif match[1] == "metrics":
                        listing.sealed.add(int(match[2]))
    except OSError as error:
        if error.errno not in _VANISHED:
            raise
    return listing


def _has_changed(state: _Open | None, entry: os.DirEntry[str]) -> bool:
    return state is None or _size(entry.path) != state.size


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _first(rows: pa.Table, known: int | None) -> int:
    first: int = pc.min(rows["seq"]).as_py()
    return first if known is None else min(first, known)


def _has_older_open(listing: _Listing, part: int) -> bool:
    return any(table == "metrics" and number < part for table, number in listing.open)


def _owner(path: str) -> _Key:
    """Return run and segment from a path inside a root; segment 0 stands for what belongs to the run as a whole."""
    parts = Path(path).parts
    run = next((match[1] for name in parts if (match := RUN_FOLDER.fullmatch(name))), "")
    number = next((int(match[1]) for name in parts if (match := SEGMENT_FOLDER.fullmatch(name))), 0)
    return run, number


def _with_keys(tables: Sequence[pa.Table], keys: Sequence[tuple[_Key, int]]) -> pa.Table | None:
    """Return one table with `run_id` and `segment` in front, in one chunk: DuckDB pays for each chunk of each column."""
    if not tables:
        return None
    rows = pa.concat_tables(tables).combine_chunks()
    run_ids = [run_id for (run_id, _), count in keys for _ in range(count)]
    numbers = [number for (_, number), count in keys for _ in range(count)]
    rows = rows.add_column(0, "segment", pa.array(numbers, pa.int64()))
    return rows.add_column(0, "run_id", pa.array(run_ids, pa.string()))


def _point_rows(segment: _Segment, part: int, rows: pa.Table) -> pa.Table:
    count = len(rows)
    rows = rows.select(POINT_COLUMNS)
    rows = rows.add_column(0, "part", pa.repeat(pa.scalar(part, pa.int64()), count))
    rows = rows.add_column(0, "segment", pa.repeat(pa.scalar(segment.number, pa.int64()), count))
    return rows.add_column(0, "run_id", pa.repeat(pa.scalar(segment.run_id, pa.string()), count))


def _read_heartbeat(path: str) -> Reached | None:
    """Return what the heartbeat says, or None while it is being rewritten."""
    try:
        with open(path, "rb") as file:
            beat = json.loads(file.read())
        time = dt.datetime.fromisoformat(beat["time"])
        return Reached(time, int(beat["step"] or 0), int(beat["tokens"] or 0), int(beat.get("dropped") or 0))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parquet_fault(path: str) -> str:
    """Return why a Parquet file cannot be opened, or nothing."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size < 2 * len(_PARQUET_MAGIC) + 4:
                return "too short for a Parquet file"
            file.seek(size - _PARQUET_TAIL_BYTES)
            tail = file.read(_PARQUET_TAIL_BYTES)
    except OSError as error:
        return os.strerror(error.errno or 0)
    footer_bytes = int.from_bytes(tail[:4], "little")
    if tail[4:] != _PARQUET_MAGIC or footer_bytes + _PARQUET_TAIL_BYTES > size:
        return "has no Parquet footer at its end"
    return ""


def _sealed_first_seq(path: Path) -> int | None:
    try:
        return int((pq.read_metadata(path).metadata or {})[b"llmtrack.seq_first"])
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return None


def _sealed_reached(path: Path) -> Reached | None:
    """Return the end of a sealed part from the statistics of its columns."""
    try:
        footer = pq.read_metadata(path)
    except (pa.ArrowException, OSError):
        return None
    last: dict[str, list[object]] = defaultdict(list)
    for group in range(footer.num_row_groups):
        for column in range(footer.num_columns):
            chunk = footer.row_group(group).column(column)
            if chunk.path_in_schema in ("time", "step", "tokens") and chunk.is_stats_set:
                last[chunk.path_in_schema].append(chunk.statistics.max)
    if not all(last[name] for name in ("time", "step", "tokens")):
        return None
    return Reached(max(last["time"]), max(last["step"]), max(last["tokens"]))
