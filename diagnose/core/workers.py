"""What the reports of worker processes and those who read them agree on."""

from __future__ import annotations

PER_OCTAVE = 4
"""Buckets of the histogram of a worker's batches per doubling of their time: a bucket is 19 % wide."""

NOT_TRAINING = -1
"""Stands for the index of a loader that does not feed training."""
