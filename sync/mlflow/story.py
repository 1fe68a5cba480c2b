"""Tells MLflow a run's story: checkpoints as logged models, alerts and evaluations as points, tables as artifacts.

Everything is looked for before it is made, because MLflow's calls for models are not idempotent: a model by our tags,
the link to its run among the run's outputs, a metric in the run's and in the model's history. So the same story may be
told again after a kill at any moment, and then only what is lacking is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llmtrack.sync.kinds import CANONICAL
from llmtrack.sync.sink import Record, TrackerRun
from llmtrack.sync.story import Checkpoint, Story
from llmtrack.writer.errors import RejectedError

from . import client as mlflow_client
from .encode import finite, key_of, shifted_ms
from .tables import FOLDER, Table, tables, time_text

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Run

_ROUNDS: Final = 2  # what is still lacking after the second is not kept
_BATCH: Final = 1000
_PAGE_MODELS: Final = 100
_PAGE_RECORDS: Final = 20_000
_NO_SUCH_CALL: Final = "ENDPOINT_NOT_FOUND"
_MODEL_TYPE: Final = "checkpoint"
_TABLES: Final = "llmtrack.tables"  # digests of what was uploaded, as JSON
_NOT_STORED: Final = "llmtrack.tables_not_stored"  # and why something was not
_LOGGED: Final = "mlflow.loggedArtifacts"  # what MLflow's pages show as tables
_REASON_CHARS: Final = 300
_LARGE_UNITS: Final = 100  # of the unit that a number of tokens is told in


@dataclass
class _Plan:
    """What MLflow lacks of a story.

    Attributes:
        marks: Tags of models that are there, by model.
        extra: Models that were made twice, because an answer was lost or by two hosts at a time.
        unfinished: Models that are there, and were not said to be ready.
        models: Checkpoints that have none.
        metrics: Of the run and its models.
        links: Tokens by model that is not among the run's outputs.
    """

    marks: dict[str, dict[str, str]] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    models: list[Checkpoint] = field(default_factory=list)
    metrics: list[tuple[Record, str | None]] = field(default_factory=list)
    links: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.marks, self.extra, self.unfinished, self.models, self.metrics, self.links))

    def __str__(self) -> str:
        counts = {
            "marks": len(self.marks) + len(self.extra) + len(self.unfinished),
            "models": len(self.models),
            "values": len(self.metrics),
            "links": len(self.links),
        }
        return ", ".join(f"{number} {what}" for what, number in counts.items() if number)


class Teller:
    """Tells one run in MLflow its story.

    Args:
        client: MLflow's own, or one that has its calls.
        run: The run.
        story: Its story.
        has_artifacts: There is a place for tables that whoever looks at the run can read.
    """

    def __init__(self, client: Any, run: TrackerRun, story: Story, *, has_artifacts: bool) -> None:
        self._client = client
        self._experiment_id: str = run.native.info.experiment_id
        self._run = run
        self._story = story
        self._has_artifacts = has_artifacts
        self._has_models = True

    def tell(self) -> list[str]:
        """Send what is lacking, and see that it stayed.

        Returns:
            What a person should know.

        Raises:
            RejectedError: MLflow accepts and does not keep.
        """
        refused: Exception | None = None
        for _ in range(_ROUNDS):
            plan = self._look()
            if not plan:
                break
            try:
                self._send(plan)
            except Exception as error:  # noqa: BLE001 - another host may just have made the same: look again
                refused = error
        else:
            if plan := self._look():
                raise refused or RejectedError(
                    f"the tracker accepted what it was told of the {self._story.kind} run, and does not have {plan}",
                    sink=mlflow_client.NAME,
                    run_id=self._story.run_id,
                    hint="see what the tracker's own log says; the next sync sends only what is lacking",
                )
        notes = [] if self._has_models else ["this server has no models: evaluated checkpoints are points and a table"]
        return notes + (self._store_tables() if self._story.kind == CANONICAL else [])

    # What is lacking.

    def _look(self) -> _Plan:
        plan = _Plan()
        models: dict[str, LoggedModel] = {}
        for model in self._list_models() if self._story.checkpoints else ():
            if models.setdefault(model.tags.get("llmtrack.ckpt_id", ""), model) is not model:
                plan.extra.append(model.model_id)
        for checkpoint in self._story.checkpoints:
            found = models.get(checkpoint.ckpt_id)
            if found is not None:
                if changed := _changed(found.tags, _model_tags(self._story.run_id, checkpoint)):
                    plan.marks[found.model_id] = changed
                if found.status.value != "READY":
                    plan.unfinished.append(found.model_id)
        own = self._story.own_checkpoints()
        native = self._client.get_run(self._run.ref)
        linked = {output.model_id for output in native.outputs.model_outputs} if native.outputs else set()
        for checkpoint in own:
            found = models.get(checkpoint.ckpt_id)
            if found is None:
                plan.models += [checkpoint] if self._has_models else []
            elif found.model_id not in linked:
                plan.links[found.model_id] = checkpoint.tokens
        plan.metrics = list(self._lacking(models, native))
        return plan

    def _list_models(self) -> list[LoggedModel]:
        try:
            return list(self._search_models())
        except Exception as error:
            if getattr(error, "error_code", "") != _NO_SUCH_CALL:
                raise
            self._has_models = False  # before MLflow 3
            return []

    def _search_models(self) -> Iterator[LoggedModel]:
        token = None
        while True:
            page = self._client.search_logged_models(
                [self._experiment_id],
                f"tags.`llmtrack.run_id` = '{self._story.run_id}'",
                max_results=_PAGE_MODELS,
                order_by=[{"field_name": "creation_time", "ascending": True}],
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                return

    def _lacking(self, models: Mapping[str, LoggedModel], native: Run) -> Iterator[tuple[Record, str | None]]:
        """Yield what the run or one of its models lacks, with that model."""
        points = self._story.points()
        keys = {finite(key_of(point.name), point.value)[0] for point in points} & native.data.metrics.keys()
        there = {key: self._history(key) for key in keys}
        taken: dict[tuple[str, int, str | None], set[int]] = {}
        for point in points:
            key, value = finite(key_of(point.name), point.value)
            held = there.get(key, {}).get(point.tokens, set())
            time_ms = point.time_ms
            if point.ckpt_id is not None:
                used = taken.setdefault((key, point.tokens, point.ckpt_id), set())
                time_ms = shifted_ms(time_ms, value, used, held)
                used.add(time_ms)
            record = Record(key, point.tokens, time_ms, value, points=0)
            model = models.get(point.ckpt_id or "") if math.isfinite(point.value) else None
            if (time_ms, value) not in held or (model is not None and not self._model_has(model, record)):
                yield record, None if model is None else model.model_id

    def _history(self, key: str) -> dict[int, set[tuple[int, float]]]:
        """Return times and values of what the run holds under a key, by tokens."""
        held: dict[int, set[tuple[int, float]]] = {}
        for record in self._client.history(self._run.ref, key, page=_PAGE_RECORDS, skip=0):
            held.setdefault(record.tokens, set()).add((record.time_ms, record.value))
        return held

    def _model_has(self, model: LoggedModel, record: Record) -> bool:
        return any(
            (metric.key, metric.step, metric.timestamp, metric.value, metric.run_id) == (*record[:4], self._run.ref)
            for metric in model.metrics or ()
        )

    # Sending it.

    def _send(self, plan: _Plan) -> None:
        """Send the marks first, then models, and what belongs to a model once that is there."""
        for model_id, tags in plan.marks.items():
            self._client.set_logged_model_tags(model_id, tags)
        for model_id in plan.extra:
            self._client.delete_logged_model(model_id)
        for model_id in plan.unfinished:
            self._client.finalize_logged_model(model_id, "READY")
        for checkpoint in plan.models:
            self._create_model(checkpoint)
        if plan.models:
            plan = self._look()
        plain = [record for record, model in plan.metrics if model is None]
        for at in range(0, len(plain), _BATCH):
            self._client.log_records(self._run.ref, plain[at : at + _BATCH])
        self._send_to_models([(record, model) for record, model in plan.metrics if model is not None])
        if plan.links:
            from mlflow.entities import LoggedModelOutput

            outputs = [LoggedModelOutput(model_id, tokens) for model_id, tokens in plan.links.items()]
            self._client.log_outputs(self._run.ref, outputs)

    def _send_to_models(self, metrics: list[tuple[Record, str]]) -> None:
        """Send what is of the run and of a model of it."""
        if not metrics:
            return
        from mlflow.entities import Metric

        made = [Metric(r.key, r.value, r.time_ms, r.tokens, model_id=model) for r, model in metrics]
        for at in range(0, len(made), _BATCH):
            self._client.log_batch(self._run.ref, metrics=made[at : at + _BATCH])

    def _create_model(self, checkpoint: Checkpoint) -> None:
        params = {
            "ckpt_id": checkpoint.ckpt_id,
            "tokens": checkpoint.tokens,
            "step": checkpoint.step,
            "segment": checkpoint.segment,
            "path": checkpoint.path,
            "bytes": checkpoint.bytes,
            "time": time_text(checkpoint.time_ms),
        }
        model = self._client.create_logged_model(
            self._experiment_id,
            name=f"checkpoint at {_plain_tokens(checkpoint.tokens)} tokens",
            source_run_id=self._run.ref,
            tags=_model_tags(self._story.run_id, checkpoint),
            params={key: str(value) for key, value in params.items() if value is not None},
            model_type=_MODEL_TYPE,
        )
        self._client.finalize_logged_model(model.model_id, "READY")

    # Tables.

    def _store_tables(self) -> list[str]:
        """Upload the tables that are not there as they should be; not having them is no reason to fail."""
        tags = self._client.get_run(self._run.ref).data.tags
        wanted = tables(self._story)
        try:
            self._upload(wanted, tags)
        except Exception as error:  # noqa: BLE001 - whatever keeps the artifacts: the points and tags are there
            self._client.get_run(self._run.ref)  # raises if it is the tracker itself that does not answer
            reason = " ".join(str(error).split())[:_REASON_CHARS] or type(error).__name__
            self._set_tags({_NOT_STORED: reason})
            return [f"the tables {', '.join(table.name for table in wanted)} are not among the artifacts: {reason}"]
        if _NOT_STORED in tags:
            self._client.delete_tag(self._run.ref, _NOT_STORED)
        return []

    def _upload(self, wanted: list[Table], tags: Mapping[str, str]) -> None:
        if not self._has_artifacts:
            raise FileNotFoundError("a database without a server has no place for them")
        known = _json_or(tags.get(_TABLES), {})
        sizes = self._sizes() if known else {}
        changed = [table for table in wanted if known.get(table.name) != table.digest or not _is_whole(table, sizes)]
        if not changed:
            return
        for table in changed:
            self._client.log_text(self._run.ref, table.text, f"{FOLDER}/{table.name}")
        sizes = self._sizes()
        if cut := [table.name for table in changed if not _is_whole(table, sizes)]:
            raise OSError(f"{', '.join(cut)} did not arrive whole")
        listed = _json_or(tags.get(_LOGGED), [])
        entries = [{"path": f"{FOLDER}/{table.name}", "type": "table"} for table in wanted if table.is_table]
        self._set_tags(
            {
                _LOGGED: json.dumps([*listed, *(entry for entry in entries if entry not in listed)]),
                _TABLES: json.dumps({table.name: table.digest for table in wanted}),
            }
        )

    def _sizes(self) -> dict[str, int]:
        return {file.path: file.file_size for file in self._client.list_artifacts(self._run.ref, FOLDER)}

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        self._client.log_texts(self._run.ref, {}, tags)


def _model_tags(run_id: str, checkpoint: Checkpoint) -> dict[str, str]:
    by = checkpoint.superseded_by
    tags = {
        "llmtrack.run_id": run_id,
        "llmtrack.ckpt_id": checkpoint.ckpt_id,
        "llmtrack.kind": "live" if by is None else "superseded",
    }
    if by is not None:
        tags["llmtrack.superseded_by"] = str(by)
    for evaluation in checkpoint.evaluations:
        if not math.isfinite(evaluation.value):  # MLflow would make 0.0 of it in a model
            tags[f"llmtrack.nonfinite.{key_of(evaluation.name)}"] = str(evaluation.value)
    return tags


def _changed(there: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    changed = {key: value for key, value in wanted.items() if there.get(key) != value}
    if there.get("llmtrack.superseded_by") and "llmtrack.superseded_by" not in wanted:
        changed["llmtrack.superseded_by"] = ""  # somebody has joined what belongs together
    return changed


def _plain_tokens(number: int) -> str:
    """Return a number of tokens with three to six digits and the letters that a model's name may have: no dot."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= _LARGE_UNITS * size:
            return f"{round(number / size)}{unit}"
    return str(number)


def _is_whole(table: Table, sizes: Mapping[str, int]) -> bool:
    return sizes.get(f"{FOLDER}/{table.name}") == len(table.text.encode())


def _json_or(text: str | None, default: Any) -> Any:
    """Return what a tag holds, or what it should be like when somebody wrote something else there."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return default
    return found if isinstance(found, type(default)) else default
