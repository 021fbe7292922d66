"""What an analysis may take beside the training that it looks at. Of its own: who asks imports no more."""

from __future__ import annotations

ANALYSE_SHARE = 0.01
"""A running job is analysed so seldom that it takes this part of one CPU at most."""

MAX_RECORDS = 20_000_000
"""Steps times ranks beyond which an analysis would take a minute of CPU time beside the training."""
