"""A training process as far as its log can tell: it logs until it is killed, and resumes from its checkpoints.

    python watched.py ROOT FOLDER RUN_ID ROWS_PER_S HOW

HOW is a number of rows after which the run finishes, or 0. FOLDER holds its checkpoints, one file each. What it
resumes from stands in the environment: `RESUME` (a checkpoint's file), `RECIPE`, `ON_ROLLBACK`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import llmtrack

_CHECKPOINT_ROWS = 25


def main(root: str, folder: str, run_id: str, rows_per_s: float, rows: int) -> None:
    """Train."""
    resume = os.environ.get("RESUME")
    meta = json.loads(Path(resume).read_text(encoding="utf-8")) if resume else None
    run = llmtrack.open_run(
        root,
        run_id=None if meta else run_id,
        project="watched",
        recipe={"lr": os.environ.get("RECIPE", "0.1")},
        checkpoint=meta,
        on_rollback="continue" if os.environ.get("ON_ROLLBACK") == "continue" else "fork",
    )
    print(run.run_id, run.segment, flush=True)  # noqa: T201  # the test reads it
    step, done = run.start_step, 0
    while not rows or done < rows:
        step, done = step + 1, done + 1
        tokens = step * 100
        run.log({"train/loss": 3.0 / (1 + 0.01 * step) + 1e-6 * run.segment, "train/lr": 0.1}, step=step, tokens=tokens)
        if step % _CHECKPOINT_ROWS == 0:
            file = Path(folder) / f"{run.run_id}-{run.segment:05d}-{step:07d}.json"
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(run.meta(step=step, tokens=tokens)), encoding="utf-8")
            temporary.rename(file)
            run.checkpoint(file, step=step, tokens=tokens)
        if rows_per_s:
            time.sleep(1 / rows_per_s)
    run.finish()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
