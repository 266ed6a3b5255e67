"""Families of image-text models: how each one writes images in a prompt, and the arguments of its forward."""
