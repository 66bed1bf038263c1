"""``python -m identity_conv`` is the command ``identity-conv``."""

from .cli import main

if __name__ == "__main__":
    main()
