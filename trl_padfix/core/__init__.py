"""The part without TRL: layouts, attention on packed rows, and `remove_padding`."""
