"""`diagnose patch`: what tuning kept, as a change of the script."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from diagnose.cli._output import Run, RunDir, root_of_runs, show
from diagnose.core.errors import DiagnoseError


def patch(
    run: Run = None,
    run_dir: RunDir = None,
) -> None:
    """Prints what tuning kept as a diff: diagnose patch | git apply."""
    from diagnose.analysis.profile import first_log, load_profile
    from diagnose.report._patch import patch_of
    from diagnose.store.runs import read_manifest, resolve_run

    folder = resolve_run(run, root_of_runs(run_dir))
    profile, log = load_profile(folder), first_log(folder)
    if profile.tuning is None:
        raise DiagnoseError(
            f"{profile.run.id} was not tuned.\nTune it: diagnose run --tune {profile.run.script}"
        )
    if not profile.tuning.kept:
        raise DiagnoseError(f"{profile.run.id}: tuning kept nothing; there is nothing to change.")
    here = Path.cwd()
    started_in = here / str(read_manifest(folder).get("cwd") or "")
    try:
        written = patch_of(profile, here, log.sources if log is not None else {}, started_in)
    except OSError as error:
        raise DiagnoseError(f"diagnose patch: cannot read {error.filename}: {error.strerror}.") from error
    if not written.diff:  # `git apply` of nothing would fail in words of its own
        raise DiagnoseError(
            "diagnose patch: nothing to write into the script.\n" + "\n".join(written.left_out)
        )
    show(written.diff)
    if written.folder != here:
        place = shlex.quote(str(written.folder))
        print(f"diagnose: apply it in {place}: diagnose patch ... | git -C {place} apply", file=sys.stderr)
    for reason in written.left_out:
        print(f"diagnose: {reason}", file=sys.stderr)
