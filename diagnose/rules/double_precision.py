"""Some or all of the model computes in float64"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Model, Program
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._compute import of_model, of_work
from diagnose.rules._examples import profile
from diagnose.rules._lines import MAX_LINES, at, lost_of, named, share_of
from diagnose.rules.base import Rule
from diagnose.source.tensor_values import factors

MIN_PART = 0.5
"""Part of the parameters' bytes in float64 from which on all of the model is taken to be: a few statistics
may well be."""

MIN_SHARE = 0.02
"""Part of the step that must be won by less: the end of a loss, say, is often summed up in float64."""

SAVED = {"cpu": (0.25, 0.5, 0.6), "other": (0.4, 0.85, 0.97)}
"""Half the bytes and twice the numbers per instruction on a CPU; most GPUs have 2 to 64 times fewer units
for float64."""

CONVERT = "Convert the constant to float32 once, and then nothing that it is multiplied with."
CONSTANT = 'self.register_buffer("basis", basis.float())'
OF_NO_MODULE = "w = torch.tensor(values, dtype=torch.float32, requires_grad=True); x = x.float()"


def of_type(dtype: str, device: str = "cpu") -> Program:
    return Program(
        models=(Model(kind="Net", device=device, num_tensors=10, param_bytes=10**7, dtypes={dtype: 10**7}),)
    )


def in_part(ms: float, *, of_modules: bool = True) -> Program:
    """A model in float32, or weights of no module, and some operations in float64 all the same."""
    whole = Work(num_ops=100, backward_ns=40e6, forward_ns=20e6)
    part = Work(num_ops=8, backward_ns=ms * 1e6, forward_ns=ms * 0.5e6)
    models = of_type("float32").models if of_modules else ()
    return Program(models=models, graph=Graph(num_nodes=200, total=whole, double=part))


def with_constant(name: str, device: str = "cpu") -> Program:
    model = replace(of_type("float32", device).models[0], double_constants=(name,))
    return Program(models=(model,))


PRODUCT = at("h = (x.double() @ self.basis).float()", 0.1, phase=Phase.FORWARD)


class DoublePrecision(Rule):
    """
    ## What it means
    Parameters are 64-bit numbers, or a tensor among them is: often because data came from NumPy and the
    model was converted to match, or a constant was computed with care and never converted back. What it
    is multiplied with becomes float64 too, and takes twice the memory and at least twice the time.

    ## What to do
    Convert the data instead: `x.float()` in the dataset, and leave the model in float32.

    ## When it is wrong
    Simulations and gradients checks that need the digits.
    """

    needs = ("program.models",)
    fires_on = (
        profile(program=of_type("float64")),
        profile(program=of_type("float64", "cuda")),
        profile(program=in_part(20)),
        profile(program=in_part(20, of_modules=False)),
        profile(program=with_constant("basis"), where=(PRODUCT,)),
    )
    silent_on = (
        profile(program=of_type("float32")),
        profile(program=of_type("bfloat16")),
        profile(program=in_part(0.5)),
        profile(program=in_part(0.5, of_modules=False)),
        profile(program=with_constant("window"), where=(PRODUCT,)),
        profile(program=with_constant("basis"), where=(replace(PRODUCT, share=0.01),)),
        profile(
            program=with_constant("basis"),
            where=(replace(PRODUCT, text="h = x @ self.basis.float()"),),
        ),
        profile(program=with_constant("basis"), where=(replace(PRODUCT, phase=Phase.EVALUATION),)),
        profile(program=with_constant("basis", "cuda"), where=(PRODUCT,)),
    )

    def applies(self, profile: Profile) -> bool:
        graph = profile.program.graph
        return bool(profile.program.models) or (graph is not None and graph.double.num_ops > 0)

    def check(self, profile: Profile) -> Finding | None:
        models, graph = profile.program.models, profile.program.graph
        whole = sum(model.param_bytes for model in models)
        double = sum(model.dtypes.get("float64", 0) for model in models)
        device = models[0].device if models else profile.run.device
        low, expected, high = SAVED["cpu" if device == "cpu" else "other"]
        lines: Sequence[SourceLine] = ()
        spent: Mapping[Phase, float] = {}
        if whole and double >= MIN_PART * whole:
            spent = of_model(profile, 1.0)
        elif graph is not None and graph.double.num_ops:
            spent = of_work(profile, graph.double, graph)
        elif device == "cpu" and share_of(lines := _with_constants(profile)):
            spent = lost_of(profile, lines)
        time_ns = sum(spent.values())
        if expected * time_ns < MIN_SHARE * profile.step_time_ns:
            return None
        evidence = [
            f"{format_share(line.share)} of the time in {named(line)}." for line in lines[:MAX_LINES]
        ]
        if whole:
            evidence.append(
                f"{format_bytes(double)} of {format_bytes(whole)} of the parameters are float64."
            )
        if graph is not None and graph.double.num_ops:
            evidence.append(
                f"{graph.double.num_ops} of {graph.total.num_ops} operations of the model give float64:"
                f" {format_ms(time_ns)} of each step."
            )
        return Finding(
            rule=self.name,
            summary=f"{format_share(time_ns / profile.step_time_ns)} of each step is computed in float64.",
            lost_ns={phase: expected * ns for phase, ns in spent.items()},
            low_ns=low * time_ns,
            high_ns=high * time_ns,
            assumption="float32 halves the bytes and doubles the numbers per instruction",
            evidence=tuple(evidence),
            fix=CONVERT if lines else "Train in float32.",
            code=CONSTANT if lines else "model.float(); x = x.float()" if models else OF_NO_MODULE,
            file=lines[0].file if lines else "",
            line=lines[0].line if lines else 0,
        )


def _with_constants(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns the lines of the forward pass that multiply with a constant in float64. Where neither factor
    has a gradient, no node of the graph tells."""
    constants = {name for model in profile.program.models for name in model.double_constants}
    return tuple(
        line
        for line in profile.where
        if line.phase is Phase.FORWARD and not line.in_worker and constants & factors(line.text)
    )
