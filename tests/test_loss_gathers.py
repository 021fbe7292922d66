"""What a loop gathers of other ranks for its loss, as contrastive ones do, is told from what it logs."""

from __future__ import annotations

import pytest

from diagnose.analysis.lines import source_lines
from diagnose.analysis.time_in_lines import gathering_ns
from diagnose.core.ledger import SLOT_OF
from diagnose.source.places import Places
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from tests.rank_logs import MS, NOBODY, log_of, steps_of
from tests.sampled_script import PASSES, Script

CONTRASTS = Script(
    """
    def from_all(z):
        others = [torch.empty_like(z) for _ in range(world)]
        dist.all_gather(others, z.detach())
        return torch.cat(others)

    for x, y in batches:
        z = normalize(model(x))
        everyone = [torch.empty_like(z) for _ in range(world)]
        dist.all_gather(everyone, z.detach())
        labels = from_all(y)
        shown = from_all(z.detach())
        loss = cross_entropy(z @ torch.cat(everyone).T, labels)
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        dist.all_gather(seen, logged)
        loss.backward()
        optimizer.step()
        board.write(logged, seen, shown)
    """,
    [("model(x", "forward"), *PASSES],
)


@pytest.mark.parametrize(
    ("stack", "is_for_loss"),
    [
        (("dist.all_gather(everyone",), True),
        (("dist.all_gather(others", "labels = from_all"), True),
        (("dist.all_gather(others", "shown = from_all"), False),
        (("dist.all_reduce(logged",), False),
        (("dist.all_gather(seen",), False),
        (("loss.backward",), False),
        (("z = normalize(model(x",), False),
    ],
)
def test_what_the_loss_gathers_is_told_from_what_is_logged_and_from_what_ddp_waits(stack, is_for_loss):
    assert CONTRASTS.roles.gathers_loss(CONTRASTS.stack(*stack)) is is_for_loss


def test_a_line_tells_what_it_gathers_for_the_loss(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("\n".join(CONTRASTS.lines), encoding="utf-8")
    stacks = [CONTRASTS.stack(part) for part in ("dist.all_gather(everyone", "dist.all_reduce(logged")]
    named = [(str(path), line, name) for ((_, line, name),) in stacks]
    slot = SLOT_OF["communication"]
    log = log_of(
        steps_of(60, forward=50, communication=50),
        samples=[(1, slot, (NOBODY, frame), weight) for frame, weight in zip(named, (60, 40), strict=True)],
        sites=[
            (kind, str(path), CONTRASTS.line(part), "<module>", 9)
            for part, kind in [("model(x", "forward"), *PASSES]
        ],
        meta={"samples": 100},
    )
    roles = Roles(log.sites, Sources())
    assert gathering_ns(log, log.steps[1:], 1, roles) == pytest.approx(30 * MS)
    lines = source_lines(log, log.steps[1:], 1, roles, Places(Sources()))
    gathers, logs = sorted(lines, key=lambda line: line.line)
    assert gathers.for_loss == gathers.share == pytest.approx(0.3)
    assert (logs.for_loss, logs.share) == (0.0, pytest.approx(0.2))
