"""Offline-first experiment tracking for LLM training: an append-only log, and tools to sync and query it."""

from __future__ import annotations
