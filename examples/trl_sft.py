"""DiLoCo with a TRL trainer: supervised fine-tuning with the same callback.

Needs `pip install trl`. Two islands on this machine:

    hf-diloco launch --islands 2 -- python examples/trl_sft.py

The small model with random weights stands in for one that you load with `from_pretrained`; the data gives the first
line of a docstring of Python's library and asks for what follows.
"""

from __future__ import annotations

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from hf_diloco import DiLoCoCallback, DiLoCoConfig
from hf_diloco.apps.data.embedded import embedded_documents
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe


def main() -> None:
    """Trains one island."""
    config = DiLoCoConfig(sync_every=5, outer_momentum=0.5)
    set_seed(42)
    texts = [text for text in embedded_documents() if "\n" in text][:800]
    tokenizer = train_byte_level_bpe(texts, vocab_size=1000)
    pairs = [text.split("\n", maxsplit=1) for text in texts]
    examples = Dataset.from_dict(
        {"prompt": [first for first, _ in pairs], "completion": [f"\n{rest.lstrip()[:200]}" for _, rest in pairs]}
    )
    # Cut by islands first; the Trainer then cuts this share for the island's own ranks.
    share = examples.shard(num_shards=config.num_shares, index=config.island, contiguous=False)
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
    args = SFTConfig(
        output_dir=f"runs/trl_sft/island-{config.island}",
        max_steps=20,
        max_length=64,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=10,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        bf16=False,
    )
    trainer = SFTTrainer(
        model, args, train_dataset=share, processing_class=tokenizer, callbacks=[DiLoCoCallback(config)]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"island {config.island}: training loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
