"""The container's CPU quota stops the process"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.profile import Profile
from diagnose.core.units import format_share
from diagnose.rules._cpus import delayed_share, spread
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_THROTTLED = 0.05
"""A quota that is used up in fewer periods is used up by bursts."""

MIN_DELAY = 0.03

BOUNDS = (0.5, 1.2)


class CpuQuota(Rule):
    """
    ## What it means
    The control group may use only so much CPU time in each tenth of a second. When that is used up, all
    threads stand still until the next period, in the middle of whatever they do.

    ## What to do
    Raise the quota (`docker --cpus`, `resources.limits.cpu`), or use no more threads and workers than it
    has CPUs: eight threads use a quota of two CPUs up in a quarter of each period.

    ## When it is wrong
    A quota that another process of the same group uses up.
    """

    needs = ("host.throttled_share", "host.runnable_share")
    actions = ("set-threads",)
    explains = ("thread-oversubscription",)
    of_host = True
    fires_on = (
        profile(host=HostStats(quota_cpus=1.0, throttled_share=0.8, runnable_share=0.4, num_threads=2)),
    )
    silent_on = (
        profile(host=HostStats(quota_cpus=4.0, throttled_share=0.01, runnable_share=0.01)),
        profile(host=HostStats(runnable_share=0.4)),
    )

    def applies(self, profile: Profile) -> bool:
        return profile.host.quota_cpus is not None

    def check(self, profile: Profile) -> Finding | None:
        host = profile.host
        assert host.quota_cpus is not None and host.throttled_share is not None
        assert host.runnable_share is not None
        if host.throttled_share < MIN_THROTTLED or host.runnable_share < MIN_DELAY:
            return None
        lost = spread(profile, delayed_share(host))
        total = sum(lost.values())
        threads = host.num_threads or 1
        then = max(1, int(host.quota_cpus))
        fewer = f", or give torch {then} threads instead of {threads}" if threads > then else ""
        return Finding(
            rule=self.name,
            summary=f"A quota of {host.quota_cpus:.2g} CPUs stops the process in"
            f" {format_share(host.throttled_share)} of the periods",
            lost_ns=lost,
            low_ns=BOUNDS[0] * total,
            high_ns=min(BOUNDS[1] * total, profile.step_time_ns),
            assumption="the CPUs behind the quota are free",
            evidence=(
                f"cpu.stat counts a used-up quota in {format_share(host.throttled_share)} of the periods.",
                f"The training thread was ready to run and was not let for"
                f" {format_share(host.runnable_share)} of the time.",
            ),
            fix=f"Raise the container's CPU limit above {host.quota_cpus:.2g}{fewer}.",
            code=f"torch.set_num_threads({then})" if fewer else "",
            actions=self.actions if fewer else (),
        )
