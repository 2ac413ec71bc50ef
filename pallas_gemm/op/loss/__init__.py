"""The last layer of a language model and its loss, without the logits."""
