"""A user's script around `transformers.Trainer`: a tiny GPT-2 with random weights on random tokens.

Also runs on two ranks, as `torchrun --nproc-per-node 2 hf_trainer.py`.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Sentences(Dataset):
    """Counting sequences with a random start and stride."""

    def __init__(self, num_sentences: int, length: int, vocab_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(vocab_size, (num_sentences, 1), generator=generator)
        stride = torch.randint(1, 5, (num_sentences, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(length)) % vocab_size

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--output", default="out")
    parser.add_argument(
        "--callback", metavar="RUNS", help="measure with DiagnoseCallback, into this folder"
    )
    args = parser.parse_args()

    set_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=args.output,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Sentences(256, 32, config.vocab_size, seed=0),
        eval_dataset=Sentences(32, 32, config.vocab_size, seed=1),
    )
    if args.callback:
        from diagnose.callbacks.huggingface import DiagnoseCallback

        trainer.add_callback(DiagnoseCallback(run_dir=args.callback, quiet=True))
    trainer.train()
    if trainer.is_world_process_zero():
        print("final evaluation loss", round(trainer.state.log_history[-2]["eval_loss"], 6))
        torch.save(model.state_dict(), os.path.join(args.output, "weights.pt"))


if __name__ == "__main__":
    main()
