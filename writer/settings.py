"""The writer's limits, each with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How much the writer keeps in memory and how often it writes.

    Attributes:
        flush_interval_s: Longest wait of a row before it is written. Half a second, so that `kill -9` loses less than
            one second even when a write takes as long again.
        fsync_interval_s: Longest wait of written data before it is made durable; also the heartbeat's interval.
        fsync_bytes: Written data that is made durable without waiting for the timer.
        unsynced_bytes: Written data not yet durable at which nothing more is taken out of the queue: it is kept, for an
            fsync that fails means to write it again.
        queue_points: Points that may wait in memory while the storage does not answer; about 60 bytes each.
        batch_points: Most points in one batch; bounds what one damaged byte can cost and the memory of a conversion.
        part_bytes: Size at which an open part is sealed.
        part_batches: Number of batches at which an open part is sealed: a slow run writes a small batch every half
            second, and reading has a cost for each.
    """

    flush_interval_s: float = 0.5
    fsync_interval_s: float = 30.0
    fsync_bytes: int = 16 << 20
    unsynced_bytes: int = 64 << 20
    queue_points: int = 2_000_000
    batch_points: int = 1 << 17
    part_bytes: int = 64 << 20
    part_batches: int = 1 << 15
