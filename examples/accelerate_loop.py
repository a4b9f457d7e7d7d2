"""DiLoCo in a hand-written Accelerate loop, in the place of Accelerate's `LocalSGD`.

Two islands on this machine:

    hf-diloco launch --islands 2 -- python examples/accelerate_loop.py

Each island saves every 20 steps, and on Ctrl-C; with --resume at its end the command continues from there. Start an
island of several ranks with `accelerate launch` instead of `python`. Nothing is downloaded.
"""

from __future__ import annotations

import itertools
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hf_diloco import DiLoCoConfig, OuterLoop
from hf_diloco.apps.data.build import build_datasets
from hf_diloco.apps.data.embedded import embedded_documents
from hf_diloco.apps.data.sources import DataBlock
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe

NUM_STEPS = 40
SAVE_EVERY = 20


def main() -> None:
    """Trains one island."""
    config = DiLoCoConfig(sync_every=10, outer_momentum=0.5)
    set_seed(42)
    tokenizer = train_byte_level_bpe(embedded_documents(), vocab_size=1000)
    data = build_datasets(DataBlock(sequence_length=64), tokenizer, config.island, config.num_shares)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data.train, batch_size=8, shuffle=True)

    same_order = DataLoaderConfiguration(use_seedable_sampler=True)  # in which a resumed loop goes on where it was
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=same_order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    folder = f"runs/accelerate_loop/island-{config.island}"
    outer = OuterLoop(accelerator, model, optimizer, config, output_dir=folder, num_steps=NUM_STEPS)
    if "--resume" in sys.argv and (checkpoint := outer.common_checkpoint()):
        accelerator.load_state(str(checkpoint))
    with outer:
        begin, end = (step * accelerator.gradient_accumulation_steps for step in (outer.global_step, NUM_STEPS))
        for batch in itertools.islice(accelerator.skip_first_batches(loader, begin), end - begin):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                report = outer.step()  # counts optimizer steps; every tenth one is a round
            if report is not None:
                accelerator.print(
                    f"island {config.island}: round {report.round}, loss {loss.item():.4f}, "
                    f"{report.bytes_sent / 1e6:.1f} MB sent in {report.seconds_exchanging:.2f} s"
                )
            is_asked_to_stop = outer.should_stop()
            if accelerator.sync_gradients and (is_asked_to_stop or outer.global_step % SAVE_EVERY == 0):
                outer.save_checkpoint(limit=2)
            if is_asked_to_stop:
                return
        assert outer.on_boundary  # the model holds the outer parameters, equal on all islands
        if outer.report is not None:
            accelerator.print(f"island {config.island}: outer parameters {outer.report.outer_hash}")


if __name__ == "__main__":
    main()
