"""A model that writes, word by word, what it is then trained on."""

from __future__ import annotations

import pytest

from tests.sampled_script import PASSES, Script

WRITES = """
def draft(rows, length):
    for _ in range(length):
        logits = net(rows)[:, -1]
        rows = cat([rows, multinomial(logits.softmax(1), 1)], 1)
    return rows

def encode(rows):
    with no_grad():
        return frozen(rows).multinomial(1)

for step in range(100):
    rows = draft(starts, 20)
    seen = encode(rows)
    texts = policy.generate(prompts)
    judged = draft(probes, 20)
    loss = criterion(net(rows, seen, texts))
    loss.backward()
    optimizer.step()
    print(judged)
"""
SITES = [("criterion(net", "forward"), *PASSES]


@pytest.mark.parametrize(
    ("stack", "writes"),
    [
        (("logits = net", "rows = draft"), True),
        (("rows = cat", "rows = draft"), True),
        (("texts = policy.generate",), True),
        (("return frozen(rows)", "seen = encode"), False),  # once, and not in a loop
        (("logits = net", "judged = draft"), False),  # nobody trains on it
        (("seen = encode",), False),
        (("logits = net",), False),  # from where is not known
    ],
)
def test_what_a_model_writes_and_the_loop_trains_on_is_told_by_its_text(
    stack: tuple[str, ...], writes: bool
):
    script = Script(WRITES, SITES, [("evaluation", "logits = net", "rows = draft")])
    assert script.roles.writes_batch(script.stack(*stack)) == writes


def test_a_loop_that_draws_nothing_writes_nothing():
    text = WRITES.replace("multinomial(logits.softmax(1), 1)", "logits").replace(".generate(", ".encode(")
    script = Script(text, SITES)
    assert not script.roles.writes_batch(script.stack("logits = net", "rows = draft"))
    assert not script.roles.writes_batch(script.stack("texts = policy.encode"))
