"""Products of raw tensors: tensors in, tensors out, nothing of transformers. One folder an op."""
