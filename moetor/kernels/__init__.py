"""Products of raw tensors: tensors in, tensors out, nothing of models. One folder an op."""
