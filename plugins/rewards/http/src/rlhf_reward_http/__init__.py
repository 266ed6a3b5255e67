"""Remote rewards for the rlhf framework: a client, and a server for any installed reward."""
