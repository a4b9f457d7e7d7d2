"""Image classification: image data and models of transformers, for islands and for decentralised nodes."""
