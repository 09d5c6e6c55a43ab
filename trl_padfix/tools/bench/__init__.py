"""Times of a training step of TRL, padded and packed, side by side: `trl-padfix bench`."""
