"""Packs a trace into the run's folder, no larger than was promised, and whole as far as it goes."""

from __future__ import annotations

import zlib
from pathlib import Path

MAX_BYTES = 200_000_000
"""Of a packed trace: about 2 GB of text, which no viewer opens any more."""

BLOCK = 1 << 20
GZIP = 31
FASTEST = 1

BETWEEN = b"\n  },"
"""What Kineto writes between two events."""

END = b"\n  }\n  ]}\n"


def pack(source: Path, target: Path, max_bytes: int = MAX_BYTES) -> bool:
    """Compresses a trace; says whether its end had to be left out. Lets go of the interpreter meanwhile.

    A trace that is cut ends after a whole event, so that every viewer opens it.

    Raises:
        OSError: If it cannot be written; then nothing is left of it.
    """
    block = min(BLOCK, max(1024, max_bytes // 4))
    packer = zlib.compressobj(FASTEST, zlib.DEFLATED, GZIP)
    written = 0
    cut = False
    try:
        with source.open("rb") as read, target.open("wb") as out:
            text = read.read(block)
            while text:
                following = read.read(block)
                # What a block becomes is known only then; it is never longer than it was.
                cut = bool(following) and written + 2 * block > max_bytes and BETWEEN in text
                if cut:
                    text = text[: text.rindex(BETWEEN)] + END
                written += out.write(packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH))
                if cut:
                    break
                text = following
            out.write(packer.flush())
    except OSError:
        target.unlink(missing_ok=True)
        raise
    return cut
