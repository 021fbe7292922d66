"""Convolutions convert their images to another memory layout and back"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Program
from diagnose.core.units import format_share
from diagnose.rules._device import DeviceRule, busy_ns, sets_the_pace
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import shared

MIN_SHARE = 0.03

LOW, HIGH = 0.7, 2.0
"""Some conversions remain at the edges; kernels for the other layout are often faster in themselves."""


def convolutional(channels_last: bool, num: int = 50) -> Program:
    model = Model(
        kind="ResNet",
        device="cuda",
        param_bytes=10**8,
        dtypes={"float16": 10**8},
        num_convolutions=num,
        channels_last=channels_last,
    )
    return Program(models=(model,))


class MemoryLayout(DeviceRule):
    """
    ## What it means
    Images lie in memory channel by channel. The tensor cores' convolutions want all channels of a pixel
    together, so cuDNN converts what goes in and what comes out of them.

    ## What to do
    Convert the model once and each batch as it comes: `memory_format=torch.channels_last`.

    ## When it is wrong
    A model with operations that only know the usual layout converts at each of them. It reads the share of
    the kernels' time in conversions, by their names; no run on a GPU has tried it yet.
    """

    needs = ("device.layout_share", "device.busy_share")
    actions = ("channels-last",)
    fires_on = (
        profile(device=card(layout_share=0.2), program=convolutional(False)),
        profile(device=card(layout_share=0.05), program=convolutional(False)),
    )
    silent_on = (
        profile(device=card(), program=convolutional(False)),
        profile(device=card(layout_share=0.2), program=convolutional(True)),
        profile(device=card(layout_share=0.2, busy_share=0.4), program=convolutional(False)),
        profile(device=card(layout_share=0.2), program=convolutional(False, num=0)),
    )

    def applies(self, profile: Profile) -> bool:
        return super().applies(profile) and any(
            model.num_convolutions and model.channels_last is False for model in profile.program.models
        )

    def check(self, profile: Profile) -> Finding | None:
        share = profile.device.layout_share
        assert share is not None
        lost_ns = share * busy_ns(profile)
        if lost_ns < MIN_SHARE * profile.step_time_ns or not sets_the_pace(profile):
            return None
        model = next(model for model in profile.program.models if model.channels_last is False)
        return Finding(
            rule=self.name,
            summary=f"Converting between memory layouts takes {format_share(share)} of the device's time.",
            lost_ns=shared(profile, lost_ns),
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, busy_ns(profile)),
            assumption="conversions go, and the convolutions take as long as now",
            evidence=(
                f"{format_share(share)} of the kernels' time are conversions of layouts.",
                f"The weights of the {model.num_convolutions} convolutions of {model.kind} are not stored"
                " channels last.",
            ),
            fix="Convert the model before the loop, and each batch of images on the device.",
            code="model = model.to(memory_format=torch.channels_last)",
            actions=self.actions,
        )
