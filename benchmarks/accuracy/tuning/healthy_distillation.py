"""A student learns from a teacher: two models called each step, on purpose."""

import torch
from torch import nn


def cnn(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, width, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class Distill:
    temperature = 2.0

    def __init__(self):
        self.student, self.teacher = cnn(16), cnn(24).eval().requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.01, momentum=0.9)

    def loss(self, images):
        with torch.no_grad():
            wanted = (self.teacher(images) / self.temperature).softmax(1)
        return nn.functional.cross_entropy(self.student(images) / self.temperature, wanted)


torch.manual_seed(0)
job = Distill()
images = torch.rand(10, 16, 3, 32, 32)
for number in range(140):  # the training loop
    job.optimizer.zero_grad()
    job.loss(images[number % 10]).backward()
    job.optimizer.step()
