"""Much of each batch is padding"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.program import Calls, Program
from diagnose.core.units import format_share
from diagnose.rules._compute import model_ns, of_model
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_SHARE = 0.15
"""Less padding remains even when sequences of like length are put together."""

SAVED = (0.5, 0.9, 1.1)
"""Time saved per token of padding that goes: some of a step does not depend on the length, and
attention depends on its square."""


class PaddingWaste(Rule):
    """
    ## What it means
    Sequences of different lengths are filled up to one length, and the model computes the filling like
    everything else.

    ## What to do
    Pad to the longest sequence of the batch, not of the data set; put sequences of like length together, or
    pack several into one row.

    ## When it is wrong
    Fixed shapes are wanted, for a compiler or an accelerator that needs them.
    """

    needs = ("program.calls.padding_share",)
    fires_on = (
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.5))),
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.2))),
    )
    silent_on = (
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.08))),
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.0))),
    )

    def applies(self, profile: Profile) -> bool:
        """Only a batch of token ids can be padded."""
        return profile.throughput.tokens_per_s is not None or bool(
            profile.program.calls and profile.program.calls.padding_share
        )

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        calls = profile.program.calls
        assert calls is not None and calls.padding_share is not None
        share = calls.padding_share
        if share < MIN_SHARE:
            return None
        whole = model_ns(profile)
        low, expected, high = (part * share for part in SAVED)
        return Finding(
            rule=self.name,
            summary=f"{format_share(share)} of the tokens are padding.",
            lost_ns=of_model(profile, expected),
            low_ns=low * whole,
            high_ns=min(high, 1.0) * whole,
            assumption="the model's time goes with the number of tokens",
            evidence=(
                f"{format_share(share)} of the tokens in {calls.num_steps} steps are one value that"
                f" fills up the"
                " rows' ends.",
            ),
            fix="Sort or bucket the samples by length, and pad each batch to its own longest.",
            code="DataLoader(..., batch_sampler=..., collate_fn=pad_to_longest)",
        )
