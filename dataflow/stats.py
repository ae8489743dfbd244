"""Pure: what engines and pools say about themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Counts since the engine was entered, and what it holds at this moment."""

    admitted: int
    """Tags."""
    finished: int
    """Tags of which every node has fired."""
    abandoned: int
    """Tags given up after admission, failed ones included."""
    failed: int
    """Tags given up because a node raised."""
    firings: int
    """Firings that completed for live tags."""
    dropped_tokens: int
    """Tokens that came for tags already over."""
    live: int
    """Tags that hold a slot now."""
    still_running: int
    """Abandoned tags whose context a thread may hold now."""
    waiting: int
    """Callers waiting in `admit` now."""
    early_tokens: int
    """Tokens held now for tags not yet admitted."""
    backlog: int
    """Calls ready now for which the pool had no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Counts since the pool was entered, and what it holds at this moment."""

    threads: int
    accepted: int
    """Jobs taken in."""
    finished: int
    """Jobs whose sink has been called."""
    outstanding: int
    """Jobs accepted and not finished now: queued, running, or on their way back."""
    wakes: int
    """How often threads woke the loop; finished / wakes is how well completions batch."""
    elapsed_s: float
    """Since the pool was entered."""
    busy_s: float
    """Time in jobs that have ended, summed over threads."""
    busy_share: float
    """busy_s / (elapsed_s * threads)."""
    paced_s: float
    """Time in which threads rested to keep to their pace, summed over them."""
    queue_wait_s: float
    """Mean time from acceptance to start, over jobs that have ended; 0 before the first."""
