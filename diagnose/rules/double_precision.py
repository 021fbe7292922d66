"""The model computes in float64"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Program
from diagnose.core.units import format_bytes, format_share
from diagnose.rules._compute import model_ns, of_model
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_PART = 0.5
"""Part of the parameters' bytes in float64: a few statistics may well be."""

SAVED = {"cpu": (0.25, 0.5, 0.6), "other": (0.4, 0.85, 0.97)}
"""Half the bytes and twice the numbers per instruction on a CPU; most GPUs have 2 to 64 times fewer units
for float64."""


def of_type(dtype: str, device: str = "cpu") -> Program:
    return Program(
        models=(Model(kind="Net", device=device, num_tensors=10, param_bytes=10**7, dtypes={dtype: 10**7}),)
    )


class DoublePrecision(Rule):
    """
    ## What it means
    Parameters are 64-bit numbers, often because data came from NumPy and the model was converted to match.
    Everything takes twice the memory and at least twice the time.

    ## What to do
    Convert the data instead: `x.float()` in the dataset, and leave the model in float32.

    ## When it is wrong
    Simulations and gradients checks that need the digits.
    """

    needs = ("program.models",)
    fires_on = (profile(program=of_type("float64")), profile(program=of_type("float64", "cuda")))
    silent_on = (profile(program=of_type("float32")), profile(program=of_type("bfloat16")))

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return bool(profile.program.models)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        models = profile.program.models
        whole = sum(model.param_bytes for model in models)
        double = sum(model.dtypes.get("float64", 0) for model in models)
        if not whole or double < MIN_PART * whole:
            return None
        low, expected, high = SAVED["cpu" if models[0].device == "cpu" else "other"]
        time_ns = model_ns(profile)
        return Finding(
            rule=self.name,
            summary=f"{format_share(double / whole)} of the parameters are float64.",
            lost_ns=of_model(profile, expected),
            low_ns=low * time_ns,
            high_ns=high * time_ns,
            assumption="float32 halves the bytes and doubles the numbers per instruction",
            evidence=(f"{format_bytes(double)} of {format_bytes(whole)} of the parameters are float64.",),
            fix="Train in float32.",
            code="model.float(); x = x.float()",
        )
