"""Detectors of what hurts a training run: `docs/ALERTS.md` explains each, and how to write your own."""

from llmtrack.writer.alerts import (
    Detector,
    Divergence,
    Finding,
    GradientSpike,
    ImpossibleMfu,
    Level,
    LossSpike,
    NonFinite,
    SlowRank,
    ThroughputDrop,
    default,
)

__all__ = [
    "Detector",
    "Divergence",
    "Finding",
    "GradientSpike",
    "ImpossibleMfu",
    "Level",
    "LossSpike",
    "NonFinite",
    "SlowRank",
    "ThroughputDrop",
    "default",
]
