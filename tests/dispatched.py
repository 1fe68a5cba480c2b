"""What a thread asks torch to do, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts the operations that this thread asks torch for, collectives and conversions to numbers among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.calls: Counter[str] = Counter()
        self.non_blocking = 0  # copies that are not waited for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call and make it."""
        self.calls[str(func)] += 1
        self.non_blocking += str(func) == "aten.copy_.default" and args[2:] == (True,)
        return func(*args, **(kwargs or {}))
