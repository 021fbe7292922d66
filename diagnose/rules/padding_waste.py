"""Much of each batch is padding"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Calls, Program
from diagnose.core.units import format_share
from diagnose.rules._compute import shares_of
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_SHARE = 0.15
"""Less padding remains even when sequences of like length are put together."""

MIN_OVERLONG = 0.05
"""Padding past a batch's longest row is of use to no row."""

SAVED = (0.5, 0.9, 1.1)
"""Of the time that goes with the tokens, what is saved when padding goes: some of a step does not depend
on the length."""


PACKED = ("PackPaddedSequence", "EmbeddingBag", "Nested", "Jagged", "Varlen", "VarLen")
"""Parts of the names of operations that leave padding out."""

RECURRENT = ("Rnn", "Lstm", "LSTM", "Gru", "GRU", "UnsafeSplit")
"""Parts of the names of operations that are recurrent layers, or their gates."""

NEAR = 0.15
"""Products whose rows are within this of the tokens without padding compute these alone. Batches differ."""

PER_TOKEN = 0.1
"""Products whose rows are within this of the tokens, padding included, compute something for each."""

HALF = Calls(num_steps=4, padding_share=0.5, padded_tokens=2048)
BESIDE = replace(HALF, padded_beside=True)
MASKED = replace(HALF, padded_masked=True)
RECURS = Graph(num_nodes=9, names={"MkldnnRnnLayerBackward0": 1})
ENCODES = Graph(num_nodes=9, names={"ConvolutionBackward0": 8}, product_rows=2000)


class PaddingWaste(Rule):
    """
    ## What it means
    Sequences of different lengths are filled up to one length, and the model computes the filling like
    everything else.

    The gain: the model's time goes with the number of tokens, that of its attention with the square.

    ## What to do
    Pad to the longest sequence of the batch, not of the data set; put sequences of like length together, or
    pack several into one row.

    ## When it is wrong
    Fixed shapes are wanted, for a compiler or an accelerator that needs them. A model that leaves the
    filling out is not named, if its graph shows that: by packed sequences, nested tensors or bags of
    embeddings, or by products of as many rows as there are tokens without it. Token ids that stand beside a
    model's first input are named only where most products have a row for each token; what only a mask tells
    of, also in recurrent layers. Where a mask says that sequences end early, they may have been cut for the
    model to continue them, which is no padding, and is known where the loader's batch has the rest.
    """

    needs = ("program.calls.padding_share",)
    fires_on = (
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.5))),
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.2))),
        profile(program=Program(calls=HALF, graph=Graph(num_nodes=9, product_rows=2048))),
        profile(program=Program(calls=HALF, graph=Graph(num_nodes=9, product_rows=32))),
        profile(program=Program(calls=BESIDE, graph=Graph(num_nodes=9, product_rows=2000))),
        profile(program=Program(calls=MASKED, graph=Graph(num_nodes=9, product_rows=2000))),
        profile(program=Program(calls=MASKED, graph=RECURS)),
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.08, overlong_share=0.08))),
    )
    silent_on = (
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.08))),
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.12, overlong_share=0.04))),
        profile(program=Program(calls=Calls(num_steps=4, padding_share=0.0))),
        profile(program=Program(calls=HALF, graph=Graph(num_nodes=9, names={"PackPaddedSequence": 1}))),
        profile(program=Program(calls=HALF, graph=Graph(num_nodes=9, product_rows=1060))),
        profile(program=Program(calls=BESIDE)),
        profile(program=Program(calls=MASKED)),
        profile(program=Program(calls=MASKED, graph=Graph(num_nodes=9, product_rows=32))),
        profile(program=Program(calls=MASKED, graph=ENCODES)),
        profile(program=Program(calls=BESIDE, graph=Graph(num_nodes=9, product_rows=32))),
        profile(program=Program(calls=BESIDE, graph=ENCODES)),
    )

    def applies(self, profile: Profile) -> bool:
        """Only a batch of token ids can be padded."""
        return profile.throughput.tokens_per_s is not None or bool(
            profile.program.calls and profile.program.calls.padding_share
        )

    def check(self, profile: Profile) -> Finding | None:
        calls = profile.program.calls
        assert calls is not None and calls.padding_share is not None
        overlong = calls.overlong_share or 0.0
        share = calls.padding_share if calls.padding_share >= MIN_SHARE else overlong
        if share < MIN_OVERLONG or leaves_padding_out(profile.program):
            return None
        if calls.padded_beside and not computes_each(profile.program):
            return None
        if calls.padded_masked and not (computes_each(profile.program) or goes_on(profile.program)):
            return None
        parts = of_tokens(profile, share)
        lost = {phase: part * profile.spent_ns(phase) for phase, part in parts.items()}
        low, expected, high = SAVED
        whole = sum(lost.values())
        evidence = [
            f"{format_share(calls.padding_share)} of the tokens in {calls.num_steps} steps are one value"
            " that fills up the rows' ends."
        ]
        if overlong >= MIN_OVERLONG:
            evidence.append(
                f"{format_share(overlong)} of the tokens lie past the longest row of their own batch."
            )
        return Finding(
            rule=self.name,
            summary=f"{format_share(share)} of the tokens are padding"
            + (" past the longest row of their batch." if share == overlong else "."),
            lost_ns={phase: expected * ns for phase, ns in lost.items()},
            low_ns=low * whole,
            high_ns=min(high * whole, sum(profile.spent_ns(phase) for phase in lost)),
            assumption="the model's time goes with the number of tokens, that of attention with its square",
            evidence=tuple(evidence),
            fix="Pad each batch to its own longest row."
            if share == overlong
            else "Sort or bucket the samples by length, and pad each batch to its own longest.",
            code="ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)",
        )


def of_tokens(profile: Profile, share: float) -> dict[Phase, float]:
    """Returns the part of forward and of backward that this part of the tokens takes, each 0 to 1."""
    graph = profile.program.graph
    parts = {Phase.FORWARD: share, Phase.BACKWARD: share}
    if graph is not None:
        kinds = [shares_of(work, graph) for work in (graph.attention, graph.fused_attention)]
        for phase in parts:
            attention = min(1.0, sum(kind[phase] for kind in kinds))
            parts[phase] = (1 - attention) * share + attention * (1 - (1 - share) ** 2)
    return parts


def computes_each(program: Program) -> bool:
    """Whether the graph shows that the model is products with a row for each token: no convolutions, of
    pictures to which the tokens are a text."""
    calls, graph = program.calls, program.graph
    if graph is None or calls is None or not graph.product_rows or not calls.padded_tokens:
        return False
    if any("onvolution" in name for name in graph.names):
        return False
    return abs(graph.product_rows - calls.padded_tokens) <= PER_TOKEN * calls.padded_tokens


def goes_on(program: Program) -> bool:
    """Whether the graph has a recurrent layer, which goes from each token to the next."""
    names = program.graph.names if program.graph is not None else {}
    return any(part in name for name in names for part in RECURRENT)


def leaves_padding_out(program: Program) -> bool:
    """Whether the graph shows that the model computes only what is no padding."""
    calls, graph = program.calls, program.graph
    if graph is None or calls is None:
        return False
    if any(part in name for name in graph.names for part in PACKED):
        return True
    if not graph.product_rows or not calls.padded_tokens or calls.padding_share is None:
        return False
    filled = (1 - calls.padding_share) * calls.padded_tokens
    return abs(graph.product_rows - filled) <= min(NEAR * filled, calls.padded_tokens - graph.product_rows)
