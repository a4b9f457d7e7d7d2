"""Text for language models: sources, each island's share, held-out evaluation, packing to a fixed length."""
