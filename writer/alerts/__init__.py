"""Detectors of what hurts a training run, and what becomes of what they find; `docs/ALERTS.md` explains each."""

from .detector import Detector, Finding, Level
from .divergence import Divergence
from .gradient import GradientSpike
from .nonfinite import NonFinite
from .slow_rank import SlowRank
from .spike import LossSpike
from .throughput import ThroughputDrop
from .utilisation import ImpossibleMfu
from .watch import default

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
