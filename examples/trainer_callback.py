"""DiLoCo in an ordinary Trainer script: one more callback, and each island reads its own part of the data.

Two islands on this machine:

    hf-diloco launch --islands 2 -- python examples/trainer_callback.py

Without the launcher it is a run of one island. Nothing is downloaded: the text comes with Python.
"""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from hf_diloco import DiLoCoCallback, DiLoCoConfig
from hf_diloco.apps.data.build import build_datasets
from hf_diloco.apps.data.embedded import embedded_documents
from hf_diloco.apps.data.sources import DataBlock
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe


def main() -> None:
    """Trains one island."""
    # Few rounds need less outer momentum than the default 0.9, see docs/tuning.md.
    config = DiLoCoConfig(sync_every=10, outer_momentum=0.5)
    set_seed(42)
    tokenizer = train_byte_level_bpe(embedded_documents(), vocab_size=1000)
    # Disjoint shares of the training text, the same evaluation text on all islands.
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
    args = TrainingArguments(
        output_dir=f"runs/trainer_callback/island-{config.island}",  # each island its own
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        callbacks=[DiLoCoCallback(config)],
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]  # of the outer weights, equal on all islands: 40 is a multiple of 10
    print(f"island {config.island}: evaluation loss {loss:.4f}")


if __name__ == "__main__":
    main()
