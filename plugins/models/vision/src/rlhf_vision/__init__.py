"""Image-text models of transformers as policies, and prompts with images."""
