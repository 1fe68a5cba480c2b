"""Which run, and which segment of it, a process becomes: the rules of `docs/LINEAGE.md`, on rank 0."""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from llmtrack.writer.errors import UsageError
from llmtrack.writer.format import check_root, check_run_id, run_folder, segment_folder
from llmtrack.writer.plain import Json

from .path import UNBOUNDED
from .recipe import hash_of, recipe_diff, recipe_json
from .records import Records

_log = logging.getLogger("llmtrack")

_STEM_LENGTH: Final = 47  # of a child's id, which has 64: "-requested-" and six digits follow
_CHILD_SUFFIX: Final = re.compile(r"-(?:requested|foreign|recipe|rollback)-[0-9a-f]{6}$")
_META_HINT: Final = "give open_run what run.meta() returned for that checkpoint, e.g. checkpoint=state['llmtrack']"


@dataclass(frozen=True)
class Opening:
    """What a process became; its start record has the same, and is to be written next.

    Attributes:
        run_id: The run.
        segment: Its segment, from 1.
        folder: The segment's folder, made by this process and by no other.
        from_run: The run that it goes on from; None from nowhere.
        from_segment: The segment that it goes on from; None from nowhere.
        from_ckpt: Id of the checkpoint that it goes on from, where one was recorded.
        start_step: Optimiser step that it goes on from.
        start_tokens: Tokens seen up to there.
        fork_reason: Why it is a child's; None when the run goes on with its own curve.
        recipe_hash: Of the recipe; the one on record when none was given.
        recipe: The recipe as canonical JSON; likewise.
        recipe_diff: JSON of what `recipe_diff` says, when a child's recipe is another one than its parent's.
    """

    run_id: str
    segment: int
    folder: Path
    from_run: str | None
    from_segment: int | None
    from_ckpt: str | None
    start_step: int
    start_tokens: int
    fork_reason: str | None
    recipe_hash: str | None
    recipe: str | None
    recipe_diff: str | None


class _Place(NamedTuple):
    run_id: str
    segment: int
    tokens: int


class _Origin(NamedTuple):
    """What a start record says of where its segment comes from, and why."""

    run_id: str | None
    segment: int | None
    tokens: int
    reason: str | None
    recipe_hash: str | None


@dataclass(frozen=True)
class _Checkpoint:
    """What `Run.meta` gave; `segment` is 0 when the process that saved it kept no log."""

    run_id: str
    segment: int
    step: int
    tokens: int
    recipe_hash: str | None
    ckpt_id: str | None

    @property
    def place(self) -> _Place | None:
        return _Place(self.run_id, self.segment, self.tokens) if self.segment else None


@dataclass(frozen=True)
class _Recipe:
    """A recipe; `text` is its canonical JSON, which may be lost where the hash is known."""

    hash: str | None = None
    text: str | None = None

    def differs(self, other: _Recipe) -> bool:
        """Return whether both are known and not the same; equal texts count, should a newer llmtrack hash otherwise."""
        return None not in (self.hash, other.hash) and self.hash != other.hash and self.text != other.text


def new_run_id() -> str:
    """Return an id that sorts by time and that nobody else makes: ``20260102-150405-3fa85c``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def open_segment(
    root: Path,
    *,
    run_id: str | None = None,
    checkpoint: Mapping[str, object] | None = None,
    recipe: object = None,
    on_rollback: Literal["fork", "continue"] = "fork",
    fork: bool = False,
) -> Opening:
    """Decide by what the root holds, and claim a segment's folder that no other process has.

    The caller writes the start record right after. A process that is killed before it has leaves a number that is not
    used again and that is on no path. Damaged records are warned of and count as not there.

    Args:
        root: Folder of runs; made if it is not there.
        run_id: The run to be; None for ``LLMTRACK_RUN_ID``, the checkpoint's or a new one.
        checkpoint: What `Run.meta` gave; None to start from nowhere.
        recipe: Anything that `recipe_hash` takes; None is not compared, and the one on record stays.
        on_rollback: ``continue`` lets the run leave settled points behind, where otherwise a child is opened.
        fork: Open a child whatever the rules say.

    Raises:
        UsageError: A run id, a checkpoint, a recipe or `on_rollback` that is not valid.
        VersionError: The run was written by a newer llmtrack.
        OSError: The storage refused.
    """
    if on_rollback not in ("fork", "continue"):
        raise UsageError(f"on_rollback is {on_rollback!r}", hint="use 'fork' or 'continue'")
    given = run_id if run_id is not None else os.environ.get("LLMTRACK_RUN_ID") or None
    if given is not None:
        check_run_id(given)
    wanted = recipe_json(recipe)
    resumed = None if checkpoint is None else _read_checkpoint(checkpoint)
    place = None if resumed is None else resumed.place
    check_root(root)
    records = Records(root)
    if place is not None:
        _check_place(records, place)

    ours = _run_to_go_on(given, resumed)
    on_record = _recipe_on_record(records, ours, resumed)
    current = on_record if wanted is None else _Recipe(hash_of(wanted), wanted)
    goes_on, reason = _decide(
        records,
        ours,
        place,
        other_recipe=current.differs(on_record),
        continues=on_rollback == "continue",
        fork=fork,
    )
    origin = _Origin(
        run_id=place.run_id if place else None if goes_on else ours,
        segment=place.segment if place else None,
        tokens=resumed.tokens if resumed else 0,
        reason=reason,
        recipe_hash=current.hash,
    )

    root.mkdir(parents=True, exist_ok=True)
    child_prefix = f"{_stem(ours)}-{reason}-" if ours and not goes_on else None
    target = ours if child_prefix is None else _child_to_continue(records, child_prefix, origin)
    target = _claim_run(root, target, child_prefix)
    segment, folder = claim_folder(segment_folder, root, target, max(records.segments(target), default=0) + 1)
    diff = _difference(on_record, current) if origin.run_id not in (None, target) else None
    if not goes_on:
        _log.warning("llmtrack: run %s goes on as %s: %s", ours, target, _because(reason, diff))
    return Opening(
        run_id=target,
        segment=segment,
        folder=folder,
        from_run=origin.run_id,
        from_segment=origin.segment,
        from_ckpt=_checkpoint_id(records, resumed),
        start_step=resumed.step if resumed else 0,
        start_tokens=origin.tokens,
        fork_reason=reason,
        recipe_hash=current.hash,
        recipe=current.text,
        recipe_diff=None if diff is None else json.dumps(diff, ensure_ascii=False),
    )


def _run_to_go_on(given: str | None, resumed: _Checkpoint | None) -> str | None:
    """Return the run that the caller means, which need not exist; None for a new one.

    An id and the ids that were made from it are one family, and the checkpoint says which of it goes on: a job script
    that sets one id for good stays with the child that its run was forked into.
    """
    if resumed is None:
        return given
    family = given is None or (_CHILD_SUFFIX.search(resumed.run_id) and _stem(resumed.run_id) == _stem(given))
    return resumed.run_id or given if family else given


def _decide(  # noqa: PLR0911  # one rule after another, as the document has them
    records: Records, run_id: str | None, place: _Place | None, *, other_recipe: bool, continues: bool, fork: bool
) -> tuple[bool, str | None]:
    """Return whether the process becomes a segment of the run itself or of a child, and the reason to be recorded."""
    head = None if run_id is None else records.head(run_id)
    if run_id is None or (head is None and place is None):
        return True, None  # a new run
    if place is not None and place.run_id != run_id:  # the id is the child's
        if head is not None and (continues or not records.has_settled(run_id)):
            return True, head.fork_reason or "requested"  # the child's next segment
        return head is None, "requested"  # under its id if that is free
    leaves_settled = records.would_leave_settled(run_id, place)
    if fork:
        return False, "requested"
    if place is not None and place.segment not in records.segments(run_id):
        return False, "foreign"
    if other_recipe and (place is not None or leaves_settled):
        return False, "recipe"
    if leaves_settled and not continues:
        return False, "rollback"
    return True, None


def _child_to_continue(records: Records, prefix: str, origin: _Origin) -> str | None:
    """Return the child that was opened just so and has settled nothing since: its job was requeued."""
    for run_id in records.list_runs(prefix):
        head = records.head(run_id)
        if head is None or records.has_settled(run_id):
            continue
        if origin == _Origin(head.from_run, head.from_segment, head.tokens, head.fork_reason, head.recipe_hash):
            return run_id
    return None


def _claim_run(root: Path, run_id: str | None, child_prefix: str | None) -> str:
    """Make the run's folder, under an id that no other run has where none is given, and return the id."""
    if run_id is not None:
        run_folder(root, run_id).mkdir(exist_ok=True)
        return run_id
    while True:
        run_id = new_run_id() if child_prefix is None else child_prefix + secrets.token_hex(3)
        try:
            run_folder(root, run_id).mkdir()
        except FileExistsError:
            continue
        return run_id


def claim_folder(folder_of: Callable[[Path, str, int], Path], root: Path, run_id: str, number: int) -> tuple[int, Path]:
    """Make the folder of the first number that is free: `mkdir` succeeds for one process only.

    Args:
        folder_of: `segment_folder` or `adoption_folder`.
        root: Root of the run.
        run_id: The run.
        number: Where to begin.

    Raises:
        OSError: The storage refused.
    """
    while True:
        folder = folder_of(root, run_id, number)
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return number, folder


def _stem(run_id: str) -> str:
    """Return what the ids that a run's children get here begin with: its own id, or one as good when that is long."""
    stem = _CHILD_SUFFIX.sub("", run_id)
    return stem if len(stem) <= _STEM_LENGTH else f"{stem[: _STEM_LENGTH - 9]}-{sha256(stem.encode()).hexdigest()[:8]}"


def _recipe_on_record(records: Records, run_id: str | None, resumed: _Checkpoint | None) -> _Recipe:
    """Return the recipe of the place that the process starts from, or of the run's head when that is nowhere."""
    if resumed is not None and resumed.place:
        start = records.start(resumed.run_id, resumed.segment)
        same = start is not None and start.recipe_hash == resumed.recipe_hash
        return _Recipe(resumed.recipe_hash, start.recipe if start and same else None)
    head = None if run_id is None else records.head(run_id)
    return _Recipe() if head is None else _Recipe(head.recipe_hash, head.recipe)


def _difference(before: _Recipe, after: _Recipe) -> dict[str, list[Json]] | None:
    if not after.differs(before) or before.text is None or after.text is None:
        return None
    return recipe_diff(json.loads(before.text), json.loads(after.text))


def _checkpoint_id(records: Records, resumed: _Checkpoint | None) -> str | None:
    if resumed is None or resumed.place is None:
        return None
    return resumed.ckpt_id or records.checkpoint_id(*resumed.place)


def _because(reason: str | None, diff: Mapping[str, object] | None) -> str:
    if reason == "requested":
        return "a fork was asked for, or the checkpoint is another run's"
    if reason == "foreign":
        return "the checkpoint's segment is not in this root"
    if reason == "recipe":
        return f"another recipe{' (' + ', '.join(diff) + ')' if diff else ''}"
    return "settled points would be left behind (on_rollback='continue' lets them)"


def _check_place(records: Records, place: _Place) -> None:
    start = records.start(place.run_id, place.segment)
    if start is not None and place.tokens < start.tokens:
        raise UsageError(
            f"the checkpoint's meta says {place.tokens} tokens, but segment {place.segment} of run {place.run_id} "
            f"began at {start.tokens}",
            hint="save run.meta(step=..., tokens=...) with the tokens that the model in the checkpoint has seen",
        )


def _read_checkpoint(meta: Mapping[str, object]) -> _Checkpoint:
    if not isinstance(meta, Mapping):
        raise UsageError(f"checkpoint is a {type(meta).__name__}", hint=_META_HINT)
    missing = [key for key in ("run_id", "segment", "recipe_hash", "step", "tokens") if key not in meta]
    if missing:
        raise UsageError(f"the checkpoint's meta lacks {', '.join(missing)}", hint=_META_HINT)
    segment, step, tokens = (_whole(key, meta[key]) for key in ("segment", "step", "tokens"))
    run_id = _text("run_id", meta["run_id"]) or ""
    if segment or run_id:
        check_run_id(run_id)
    recipe_hash, ckpt_id = _text("recipe_hash", meta["recipe_hash"]), _text("ckpt_id", meta.get("ckpt_id"))
    return _Checkpoint(run_id, segment, step, tokens, recipe_hash, ckpt_id)


def _whole(key: str, value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= UNBOUNDED:
        raise UsageError(f"the checkpoint's meta has the {key} {value!r}", hint=_META_HINT)
    return number


def _text(key: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise UsageError(f"the checkpoint's meta has the {key} {value!r}", hint=_META_HINT)
