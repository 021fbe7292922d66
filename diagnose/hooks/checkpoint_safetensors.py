"""Time in saving state in the safetensors format, as Hugging Face libraries do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced
from diagnose.hooks.checkpoint import wrapped


class CheckpointSafetensorsHook(Hook):
    """Charges `safetensors.torch.save_file` to `checkpoint`.

    Libraries that import the function by name do so when they are imported themselves, which is after this.
    """

    requires = "safetensors.torch"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        # Not `import`: the package does not have its new submodule as an attribute yet.
        safetensors = sys.modules[self.requires]
        with replaced(safetensors, "save_file", wrapped(recorder)):
            yield
