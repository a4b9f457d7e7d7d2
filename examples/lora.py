"""DiLoCo with LoRA: only what is trained travels between the islands, here the adapters.

Needs `pip install peft`. Two islands on this machine:

    hf-diloco launch --islands 2 -- python examples/lora.py

The small model with random weights stands in for one that you load with `from_pretrained`. Island 0's adapters are
sent to all at the start; the frozen weights are not, so load the same ones everywhere.
"""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from hf_diloco import DiLoCoCallback, DiLoCoConfig
from hf_diloco.apps.data.build import build_datasets
from hf_diloco.apps.data.embedded import embedded_documents
from hf_diloco.apps.data.sources import DataBlock
from hf_diloco.apps.lm.tokenizer import train_byte_level_bpe


def main() -> None:
    """Trains one island's adapters."""
    config = DiLoCoConfig(sync_every=5, outer_momentum=0.5)
    set_seed(42)  # the frozen weights must be equal on all islands
    tokenizer = train_byte_level_bpe(embedded_documents(), vocab_size=1000)
    data = build_datasets(DataBlock(sequence_length=64), tokenizer, config.island, config.num_shares)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    args = TrainingArguments(
        output_dir=f"runs/lora/island-{config.island}",
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=10,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, args, train_dataset=data.train, callbacks=[DiLoCoCallback(config)])
    trainer.train()
    trained, whole = model.get_nb_trainable_parameters()
    rounds = [entry for entry in trainer.state.log_history if "diloco/bytes_sent" in entry]
    print(
        f"island {config.island}: {trained:,} of {whole:,} parameters trained, "
        f"{rounds[-1]['diloco/bytes_sent']:,.0f} bytes sent a round"
    )


if __name__ == "__main__":
    main()
