"""Small tools of core that know nothing of training: files, text, random numbers, memory."""
