"""The patches on the forwards of a decoder, of heads and of towers."""
