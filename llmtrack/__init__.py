"""Track LLM pretraining on clusters without internet: a crash-safe log, its sync to trackers, and SQL over it all.

Each name is imported when it is first used, so that ``import llmtrack`` costs a trainer next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "Cadence",
    "LlmtrackError",
    "Reducer",
    "Run",
    "Throughput",
    "UsageError",
    "__version__",
    "alerts",
    "checkpoint_id",
    "flops",
    "log_eval",
    "new_run_id",
    "open_run",
]

if TYPE_CHECKING:
    from llmtrack import alerts
    from llmtrack.writer.capture import flops
    from llmtrack.writer.capture.cadence import Cadence
    from llmtrack.writer.capture.reduce import Reducer
    from llmtrack.writer.capture.throughput import Throughput
    from llmtrack.writer.checkpoints.checkpoint import checkpoint_id
    from llmtrack.writer.checkpoints.evals import log_eval
    from llmtrack.writer.errors import LlmtrackError, UsageError
    from llmtrack.writer.lineage.opening import new_run_id
    from llmtrack.writer.run import Run, open_run

    __version__: str
else:  # hidden from type checkers, which would otherwise take every misspelt name for one of ours
    from importlib import import_module

    _MODULES = {
        "Cadence": "llmtrack.writer.capture.cadence",
        "LlmtrackError": "llmtrack.writer.errors",
        "Reducer": "llmtrack.writer.capture.reduce",
        "Run": "llmtrack.writer.run",
        "Throughput": "llmtrack.writer.capture.throughput",
        "UsageError": "llmtrack.writer.errors",
        "alerts": "llmtrack.alerts",
        "checkpoint_id": "llmtrack.writer.checkpoints.checkpoint",
        "flops": "llmtrack.writer.capture.flops",
        "log_eval": "llmtrack.writer.checkpoints.evals",
        "new_run_id": "llmtrack.writer.lineage.opening",
        "open_run": "llmtrack.writer.run",
    }

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = import_module("importlib.metadata").version("llmtrack-log")
        elif name in _MODULES:
            try:
                module = import_module(_MODULES[name])
            except ModuleNotFoundError as error:  # torch, which a trainer brings along
                raise import_module("llmtrack.writer.errors").explained(error) from error
            value = getattr(module, name, module)  # alerts and flops are modules themselves
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
