"""The kinds of models that every run has: they claim no path, and load what no other kind claims."""

from rlhf_core import Component, Section

causal_lm = Component("Causal LM of transformers", Section, "rlhf_models.causal_lm:CausalLM")
sequence_classification = Component("Score model of transformers", Section, "rlhf_models.classifier:Classifier")
