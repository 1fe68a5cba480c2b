"""A root, read again and again: what is new in its segments, how far they came, what could not be read."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmtrack.writer.errors import CorruptSegmentError, FormatError, UsageError
from llmtrack.writer.format import (
    ADOPTION_FOLDER,
    EVALS_FOLDER,
    HEARTBEAT,
    PART_FILE,
    RUN_FOLDER,
    SEALED_SUFFIX,
    SEGMENT_FOLDER,
    check_root,
    part_name,
)
from llmtrack.writer.log.stream import Damage, RawPart, read_raw_part

from .ahead import ahead
from .columns import EPOCH, to_column
from .decode import Found, decode
from .files import (
    VANISHED,
    Listing,
    Reached,
    Sealed,
    check_sealed,
    list_names,
    list_segment,
    look_at_sealed,
    modified_s,
    owner_of,
    parse_sealed,
    read_heartbeat,
    sealed_reached,
    size_of,
)
from .points import Packed, pack_ahead

SMALL_TABLES: Final = ("segments", "checkpoints", "alerts", "batches", "gaps")

_TRIES: Final = 5  # for a segment whose parts vanish while they are read: each try is a new listing
_QUIET_S: Final = 300.0  # without a write: network file systems show one after a minute at most
_DECODE_BYTES: Final = 32 << 20  # of messages decoded together: ten times that in memory
_DECODE_PARTS: Final = 500  # likewise: what is read, decoded and joined while still in the processor's cache is faster

_Key = tuple[str, int]  # run_id, segment
_Survey = tuple[Listing, dict[int, Sealed]]
_Read = tuple[RawPart, tuple[Damage, ...]] | FormatError | OSError


@dataclass
class News:
    """What changed in a root since it was last read, points aside.

    Attributes:
        gone: Segments whose folder is no longer there: all their rows go.
        rows: New rows of the small tables, with `run_id` and `segment` in front.
        replaced: Segments whose rows in `rows` take the place of those read earlier, by table.
        taken_back: Points read earlier that do not count any more, as (run_id, segment, part, first seq): their part
            was sealed, or the next one has them again.
    """

    gone: list[_Key] = field(default_factory=list)
    rows: dict[str, list[pa.Table]] = field(default_factory=lambda: defaultdict(list))
    replaced: dict[str, set[_Key]] = field(default_factory=lambda: defaultdict(set))
    taken_back: list[tuple[str, int, int, int]] = field(default_factory=list)


@dataclass
class _Progress:
    """How far one open part was read."""

    offset: int = 0
    size: int = -1
    first_seq: int | None = None
    last_seq: int = -1


@dataclass
class _Segment:
    run_id: str
    number: int
    folder: str
    ended: bool = False
    open: dict[tuple[str, int], _Progress] = field(default_factory=dict)
    sealed: dict[int, bool] = field(default_factory=dict)  # part: whether it is to be read
    first_tokens: dict[int, int | None] = field(default_factory=dict)  # by part; None: unknown
    heartbeat: Reached | None = None
    reached: Reached | None = None  # by its points
    reached_part: int = 0  # the sealed part that was asked last
    looks: dict[int, Sealed] = field(default_factory=dict)  # at sealed parts
    listed_open: tuple[int, ...] = ()  # the open parts of metrics that were there, read or not

    @property
    def key(self) -> _Key:
        return self.run_id, self.number

    def sealed_path(self, part: int) -> str:
        return f"{self.folder}/{part_name('metrics', part, SEALED_SUFFIX)}"

    def copied_from(self, part: int) -> int | None:
        """Return another sealed part that has the same rows: somebody copied the file, and they count once."""
        digest = self.looks[part].digest
        if digest is None:
            return None
        same = (other for other, look in self.looks.items() if look.digest == digest)
        return next((other for other in same if other != part and self.sealed.get(other)), None)

    def reach(self, place: Reached | None) -> None:
        if place is not None and (self.reached is None or place.tokens >= self.reached.tokens):
            self.reached = place

    def known(self) -> Reached | None:
        """Return the furthest place that a heartbeat or a point shows."""
        if self.heartbeat is None or self.reached is None:
            return self.heartbeat or self.reached
        far = max(self.reached, self.heartbeat, key=lambda place: place.tokens)
        return Reached(max(self.reached.time, self.heartbeat.time), far.step, far.tokens, self.heartbeat.dropped)


class Log:
    """Reads a root, and only what is new in it the next time.

    Small tables are read before points, so that the points that a checkpoint settles are there whenever it is; a part
    that vanishes in between, because it was sealed, makes its segment be listed again.

    Args:
        root: The folder that holds ``run_id=…`` folders. Everything else in it is ignored.
        check: Read every sealed part once, whole, and compare its checksum; otherwise only its end is looked at.
        footers: Where only the end is looked at, have it parsed, too: no use where nobody is going to read the part.

    Raises:
        UsageError: There is no such folder, or it is the folder of a run.
    """

    def __init__(self, root: Path, *, check: bool = False, footers: bool = False) -> None:
        if not root.is_dir():
            raise UsageError(
                f"there is no folder {root}",
                hint="give the folder that holds the run_id=... folders with --root DIR or LLMTRACK_DIR",
            )
        check_root(root)
        self.root = root
        self._look = check_sealed if check else parse_sealed if footers else look_at_sealed
        self._runs: dict[str, dict[int, _Segment]] = {}
        self._evals: dict[str, bool] = {}  # path: whether it is to be read
        self._damages: dict[str, tuple[Damage, ...]] = {}  # in what could be read
        self._faults: dict[str, Damage] = {}  # what could not be, so far
        self._set_aside: set[str] = set()
        self._parents: dict[str, set[str]] = defaultdict(set)

    def run_ids(self) -> list[str]:
        """Return the ids of all runs in the root, sorted, from one listing."""
        return sorted(match[1] for name in list_names(str(self.root)) if (match := RUN_FOLDER.fullmatch(name)))

    def segments(self) -> list[_Key]:
        """Return every segment whose folder is there, whether its start can be read or not."""
        return [segment.key for segment in self._segments()]

    def sealed_parts(self, keys: Collection[_Key] | None = None) -> list[str]:
        """Return the paths of the sealed parts that can be read, of all segments or of some."""
        return [
            segment.sealed_path(part)
            for segment in self._segments()
            if keys is None or segment.key in keys
            for part, is_sound in sorted(segment.sealed.items())
            if is_sound
        ]

    def newest_parts(self, run_id: str, number: int) -> Iterator[tuple[str, frozenset[str] | None]]:
        """Yield the parts of a segment's points, the last one first, and which metrics a part has, if it says so."""
        segment = self._runs.get(run_id, {}).get(number)
        if segment is None:
            return
        sound = {part for part, is_sound in segment.sealed.items() if is_sound}
        for part in sorted({*sound, *segment.listed_open}, reverse=True):
            if part in sound:
                yield segment.sealed_path(part), segment.looks[part].names
            else:
                yield f"{segment.folder}/{part_name('metrics', part)}", None

    def eval_files(self) -> list[str]:
        """Return the paths of the files of evals that can be read."""
        return sorted(path for path, is_sound in self._evals.items() if is_sound)

    def reached(self) -> list[tuple[str, int, Reached]]:
        """Return how far each segment without an end record is known to have come."""
        return [(*segment.key, place) for segment in self._segments() if (place := segment.known()) is not None]

    def first_tokens(self) -> list[tuple[str, int, int | None]]:
        """Return the lowest tokens of the points of each segment that has points; None where that is not known."""
        return [
            (*segment.key, None if None in firsts else min(first for first in firsts if first is not None))
            for segment in self._segments()
            if (firsts := segment.first_tokens.values())
        ]

    def damages(self) -> list[tuple[_Key, Damage]]:
        """Return what could not be read, and the run and segment it belongs to (segment 0: the run as a whole)."""
        found = [damage for damages in self._damages.values() for damage in damages]
        found += self._faults.values()
        found.sort(key=lambda damage: (str(damage.path), damage.first_byte))
        return [(owner_of(str(damage.path)), damage) for damage in found]

    def set_aside(self, path: str, reason: str) -> None:
        """Leave out a Parquet file from now on, and count it as damaged."""
        run_id, number = owner_of(path)
        segment = self._runs.get(run_id, {}).get(number)
        part = PART_FILE.fullmatch(Path(path).name)
        if segment is not None and part is not None:
            segment.sealed[int(part[2])] = False
        else:
            self._evals[path] = False
        self._set_aside.add(path)
        self._faults[path] = Damage(Path(path), 0, size_of(path), reason)

    def read(
        self,
        runs: Collection[str] | None = None,
        *,
        changed: Collection[str] | None = None,
        take_points: Callable[[Packed], None] | None = None,
    ) -> News:
        """Take in what is new.

        Args:
            runs: Only these runs and the runs they were forked from; None: all of the root.
            changed: Of these, look only into the folders of those in which something may be new; None: of all.
            take_points: Called with new points of open parts, some at a time. None: points are not read.

        Raises:
            UsageError: There is no such run.
        """
        news = News()
        there = set(self.run_ids())
        if runs is not None and (missing := sorted(set(runs) - there)):
            raise UsageError(f"there is no run {missing[0]} in {self.root}", hint="llmtrack ls shows the runs")
        for run_id in self._runs.keys() - there:
            self._forget(run_id, set(), news)
        self._list_evals(f"{self.root}/{EVALS_FOLDER}")  # of checkpoints that no run had recorded at the time
        listed: list[tuple[_Segment, Listing]] = []
        wanted, done = set(there if runs is None else runs), set[str]()
        if changed is not None:
            wanted &= set(changed)
        while wanted:
            changing = [segment for run_id in sorted(wanted) for segment in self._list_run(run_id, news)]
            surveys = zip(changing, ahead(self._survey, changing), strict=True)
            new = [(segment, self._take_in(segment, survey, news)) for segment, survey in surveys]
            self._read_small(new, news)
            listed += new
            done |= wanted
            wanted = {parent for run_id in wanted for parent in self._parents[run_id]} & there - done
        pending: list[Found] = []
        pending_bytes = 0
        for segment, listing in listed:
            found = self._read_segment(segment, listing, news, points=take_points is not None)
            pending += found
            pending_bytes += sum(message.nbytes for one in found for message in one.raw.messages)
            if pending_bytes > _DECODE_BYTES or len(pending) >= _DECODE_PARTS:
                self._decode_points(pending, take_points)
                pending, pending_bytes = [], 0
        self._decode_points(pending, take_points)
        return news

    def _segments(self) -> Iterator[_Segment]:
        for _, segments in sorted(self._runs.items()):
            for _, segment in sorted(segments.items()):
                yield segment

    def _forget(self, run_id: str, numbers: Collection[int], news: News) -> None:
        """Drop the segments of a run that are not among the numbers."""
        for number in self._runs[run_id].keys() - numbers:
            segment = self._runs[run_id].pop(number)
            news.gone.append(segment.key)
            inside = (segment.folder, f"{segment.folder}/")
            for found in (self._damages, self._faults):
                for path in [path for path in found if path == inside[0] or path.startswith(inside[1])]:
                    del found[path]
        if not self._runs[run_id]:
            del self._runs[run_id]

    # Listing

    def _list_names(self, folder: str) -> list[str]:
        """Return the names in a folder; one that is not ours to read is a fault, and keeps nobody from the others."""
        try:
            names = list_names(folder)
        except PermissionError as error:
            self._faults[folder] = Damage(Path(folder), 0, 0, os.strerror(error.errno or 0))
            return []
        self._faults.pop(folder, None)
        return names

    def _list_evals(self, folder: str) -> None:
        for name in self._list_names(folder):
            path = f"{folder}/{name}"
            if name.endswith(SEALED_SUFFIX) and not self._evals.get(path):
                self._evals[path] = self._is_sound(path, check_sealed(path).fault)  # small, and all are opened at once

    def _list_run(self, run_id: str, news: News) -> Iterator[_Segment]:
        """Yield the segments in which something may have changed."""
        folder = f"{self.root}/run_id={run_id}"
        names = self._list_names(folder)
        if folder in self._faults:  # what is known of it stays
            return
        if EVALS_FOLDER in names:
            self._list_evals(f"{folder}/{EVALS_FOLDER}")
        folders = {int(match[1]): name for name in names if (match := SEGMENT_FOLDER.fullmatch(name))}
        # Records of adoptions are read like segments, and numbered downwards so that they are none.
        folders |= {-int(match[1]): name for name in names if (match := ADOPTION_FOLDER.fullmatch(name))}
        numbers = sorted(folders)
        if not numbers and run_id not in self._runs:
            return
        segments = self._runs.setdefault(run_id, {})
        for number in numbers:
            if number not in segments:
                segments[number] = _Segment(run_id, number, f"{folder}/{folders[number]}")
        self._forget(run_id, numbers, news)
        for number in numbers:
            segment = segments[number]
            # One that ended and is sealed does not change any more.
            if not segment.ended or any(table == "metrics" for table, _ in segment.open):
                yield segment

    def _survey(self, segment: _Segment) -> _Survey:
        """Return the files of a segment, and what is in the sealed parts that were not yet seen whole."""
        listing = list_segment(segment.folder)
        # A copy that is under way may be whole the next time.
        new = (part for part in sorted(listing.sealed) if not segment.sealed.get(part))
        return listing, {part: self._look(segment.sealed_path(part)) for part in new}

    def _take_in(self, segment: _Segment, survey: _Survey, news: News) -> Listing:
        listing, looks = survey
        for part in sorted(listing.sealed):
            if part in looks:
                path = segment.sealed_path(part)
                look = segment.looks[part] = looks[part]
                fault, segment.first_tokens[part] = look.fault, look.first_tokens
                original = None if fault else segment.copied_from(part)
                if original is not None:
                    fault = f"is a copy of {part_name('metrics', original, SEALED_SUFFIX)}"
                segment.sealed[part] = self._is_sound(path, fault)
            if segment.sealed[part]:  # it is complete, whatever else lies there
                listing.open.pop(("metrics", part), None)
                read_earlier = segment.open.pop(("metrics", part), None)
                if read_earlier is not None and read_earlier.last_seq >= 0:
                    news.taken_back.append((*segment.key, part, 0))
        segment.listed_open = tuple(part for table, part in listing.open if table == "metrics")
        return listing

    def _is_sound(self, path: str, fault: str) -> bool:
        """Return whether a Parquet file is to be read, and count it as damaged otherwise."""
        if path in self._set_aside:
            return False
        if fault:
            self._faults[path] = Damage(Path(path), 0, size_of(path), fault)
        else:
            self._faults.pop(path, None)
        return not fault

    # Reading

    def _read_small(self, listed: Iterable[tuple[_Segment, Listing]], news: News) -> None:
        """Read the small tables of the segments in which they are new or have grown, from their beginning."""
        by_table: dict[str, list[tuple[_Segment, dict[int, str]]]] = {table: [] for table in SMALL_TABLES}
        for segment, listing in listed:
            parts: dict[str, dict[int, str]] = defaultdict(dict)
            for (table, part), path in sorted(listing.open.items(), reverse=True):
                if table in by_table:
                    parts[table][part] = path
            for table, paths in parts.items():
                if any(_has_changed(segment, listing, table, part) for part in paths):
                    by_table[table].append((segment, paths))
        for table, changed in by_table.items():
            read_earlier = (any((table, part) in segment.open for part in paths) for segment, paths in changed)
            news.replaced[table].update(segment.key for segment, _ in itertools.compress(changed, read_earlier))
            all_parts = [(segment, part, path) for segment, paths in changed for part, path in paths.items()]
            found = self._read_small_parts(table, all_parts)
            while some := list(itertools.islice(found, _DECODE_PARTS)):
                self._decode_small(table, some, news)

    def _read_small_parts(self, table: str, parts: Sequence[tuple[_Segment, int, str]]) -> Iterator[Found]:
        """Yield parts of a small table, of each segment the last one first."""
        before: _Segment | None = None
        before_seq: int | None = None
        for first in range(0, len(parts), _DECODE_PARTS):  # so that no more wait to be decoded
            some = parts[first : first + _DECODE_PARTS]
            reads = ahead(lambda one: _try_raw(one[0], one[2], 0), some)
            for (segment, part, path), read in zip(some, reads, strict=True):
                if segment is not before:
                    before, before_seq = segment, None
                try:
                    raw = self._take_raw(path, 0, read)
                except FileNotFoundError:
                    continue  # nobody seals these: the whole run is being deleted
                progress = segment.open[table, part] = _Progress()
                if raw is not None:
                    progress.size = raw.next_offset + raw.torn_bytes
                    yield Found(*segment.key, table, part, raw, before_seq)
                    before_seq = _lower(before_seq, raw.first_seq)

    def _decode_small(self, table: str, found: Sequence[Found], news: News) -> None:
        rows, _ = self._decode(found)
        if rows is None:
            return
        news.rows[table].append(rows)
        if table == "segments":
            for row in rows.select(["run_id", "segment", "phase", "from_run", "from_segment"]).to_pylist():
                self._runs[row["run_id"]][row["segment"]].ended |= row["phase"] == "end"
                if row["from_run"] is not None:
                    self._parents[row["run_id"]].add(row["from_run"])

    def _read_segment(self, segment: _Segment, listing: Listing, news: News, *, points: bool) -> list[Found]:
        """Read the heartbeat and the new points of a segment; list it again when its parts vanish meanwhile."""
        for attempt in range(_TRIES):
            if attempt or (points and not segment.ended):  # what was written since its records were read counts too
                listing = self._take_in(segment, self._survey(segment), news)
            if listing.fault:
                self._faults[segment.folder] = Damage(Path(segment.folder), 0, 0, listing.fault)
                return []
            if not segment.ended and listing.has_heartbeat:
                segment.heartbeat = read_heartbeat(f"{segment.folder}/{HEARTBEAT}") or segment.heartbeat
            needed = points or not (segment.ended or segment.heartbeat)
            try:
                found = self._read_points(segment, listing, news) if needed else []
            except FileNotFoundError:
                continue
            last = max((part for part, is_sound in segment.sealed.items() if is_sound), default=0)
            if last > segment.reached_part and not segment.ended:
                segment.reached_part = last
                segment.reach(segment.looks[last].reached or sealed_reached(segment.sealed_path(last)))
            self._faults.pop(segment.folder, None)
            return found
        # Listed and not there, again and again: a network file system's cache, or files that come and go.
        fault = Damage(Path(segment.folder), 0, 0, "has parts that are listed and cannot be opened")
        self._faults[segment.folder] = fault
        return []

    def _read_points(self, segment: _Segment, listing: Listing, news: News) -> list[Found]:
        """Read what is new in the open parts of metrics.

        Raises:
            FileNotFoundError: One of them was sealed meanwhile. Nothing was taken in.
        """
        parts = [part for table, part in listing.open if table == "metrics"]
        read: dict[int, RawPart | None] = {}
        for part in parts:
            if _has_changed(segment, listing, "metrics", part):
                before = segment.open.get(("metrics", part), _Progress())
                path = listing.open["metrics", part]
                read[part] = self._take_raw(path, before.offset, _try_raw(segment, path, before.offset))
        found: list[Found] = []
        before_seq: int | None = None  # rows from here on stand in a later part too
        oldest = min(parts, default=0)
        later_sealed = {part for part, is_sound in segment.sealed.items() if is_sound and part > oldest > 0}
        for part in sorted({*parts, *later_sealed}, reverse=True):
            if part in later_sealed:
                before_seq = _lower(before_seq, segment.looks[part].first_seq)
                continue
            progress = segment.open.setdefault(("metrics", part), _Progress())
            if before_seq is not None and progress.last_seq >= before_seq:
                news.taken_back.append((*segment.key, part, before_seq))
                progress.last_seq = before_seq - 1
            raw = read.get(part)
            if raw is not None:
                progress.offset, progress.size = raw.next_offset, raw.next_offset + raw.torn_bytes
                progress.first_seq = _lower(progress.first_seq, raw.first_seq)
                progress.last_seq = max(progress.last_seq, -1 if raw.last_seq is None else raw.last_seq)
                if raw.messages:
                    found.append(Found(*segment.key, "metrics", part, raw, before_seq))
            before_seq = _lower(before_seq, progress.first_seq)
        return found

    def _take_raw(self, path: str, offset: int, read: _Read) -> RawPart | None:
        """Note what was damaged in an open part that was read from an offset on; None when nothing of it can be read.

        Raises:
            FileNotFoundError: It was sealed, or deleted, meanwhile.
        """
        if isinstance(read, FormatError):  # of a newer version
            self._faults[path] = Damage(read.path, read.offset, size_of(path), read.reason)
            return None
        if isinstance(read, OSError):
            if read.errno in VANISHED:
                raise FileNotFoundError(path) from read
            self._faults[path] = Damage(Path(path), offset, size_of(path), os.strerror(read.errno or 0))
            return None
        raw, lost = read
        self._faults.pop(path, None)
        self._faults.update((path, damage) for damage in lost)
        earlier = self._damages.pop(path, ()) if offset else ()
        if damages := dict.fromkeys((*earlier, *raw.damages)):
            self._damages[path] = tuple(damages)
        else:
            self._damages.pop(path, None)
        return raw

    # Decoding

    def _decode_points(self, found: Sequence[Found], take_points: Callable[[Packed], None] | None) -> None:
        """Hand on the points of some parts, and note how far their segments came."""
        for piece, result in pack_ahead(found):
            try:
                packed = result()
            except CorruptSegmentError as error:
                if len(piece) > 1:  # the others do not suffer
                    for one in piece:
                        self._decode_points([one], take_points)
                else:
                    self._cannot_decode(error)
                continue
            if packed is not None:
                self._note_places(packed)
                if take_points is not None:
                    take_points(packed)

    def _note_places(self, packed: Packed) -> None:
        last_rows = to_column([end - 1 for end in packed.ends], pa.int64())
        lasts = [packed.rows[name].take(last_rows).cast(pa.int64()).to_pylist() for name in ("time", "step", "tokens")]
        all_tokens = packed.rows["tokens"]
        begin = 0
        for one, end, time_ms, step, last_tokens in zip(packed.found, packed.ends, *lasts, strict=True):
            segment = self._runs[one.run_id][one.segment]
            segment.reach(Reached(EPOCH + dt.timedelta(milliseconds=time_ms), step, last_tokens))
            first: int = pc.min(all_tokens.slice(begin, end - begin)).as_py()
            known = segment.first_tokens.get(one.part, first)
            segment.first_tokens[one.part] = None if known is None else min(first, known)
            begin = end

    def _decode(self, found: Sequence[Found]) -> tuple[pa.Table | None, list[tuple[Found, int]]]:
        """Decode parts; one that cannot be decoded counts as damaged, and the others do not suffer."""
        if not found:
            return None, []
        try:
            return decode(found)
        except CorruptSegmentError as error:
            if len(found) > 1:
                return self._decode([one for one in found if self._decode([one])[0] is not None])
            self._cannot_decode(error)
            return None, []

    def _cannot_decode(self, error: CorruptSegmentError) -> None:
        path = str(error.path)
        self._faults[path] = Damage(error.path, 0, size_of(path), error.reason)


def _try_raw(segment: _Segment, path: str, offset: int) -> _Read:
    """Read and verify one open part from an offset on; and what its torn end has lost, if nobody writes the rest."""
    lost: tuple[Damage, ...] = ()
    try:
        raw = read_raw_part(path, offset=offset, live=not segment.ended)
        if raw.torn_bytes and not segment.ended and time.time() - modified_s(path) > _QUIET_S:
            # If all of it is there and fails its check, something was lost.
            lost = read_raw_part(path, offset=raw.next_offset, live=False).damages
    except (FormatError, OSError) as error:
        return error
    return raw, lost


def _has_changed(segment: _Segment, listing: Listing, table: str, part: int) -> bool:
    progress = segment.open.get((table, part))
    return progress is None or size_of(listing.open[table, part]) != progress.size


def _lower(one: int | None, other: int | None) -> int | None:
    return min((seq for seq in (one, other) if seq is not None), default=None)
