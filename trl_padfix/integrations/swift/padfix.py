"""
File for `--external_plugins` of ms-swift, which registers the callbacks of [`trl_padfix.integrations.ms_swift`].

`python -m trl_padfix.integrations.swift.padfix` prints its path.
"""

if __name__ == "__main__":
    print(__file__)
else:
    import trl_padfix.integrations.ms_swift  # noqa: F401
