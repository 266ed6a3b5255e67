#!/bin/sh
# Exits with 0 if the condition of a task holds in this folder.
eval "$1"
