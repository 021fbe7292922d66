"""What makes an epoch's batches others than the last one's is a part of making them."""

from __future__ import annotations

import pytest

from diagnose.core.phases import Phase
from diagnose.rules.epoch_boundary_stall import EpochBoundaryStall
from tests.sampled_script import AFTER_OPTIMIZER, PASSES, Script

DATA, OTHER = Phase.DATA_WAIT, Phase.OTHER

PAIRS = """
    class Pairs(Dataset):
        def resample(self, epoch):
            self.pairs = draw(epoch)

        def shuffle(self):
            self._mix()

        def _mix(self):
            random.shuffle(self.pairs)

        def count(self):
            self.counted = tally(self.pairs)

        def __getitem__(self, i):
            return self.pair(i)

        def pair(self, i):
            return self.pairs[i]

    class Meter:
        def reset(self):
            self.pairs = 0

"""
LOOP = """
    bank = Pairs()
    loader = DataLoader(bank)
    for epoch in range(9):
        bank.resample(epoch)
        bank.shuffle()
        bank.pairs = mined(epoch)
        bank.count()
        val_set.resample(epoch)
        meter.reset()
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = model(x)
            bank.resample(loss)
            loss.backward()
            optimizer.step()
"""
SITES = [("for x, y", "next"), ("= model(x)", "forward"), *PASSES]


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("bank.resample(epoch)", DATA),
        ("bank.shuffle()", DATA),
        ("bank.pairs = mined", DATA),
        ("bank.count()", OTHER),
        ("val_set.resample", OTHER),
        ("meter.reset()", OTHER),
        ("sampler.set_epoch", OTHER),
        ("bank.resample(loss)", OTHER),
    ],
)
def test_what_sets_what_the_loader_reads_between_epochs_makes_batches(line, phase):
    assert Script(PAIRS + LOOP, SITES).phase(line, slot=AFTER_OPTIMIZER) is phase


def test_so_does_all_that_such_a_method_calls():
    script = Script(PAIRS + LOOP, SITES)
    assert script.phase("random.shuffle", "self._mix()", "bank.shuffle()", slot=AFTER_OPTIMIZER) is DATA
    assert script.phase("tally(self.pairs)", "bank.count()", slot=AFTER_OPTIMIZER) is OTHER


TRAINER = """
    class Trainer:
        def train_epoch(self):
            for x, y in self.loader:
                loss = self.step(x)

        def step(self, x):
            loss = self.model(x)
            loss.backward()
            self.optimizer.step()

        def fit(self):
            for epoch in range(9):
                self.train_set.resample(epoch)
                self.test_set.resample(epoch)
                self.table.resample(epoch)
                self.train_epoch()
"""


@pytest.mark.parametrize(
    ("line", "phase"),
    [("self.train_set.resample", DATA), ("self.test_set.resample", OTHER), ("self.table.resample", OTHER)],
)
def test_the_name_says_what_data_are_where_the_loader_is_made_elsewhere(line, phase):
    sites = [("in self.loader", "next"), ("= self.model(x)", "forward"), ("loss.backward", "backward")]
    seen = [("forward", "= self.model(x)", "= self.step(x)", "self.train_epoch()")]
    assert Script(PAIRS + TRAINER, sites, seen).phase(line, slot=AFTER_OPTIMIZER) is phase


HANDED = """
    def train_one_epoch(model, loader):
        for x, y in loader:
            loss = model(x)
            loss.backward()
            optimizer.step()

    def main():
        bank = Pairs()
        loader = DataLoader(bank)
        for epoch in range(9):
            bank.resample(epoch)
            bank.count()
            train_one_epoch(model, loader=loader)
"""


@pytest.mark.parametrize(("line", "phase"), [("bank.resample(epoch)", DATA), ("bank.count()", OTHER)])
def test_a_function_is_told_of_the_data_by_its_loader(line, phase):
    seen = [("forward", "= model(x)", "loader=loader")]
    assert Script(PAIRS + HANDED, SITES, seen).phase(line, slot=AFTER_OPTIMIZER) is phase


CORPUS = """
    class Corpus:
        def reshuffle(self):
            self.order.sort(key=hash)

        def note(self, loss):
            self.order = loss

        def batch(self, i):
            return self.rows[self.order[i]]

    for epoch in range(9):
        corpus.reshuffle()
        agent.reshuffle()
        for i in range(99):
            x = corpus.batch(i)
            x = agent.seen(x)
            loss = model(x)
            corpus.note(loss)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "phase"),
    [("corpus.reshuffle()", DATA), ("agent.reshuffle()", OTHER), ("corpus.note(loss)", OTHER)],
)
def test_without_a_loader_the_method_that_makes_a_batch_tells_what_it_is_made_of(line, phase):
    sites = [("= model(x)", "forward"), *PASSES]
    assert Script(CORPUS, sites).phase(line, slot=AFTER_OPTIMIZER) is phase


IN_PLACE = Script(
    """
    def mix(order):
        rng.shuffle(order)

    for epoch in range(9):
        random.shuffle(rows)
        texts.sort(key=len)
        shuffle(labels)
        mix(turns)
        history.sort(key=best)
        lengths.reverse()
        for i in turns:
            np.take(table, rows, out=buffer)
            np.take(table, lengths, out=shown)
            loss = model(encode(texts[i], rows[i]), labels, buffer)
            loss.backward()
            optimizer.step()
    """,
    [("= model(", "forward"), *PASSES],
)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("random.shuffle(rows)", DATA),
        ("texts.sort", DATA),
        ("shuffle(labels)", DATA),
        ("mix(turns)", DATA),
        ("out=buffer", DATA),
        ("history.sort", OTHER),
        ("lengths.reverse", OTHER),
        ("out=shown", OTHER),
    ],
)
def test_what_is_brought_into_another_order_in_place_is_made_batches_of(line, phase):
    assert IN_PLACE.phase(line, slot=AFTER_OPTIMIZER) is phase


def test_what_is_only_reordered_later_holds_nothing_that_was_computed():
    script = Script(
        """
        class Net(nn.Module):
            def __init__(self):
                self.rows = read()

            def mix(self):
                random.shuffle(self.rows)

            def loss(self, users):
                labels = look_up(self.rows)
                return dot(self.proj(users), labels)

        for users in batches:
            loss = net.loss(users)
            loss.backward()
            optimizer.step()
        """,
        [("self.proj(users)", "forward"), *PASSES],
        inside=[("forward", "self.proj(users)", "loss = net.loss")],
    )
    assert script.phase("labels = look_up", "loss = net.loss", slot=AFTER_OPTIMIZER) is DATA


SHUFFLES = Script(
    """
    for epoch in range(9):
        corpus.shuffle(epoch)
        players.shuffle(rng)
        names.shuffle(epoch)
        self.rng.shuffle(order)
        torch.linalg.inv(table, out=inverse)
        order.take(best, out=first)
        save_samples(fake, out=folder)
        for i in range(99):
            x = encode(corpus[i], order, inverse, first)
            loss = model(x)
            beta = min(1, epoch / 10)
            loss = loss + beta * kept(folder, rng)
            loss.backward()
            optimizer.step()
    """,
    [("= model(", "forward"), *PASSES],
)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("corpus.shuffle(epoch)", DATA),
        ("self.rng.shuffle(order)", DATA),
        ("torch.linalg.inv", DATA),
        ("order.take", DATA),
        ("players.shuffle(rng)", OTHER),
        ("names.shuffle(epoch)", OTHER),
        ("out=folder", OTHER),
    ],
)
def test_what_is_shuffled_by_its_own_method_is_not_what_the_method_is_given(line, phase):
    assert SHUFFLES.phase(line, slot=AFTER_OPTIMIZER) is phase


def test_without_a_loader_nobody_knows_that_steps_which_take_longer_begin_epochs():
    for example in EpochBoundaryStall.fires_on:
        finding = EpochBoundaryStall().check(example)
        assert finding is not None
        told = f"{finding.summary} {finding.fix} {finding.evidence[0]}"
        assert ("epoch" in told) is bool(example.program.loaders), told
