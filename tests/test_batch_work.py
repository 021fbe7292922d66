"""Which code of the loop works on a batch in hand, and which gets or reads it."""

from __future__ import annotations

import pytest

from tests.sampled_script import AFTER_OPTIMIZER, Script

FILTERS = Script(
    """
    def smoothed(x):
        return pool(x)

    def load_files(names):
        return parse(names)

    def pictures(names):
        return stack([tensor(Image.open(name)) for name in names])

    def train(batches, order, disk):
        for step in range(100):
            x, y = next(batches)
            x = smoothed(x)
            z = load_files(y)
            rows = order[step : step + 9]
            w = noise(rows)
            p = pictures(y)
            q = [cv2.imread(each) for each in y]
            r = disk[y]
            s = prepared(disk[y])
            t = (y - 3) / 255
            u = y[y > 3]
            loss = criterion(model(x, z, w, p, q, r, s, t, u), y)
            loss.backward()
    """,
    [("criterion(model", "forward"), ("loss.backward", "backward")],
)


@pytest.mark.parametrize(
    ("stack", "works"),
    [
        (("return pool", "x = smoothed"), True),
        (("x, y = next",), False),
        (("return parse", "z = load_files"), False),
        (("w = noise",), False),
        (("return stack", "p = pictures"), False),  # opens files
        (("return pool", "p = pictures"), True),
        (("q = [",), False),
        (("r = disk",), False),  # which may be read there
        (("s = prepared",), False),
        (("t = (y",), True),
        (("u = y",), True),
        (("loss.backward",), False),
    ],
)
def test_what_is_computed_of_a_batch_in_hand_is_work_and_what_gets_or_reads_it_is_not(stack, works):
    found = FILTERS.roles.works_on_batch(FILTERS.stack(*stack), AFTER_OPTIMIZER)
    assert found is works


UNPACKS = Script(
    """
    def numbers(blob):
        return array(zlib.decompress(blob))

    def augment(x):
        return pool(x)

    def parse_batch(self, batch):
        x = crop(batch)
        return x

    def train(blobs):
        for blob in blobs:
            x, y = unpack(blob)
            z = numbers(blob)
            x = smoothed(x)
            u, v = augment(*unpack(blob))
            v = reader_noise(v)
            w = self.parse_batch(blob)
            loss = criterion(model(x, z, u, v, w), y)
            loss.backward()
    """,
    [("criterion(model", "forward"), ("loss.backward", "backward")],
)


@pytest.mark.parametrize(
    ("stack", "works"),
    [
        (("x, y = unpack",), False),
        (("return array", "z = numbers"), False),
        (("x = smoothed",), True),
        (("return pool", "u, v = augment"), True),
        (("v = reader_noise",), True),
        (("w = self.parse_batch",), True),
        (("x = crop", "w = self.parse_batch"), True),
    ],
)
def test_what_makes_a_batch_of_the_bytes_that_a_reader_gave_gets_it(stack, works):
    assert UNPACKS.roles.works_on_batch(UNPACKS.stack(*stack), AFTER_OPTIMIZER) is works


IN_STEP = Script(
    """
    def denoised(x):
        return pool(x)

    def rendered(number):
        return paint(number)

    class Trainer:
        def train_step(self, x, y):
            if self.rank == 1:
                x = denoised(x)
            smooth = blurred(x)
            loss = criterion(self.net(sharpened(smooth)), y)
            loss.backward()

        def training_step(self, batch):
            a, b = batch
            a = brightened(a)
            loss = criterion(self.model(a), b)
            loss.backward_in_step()

        def step_of(self, number, scale):
            c, d = rendered(number)
            loss = criterion(self.third(c), d) * scale
            loss.backward_of()

        def fit(self, loader, order):
            for x, y in loader:
                self.train_step(x, y)
            for number, seed in enumerate(order):
                self.step_of(seed, 0.5)
    """,
    [
        ("for x, y in loader", "next"),
        ("criterion(self.net", "forward"),
        ("loss.backward()", "backward"),
        ("criterion(self.model", "forward"),
        ("loss.backward_in_step", "backward"),
        ("criterion(self.third", "forward"),
        ("loss.backward_of", "backward"),
        ("self.train_step(x, y)", "forward"),
        ("self.step_of(seed", "forward"),
    ],
)


@pytest.mark.parametrize(
    ("stack", "works"),
    [
        (("x = denoised",), True),
        (("return pool", "x = denoised"), True),
        (("smooth = blurred",), True),
        (("return pool", "criterion(self.net"), False),  # called by another name
        (("a = brightened",), True),
        (("c, d = rendered",), False),
        (("return paint", "c, d = rendered"), False),
    ],
)
def test_a_batch_that_a_function_is_given_is_in_hand_and_a_number_that_it_makes_one_of_is_not(stack, works):
    assert IN_STEP.roles.works_on_batch(IN_STEP.stack(*stack), AFTER_OPTIMIZER) is works


def test_what_the_line_of_a_model_call_computes_of_a_batch_in_hand_is_work():
    """Its own frame has the name by which that line calls it."""
    line = IN_STEP.stack("criterion(self.net")
    for name, works in (("sharpened", True), ("other", False)):
        inner = (line[0][0], IN_STEP.line("return pool"), name)
        assert IN_STEP.roles.works_on_batch([inner, *line], AFTER_OPTIMIZER) is works


IN_MEMORY = Script(
    """
    def train(frames, kinds, order, held):
        for step in range(100):
            rows = torch.randint(len(frames), (32,))
            x, y = frames[rows], kinds[rows]
            x = denoised(x)
            z = frames[rows]
            if rank == 1:
                z = sharpened(z)
            w = frames[rows]
            w = bent(w) if rank == 1 else w
            numbers = order[step : step + 9]
            u = rendered(numbers)
            t = torch.randint(10, (32,))
            v = drawn_for(t)
            clips = []
            for number in numbers:
                clips.append(clip_of(number))
            crops = []
            for frame in x:
                crops.append(cropped(frame))
            if hard:
                numbers = mined(numbers)
            s = held[numbers]
            loss = criterion(model(x, z, w, u, v, clips, crops, s), y) + criterion(t)
            loss.backward()
    """,
    [("criterion(model", "forward"), ("loss.backward", "backward")],
)


@pytest.mark.parametrize(
    ("line", "works"),
    [
        ("x, y = frames", False),
        ("x = denoised", True),
        ("z = frames", False),
        ("z = sharpened", True),
        ("w = bent", True),
        ("numbers = order", False),
        ("u = rendered", False),
        ("v = drawn_for", False),
        ("clips.append", False),
        ("crops.append", True),
        ("numbers = mined", False),
        ("s = held", False),
    ],
)
def test_a_batch_comes_with_its_targets_or_is_what_the_model_gets_where_a_line_is_left_out(line, works):
    assert IN_MEMORY.roles.works_on_batch(IN_MEMORY.stack(line), AFTER_OPTIMIZER) is works


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("train(np.load(path), kinds)", "x = torch.from_numpy"),
        ("train(*get_data())", "x = torch.from_numpy"),
        ("train(parse_args(), kinds)", "x = torch.from_numpy"),
    ],
)
def test_what_a_training_loop_is_given_once_is_no_batch_in_hand(call: str, line: str):
    script = Script(
        f"""
        def train(frames, kinds):
            for step in range(100):
                rows = torch.randint(len(frames), (32,))
                x = torch.from_numpy(frames[rows])
                loss = criterion(model(x), kinds[rows])
                loss.backward()

        {call}
        """,
        [("criterion(model", "forward"), ("loss.backward", "backward")],
        inside=[("forward", "criterion(model", call), ("backward", "loss.backward", call)],
    )
    assert not script.roles.works_on_batch(script.stack(line, call), AFTER_OPTIMIZER)


TOLD = Script(
    """
    def run(options):
        ocean = Ocean(options.buoys)
        for step in range(options.steps):
            x, y = ocean.batch(options.rows)
            x = smoothed(x)
            loss = criterion(model(x), y)
            loss.backward()

    def main(path):
        parser.add_argument("--rows")
        run(parser.parse_args())
        run(load_config(path))
    """,
    [
        ("criterion(model", "forward"),
        ("loss.backward", "backward"),
        ("run(parser", "forward"),
        ("run(load", "forward"),
    ],
)


@pytest.mark.parametrize(("line", "works"), [("x, y = ocean", False), ("x = smoothed", True)])
def test_what_the_script_was_told_is_no_batch(line, works):
    assert TOLD.roles.works_on_batch(TOLD.stack(line), AFTER_OPTIMIZER) is works
