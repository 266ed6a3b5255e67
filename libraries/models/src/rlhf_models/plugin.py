"""The default model kinds. They do not claim any path and load every model that other kinds do not claim."""

from rlhf_core import Component, Section

causal_lm = Component("Causal LM from transformers", Section, "rlhf_models.causal_lm:CausalLM")
sequence_classification = Component("Score model from transformers", Section, "rlhf_models.classifier:Classifier")
