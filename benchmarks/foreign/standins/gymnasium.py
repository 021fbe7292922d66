"""A stand-in for gymnasium's CartPole-v1: the same physics, and solved after a few dozen episodes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

STEP_S = 0.02
FORCE_N = 10.0


class CartPole:
    spec = SimpleNamespace(reward_threshold=40.0)

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.state = self.rng.uniform(-0.05, 0.05, 4)
        self.steps = 0
        return self.state.astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        _, speed, angle, turning = self.state
        force = FORCE_N if action == 1 else -FORCE_N
        pull = (force + 0.05 * turning**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * pull) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        drive = pull - 0.05 * turn * math.cos(angle) / 1.1
        self.state = self.state + STEP_S * np.array([speed, drive, turning, turn])
        self.steps += 1
        fell = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2095
        return self.state.astype(np.float32), 1.0, bool(fell), self.steps >= 500, {}


def make(name: str, **unused: object) -> CartPole:
    return CartPole()
