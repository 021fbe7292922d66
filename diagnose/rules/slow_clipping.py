"""Gradients are clipped tensor by tensor"""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.rules._examples import profile
from diagnose.rules._lines import STRAGGLER, LineRule, at

LEAST = 0.3
"""One call for all tensors still has to read each gradient, and write it."""

CALL_NS, ELEMENT_NS = 3_100, 0.25
"""Nanoseconds that one call for all tensors takes on a CPU, for each of them and each of their elements:
`benchmarks/optimizer_step.py` measured 3.1 to 3.2 us per tensor of 64 elements, 6.1 of 16,384 and 17 to 19
of 65,536, with one thread and with two; a loop that reads each norm takes 5.9 to 7.0, 8.7 and 19 to 22."""

VALUE_CALLS = ("clamp(", "clamp_(", ".clip(", "clip_(", "clip_grad_value_(")
BY_VALUE = "Replace the loop by clip_grad_value_ with foreach=True."


class SlowClipping(LineRule):
    """
    ## What it means
    A Python loop between backward and the optimizer, or a hook of each weight, takes the norm of each
    gradient, or scales it: several small operations per tensor, and a wait for each value that it reads.

    ## What to do
    Use `torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)`: one call for all tensors,
    and no value read. To log the norm, take what it returns, every N steps.

    ## When it is wrong
    Clipping that differs from tensor to tensor.
    """

    explains = (STRAGGLER,)
    idiom = "clip"
    beside = ("log", "whole")
    least = LEAST
    what = "Clipping gradients, or taking their norms, one by one"
    assumption = "a call for all tensors at once costs little beside the loop"
    fix = (
        "Replace the loop by clip_grad_norm_ with foreach=True, which returns the norm of all, or by"
        " torch._foreach_norm where each is wanted, and do not read the values in each step."
    )
    code = (
        'norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"), foreach=True)'
        "  # your limit, where you clip"
    )
    fires_on = (
        profile(other_ms=12, where=(at("total += p.grad.norm().item() ** 2", 0.1, "clip", "sync"),)),
        profile(other_ms=12, where=(at("clip(parameters)", 0.03, "clip", phase=Phase.OPTIMIZER),)),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("p.grad.clamp_(-1, 1)", 0.01, "clip"),)),
        profile(other_ms=12, where=(at("average.mul_(decay)", 0.1, "ema"),)),
        profile(other_ms=12, where=(at("torch._foreach_mul_(grads, coef)", 0.1, "clip", "whole"),)),
    )

    def remains_ns(self, profile: Profile, lines: Sequence[SourceLine]) -> float:
        """See `LineRule.remains_ns`. How often a line runs that stands under a condition is not known."""
        if profile.run.device != "cpu" or any(line.every for line in lines):
            return 0.0
        return sum(
            CALL_NS * optimizer.num_tensors + ELEMENT_NS * optimizer.num_elements
            for optimizer in profile.program.optimizers
        )

    def cure(self, line: SourceLine) -> tuple[str, str]:
        """See `LineRule.cure`. Clipping by value is another thing than by norm."""
        if any(call in line.text for call in VALUE_CALLS):
            return (
                BY_VALUE,
                "torch.nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=True)  # your limit",
            )
        return super().cure(line)
