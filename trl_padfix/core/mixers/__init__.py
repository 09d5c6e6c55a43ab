"""The mixers of a decoder (modules in which tokens see each other), and the mode in which each runs when packed."""
